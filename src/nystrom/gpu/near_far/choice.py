# Triton's stubs expect its own wrapper around numbers that a kernel is specialised to.
# pyright: reportArgumentType=false, reportCallIssue=false
r"""Heavy keys and clusters by Triton kernels: the same choice as in `nystrom.attention.parts.clusters`.

Launches: the means of segments, the scores of the keys with the mean queries, the order of the keys, the largest of
these by torch, all moves of the centres, and the nearest centre of each key; with masks, first the ranks of the real
tokens. Sums are added in a fixed order, so the same inputs give the same choice.

The choice is a custom operator of torch, see `nystrom.gpu.attention`; it has no gradient.
"""

from typing import Any

import torch
from torch import Tensor

from nystrom.gpu.arithmetic import INTERPRETED
from nystrom.gpu.attention import one_by_one
from nystrom.gpu.inputs import triton_dtype
from nystrom.gpu.launch import FLOAT32_PRECISION, check_launch, launching_on, power, shared_memory, splits
from nystrom.gpu.near_far import choice_kernels as kernels
from nystrom.landmarks import middle_of
from nystrom.precision import accumulator

# Largest choice that the kernels make: one program moves all centres of a head.
LARGEST_CLUSTERS, LARGEST_WIDTH = 256, 128
# Tokens that a program ranks, or sorts, at a time.
_RANKED, _SORTED = 4096, 512


def can_choose(num_clusters: int, width: int, dtype: torch.dtype) -> bool:
    """Whether the kernels take so many clusters of keys of this width; in float64, only Triton's interpreter does."""
    compiled = dtype != torch.float64 or INTERPRETED.value
    return compiled and num_clusters <= LARGEST_CLUSTERS and width <= LARGEST_WIDTH


@torch.no_grad()
def choose_by_kernels(
    q: Tensor,
    k: Tensor,
    keep: Tensor | None,
    query_keep: Tensor | None,
    *,
    num_means: int,
    num_heavy: int,
    num_clusters: int,
    iterations: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose heavy keys and clusters.

    Args:
        q: Queries (b, h, n, d).
        k: Keys (b, h, s, d).
        keep: (b, s) Real keys; None if all are.
        query_keep: (b, n) Real queries; None if all are.
        num_means: Mean queries whose attention decides which keys are heavy; a power of two, at most 16.
        num_heavy: Heavy keys g.
        num_clusters: Clusters m.
        iterations: Steps of k-means.
        scale: Factor on the scores.

    Returns:
        Positions of the heavy keys (b, h, g), which of them exist, and the cluster of each key (b, h, s) as int32.

    Raises:
        ValueError: The kernels cannot take these inputs; the message says what to do.
    """
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    # A compiler uses the operator directly.
    choice = _choice if torch.compiler.is_compiling() else _Choice.apply
    return choice(q, k, keep, query_keep, num_means, num_heavy, num_clusters, iterations, scale)


@torch.library.custom_op("nystrom::near_far_choice", mutates_args=())
def _choice(
    q: torch.Tensor,
    k: torch.Tensor,
    keep: torch.Tensor | None,
    query_keep: torch.Tensor | None,
    means: int,
    g: int,
    m: int,
    iterations: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Positions of the heavy keys, which of them exist, and the cluster of each key."""
    check_launch(1, {"q": q, "k": k, "v": k})
    with launching_on(q.device):
        return launch(q, k, keep, query_keep, means, g, m, iterations, scale)


@_choice.register_fake
def _(q, k, keep, query_keep, means, g, m, iterations, scale):
    b, h, s = k.shape[:3]
    heavy = q.new_empty(b, h, g, dtype=torch.long)
    return heavy, torch.empty_like(heavy, dtype=torch.bool), q.new_empty(b, h, s, dtype=torch.int32)


class _Choice(torch.autograd.Function):
    """The operator in the form that torch.func needs."""

    @staticmethod
    def forward(*inputs):
        return _choice(*inputs)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.mark_non_differentiable(*output)

    @staticmethod
    def backward(ctx, *gradients):
        return (None,) * 9

    @staticmethod
    def jvp(ctx, *tangents):
        return (None,) * 3

    @staticmethod
    def vmap(info, in_dims, *inputs):
        return one_by_one(_Choice, info, in_dims, inputs)


def launch(
    q: Tensor,
    k: Tensor,
    keep: Tensor | None,
    query_keep: Tensor | None,
    means: int,
    g: int,
    m: int,
    iterations: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the kernels; see `choose_by_kernels`."""
    (b, h, n, d), s, acc = q.shape, k.shape[2], accumulator(k.dtype)
    small: dict[str, Any] = {"dtype": acc, "device": k.device}
    whole: dict[str, Any] = {"dtype": torch.int32, "device": k.device}
    same: dict[str, Any] = {"MEANS": means, "D": d, "ACC": triton_dtype(acc), "BLOCK_D": power(d)}
    centre = middle_of(k, keep).contiguous()
    # One that is expanded over the batch is copied.
    keep, query_keep = (x if x is None else x.contiguous().view(torch.uint8) for x in (keep, query_keep))
    places, counts = _room(keep, whole)
    query_places, query_counts = _room(query_keep, whole)
    if keep is not None or query_keep is not None:
        kernels.near_far_ranks[(2 * b,)](
            query_keep, keep, query_places, places, query_counts, counts, n, s, BLOCK=_RANKED, num_warps=8
        )
    table = torch.empty(b, h, means + m, d, **small)
    kernels.near_far_segments[((means + m) * b * h,)](
        q,
        k,
        query_places,
        places,
        query_counts,
        counts,
        centre,
        table,
        q.stride()[:3],
        k.stride()[:3],
        h,
        b * h,
        n,
        s,
        m,
        BLOCK_N=64,
        num_warps=4,
        **same,
    )
    order, cluster = torch.empty(b, h, s, dtype=torch.long, device=k.device), torch.empty(b, h, s, **whole)
    _order(k, keep, centre, table, order, cluster, m, scale, small, same)
    top = order.topk(min(g, s), dim=-1).values
    heavy = torch.empty(b, h, g, dtype=torch.long, device=k.device)
    found = torch.empty(b, h, g, dtype=torch.bool, device=k.device)
    most = min(s, max(m, min(8 * m, -(-s // 4))))
    block_n, block_m = _blocks(d, acc, k.device)
    blocks = {"PRECISION": FLOAT32_PRECISION, "BLOCK_N": block_n, "BLOCK_M": min(block_m, power(m))}
    kernels.near_far_centres[(b * h,)](
        k,
        places,
        counts,
        top,
        centre,
        table,
        heavy,
        found.view(torch.uint8),
        cluster,
        torch.empty(b, h, most, **whole),
        k.stride()[:3],
        h,
        s,
        g,
        min(g, s),
        m,
        iterations - 1,
        most,
        BLOCK_G=64,
        num_warps=8,
        num_stages=1,
        **blocks,
        **same,
    )
    kernels.near_far_nearest[(-(-s // blocks["BLOCK_N"]) * b * h,)](
        k, counts, centre, table, cluster, k.stride()[:3], h, s, m, num_warps=4, num_stages=1, **blocks, **same
    )
    return heavy, found, cluster


def _blocks(width: int, acc: torch.dtype, device: torch.device) -> tuple[int, int]:
    """Tokens and centres of a tile, whose split parts fit into shared memory and, for the most part, into registers."""
    if power(width) * acc.itemsize <= 256:
        return 64, 64
    return (64, 32) if shared_memory(device) >= 163 * 1024 else (32, 32)


def _room(keep: Tensor | None, whole: dict[str, Any]) -> tuple[Tensor | None, Tensor | None]:
    """Room for the positions of the real tokens by rank, and for their number; None without a mask."""
    return (None, None) if keep is None else (torch.empty(keep.shape, **whole), torch.empty(keep.shape[0], **whole))


def _order(
    k: Tensor,
    keep: Tensor | None,
    centre: Tensor,
    table: Tensor,
    order: Tensor,
    cluster: Tensor,
    m: int,
    scale: float,
    small: dict[str, Any],
    same: dict[str, Any],
) -> None:
    """Sort the keys by the attention that they receive."""
    (b, h, s), means, block = k.shape[:3], same["MEANS"], 32 if same["BLOCK_D"] > 64 else 64
    spans, span = splits(s, b * h, means, block, k.device)
    scores = torch.empty(b, h, s, means, **small)
    tops, totals = (torch.empty(spans, b, h, means, **small) for _ in range(2))
    kernels.near_far_scores[(b * h * spans,)](
        k,
        keep,
        centre,
        table,
        scores,
        tops,
        totals,
        k.stride()[:3],
        h,
        b * h,
        s,
        m,
        span,
        SCALE=scale,
        PRECISION=FLOAT32_PRECISION,
        BLOCK_N=block,
        BLOCK_Q=power(means),
        num_warps=4,
        num_stages=2,
        **same,
    )
    kernels.near_far_order[(-(-s // _SORTED) * b * h,)](
        scores,
        tops,
        totals,
        keep,
        order,
        cluster,
        h,
        b * h,
        s,
        m,
        spans,
        MEANS=means,
        ACC=same["ACC"],
        BLOCK=_SORTED,
        num_warps=4,
    )
