"""Near and far attention across ranks.

- Near: each rank fetches from its neighbours the rest of the blocks that it holds only in part, and `reach` tokens
  around them. Blocks are counted from the first real token across all ranks.
- Heavy keys: each rank offers its g heaviest keys, with weights that share a normaliser, and the heaviest of all are
  chosen. All ranks hold them.
- Clusters: in each step of k-means, the ranks add up the sums over their parts of the sample, m (d + 1) numbers; in the
  end, the sums of their keys and values.
- Values outside a window: a rank knows the tokens around its own, and fetches sums over the other ranks, see `_beyond`.

Short sequences are exact: all ranks hold their keys and values. The communication depends on the options and the
number of ranks, not on n.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nystrom.attention.fused import fused_softmax
from nystrom.attention.options import NearFarOptions
from nystrom.attention.parts.clusters import (
    QUERY_MEANS,
    cluster_sizes,
    cluster_sums,
    nearest_cluster,
    open_where_empty,
    sampled_ranks,
    take_rows,
)
from nystrom.attention.parts.far_keys import FarKeys, attend_far, attend_with_bias, keys_of_blocks
from nystrom.attention.parts.order import NOT_REAL, first_in_order, in_order
from nystrom.landmarks import middle_of_some, places_of_middle
from nystrom.landmarks import take as take_places
from nystrom.parallel.communication import Ranks
from nystrom.parallel.halo import with_halo
from nystrom.parallel.positions_over_ranks import Tokens, find, segment_means, take, take_first
from nystrom.precision import at_least_float32
from nystrom.shapes import cut_blocks, score_scale


def near_far_over_ranks(
    ranks: Ranks,
    queries: Tokens,
    keys: Tokens,
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    v: Float[Tensor, "b h s e"],
    options: NearFarOptions,
    is_self: bool,
) -> Float[Tensor, "b h n e"]:
    """`near_far_attention` of the tokens of all ranks."""
    length = min(options.exact_up_to, keys.total) if is_self else 0
    short = keys.count <= length
    if not short.any():
        return _approximate(ranks, queries, keys, q, k, v, options, is_self)
    # All ranks hold the keys and values of the short sequences, and each its own queries.
    first = (take_first(ranks, keys, x, length) for x in (k, v))
    real = torch.arange(length, device=k.device) < keys.count[:, None]
    exact = fused_softmax(q, *first, keep=real, scale=options.scale)
    if short.all():
        return exact
    far = _approximate(ranks, queries, keys, q, k, v, options, is_self)
    return torch.where(short[:, None, None, None], exact.to(far.dtype), far)


def _approximate(
    ranks: Ranks,
    queries: Tokens,
    keys: Tokens,
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    v: Float[Tensor, "b h s e"],
    options: NearFarOptions,
    is_self: bool,
) -> Float[Tensor, "b h n e"]:
    q, k, v = at_least_float32(q), *(at_least_float32(x).contiguous() for x in (k, v))
    with torch.no_grad():
        mine = _choose(ranks, queries, keys, q, k, options)
    far = _far_keys(ranks, k, v, mine, options)
    return _blocks(ranks, keys, q, k, v, mine, far, options) if is_self else attend_far(q, far, options)


class _Mine(NamedTuple):
    """The chosen keys, as seen by one rank."""

    heavy: Int[Tensor, "b h g"]  # Places of the heavy keys among the rank's own keys
    owned: Bool[Tensor, "b h g"]  # Which of them the rank holds
    exists: Bool[Tensor, "b h g"]  # Which of them exist
    # The cluster of each of its keys, 0 ... m - 1; m for heavy keys and keys that are not real.
    cluster: Int[Tensor, "b h s"]


def _choose(
    ranks: Ranks,
    queries: Tokens,
    keys: Tokens,
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    options: NearFarOptions,
) -> _Mine:
    """Heavy keys and clusters, see `nystrom.attention.parts.clusters`."""
    m, real = options.num_clusters, keys.keep[:, None]
    k = k - middle_of_some(take(ranks, keys, k, places_of_middle(keys.count)))
    positions, exists = _heaviest(ranks, keys, segment_means(ranks, queries, q, QUERY_MEANS), k, options)
    place = (positions - keys.start).clamp(0, k.shape[2] - 1)
    owned = exists & (place == positions - keys.start) & real.expand(-1, k.shape[1], -1).gather(2, place)
    free = real & (torch.zeros_like(k[..., 0], dtype=torch.long).scatter_add(2, place, owned.long()) == 0)
    centres = segment_means(ranks, keys, k, m)
    filled = torch.arange(m, device=k.device) < keys.count[:, None]
    for wanted, counted in sampled_ranks(keys.count, keys.total, m, options.iterations):
        places, here = (x[:, None].expand(*k.shape[:2], -1) for x in find(keys, wanted))
        sample = take_rows(k, places)
        cluster = torch.where(
            free.gather(2, places) & here & counted[:, None], nearest_cluster(sample, centres, filled), m
        )
        sizes = cluster_sizes(sample, cluster, m)[..., None]
        sums = ranks.sum(torch.cat([cluster_sums(sample, cluster, m), sizes], dim=-1))
        centres = torch.where(sums[..., -1:] > 0, sums[..., :-1] / sums[..., -1:].clamp(min=1), centres)
    return _Mine(place, owned, exists, torch.where(free, nearest_cluster(k, centres, filled), m))


def _heaviest(
    ranks: Ranks, keys: Tokens, means: Float[Tensor, "b h r d"], k: Float[Tensor, "b h s d"], options: NearFarOptions
) -> tuple[Int[Tensor, "b h g"], Bool[Tensor, "b h g"]]:
    """Positions of the heaviest keys of all ranks, and which of them are real."""
    g, real = options.num_heavy, keys.keep[:, None]
    scores = (score_scale(k, options.scale) * means) @ k.mT
    scores = scores.masked_fill(~real[:, None], -torch.inf)
    logs = scores.logsumexp(dim=-1, keepdim=True)
    # A sequence may have no real key on this rank, or on none.
    top = ranks.largest(logs).clamp(min=torch.finfo(logs.dtype).min)
    logs = top + ranks.sum((logs - top).exp()).log()
    place = keys.start + torch.arange(k.shape[2], device=k.device)
    order = in_order((scores - logs).logsumexp(dim=2), place, real)
    own = F.pad(order, (0, g), value=NOT_REAL).topk(g, dim=-1).values
    return first_in_order(ranks.gather(own).movedim(0, -2).flatten(-2), g)


def _far_keys(
    ranks: Ranks, k: Float[Tensor, "b h s d"], v: Float[Tensor, "b h s e"], mine: _Mine, options: NearFarOptions
) -> FarKeys:
    """Heavy keys and clusters across all ranks."""
    m, tokens = options.num_clusters, torch.cat([k, v, torch.ones_like(k[..., :1])], dim=-1)
    heavy = torch.where(mine.owned[..., None], take_rows(tokens, mine.heavy), 0.0)
    both = ranks.sum(torch.cat([heavy, cluster_sums(tokens, mine.cluster, m)], dim=2))
    heavy, sums = both.split((options.num_heavy, m), dim=2)
    heavy_keys, heavy_values, _ = heavy.split((k.shape[-1], v.shape[-1], 1), dim=-1)
    keys, values, sizes = sums.split((k.shape[-1], v.shape[-1], 1), dim=-1)
    count = open_where_empty(sizes[..., 0].detach(), mine.exists)
    means = keys / count.clamp(min=1)[..., None]
    return FarKeys(heavy_keys, heavy_values, mine.exists, count, means, values)


def _blocks(
    ranks: Ranks,
    keys: Tokens,
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h n d"],
    v: Float[Tensor, "b h n e"],
    mine: _Mine,
    far: FarKeys,
    options: NearFarOptions,
) -> Float[Tensor, "b h n e"]:
    """Self-attention of the blocks that hold this rank's queries, shifted so that they begin with a block."""
    size, reach, m, n = options.block_size, options.reach, options.num_clusters, q.shape[2]
    around, beside = size - 1 + reach, -(-reach // size)
    nearby = with_halo(ranks, keys, torch.cat([k, v], dim=-1), around, around)
    # The halo is zero outside the sequence, which after the shift means m: no cluster.
    cluster = with_halo(ranks, keys, (mine.cluster - m)[..., None], around, around)[..., 0]
    held = keys.start - around + torch.arange(n + 2 * around, device=q.device)
    values = nearby[..., k.shape[-1] :]
    beyond = _beyond(ranks, keys, held, values, cluster + m, options).flatten(0, 1)
    # `before` counts the tokens of the first block that precede this rank's own; `beside` counts blocks on either side
    # that are needed only for `reach`.
    before = (keys.start - keys.first) % size
    length = (-(-(n + size - 1) // size) + 2 * beside) * size
    own = torch.arange(length, device=q.device) - before[:, None] - beside * size
    here, near = own + around, n + 2 * around
    low, high = (edge - keys.start for edge in _span(keys, ranks.rank, options))
    inside = (here >= 0) & (here < near) & (own >= low) & (own < high)
    place = here.clamp(0, near - 1)
    nearby = torch.where(inside[:, None, :, None], take_places(nearby, place), 0.0)
    cluster = torch.where(inside[:, None], cluster.gather(2, place[:, None].expand(*cluster.shape[:2], -1)), 0) + m
    # The results of other queries are not used.
    moved = take_places(q, own.clamp(0, n - 1)).flatten(0, 1)
    near_k, near_v = nearby.flatten(0, 1).split((k.shape[-1], v.shape[-1]), dim=-1)
    far = FarKeys(*(x.flatten(0, 1) for x in far))
    seen = keys_of_blocks(near_k, near_v, cluster.flatten(0, 1), far, options, beyond)
    out = attend_with_bias(cut_blocks(moved, size), seen, score_scale(q, options.scale)).flatten(1, 2)
    back = torch.arange(n, device=q.device) + before[:, None] + beside * size
    return take_places(out.unflatten(0, q.shape[:2]), back)


def _span(keys: Tokens, rank: int, options: NearFarOptions) -> tuple[Int[Tensor, "b 1"], Int[Tensor, "b 1"]]:
    """The first position near the queries of a rank, and the one after the last; both increase with the rank."""
    size, start = options.block_size, sum(keys.lengths[:rank])
    first, last = (
        keys.first + (place - keys.first).div(size, rounding_mode="floor") * size
        for place in (start, start + keys.lengths[rank] - 1)
    )
    return first[:, None] - options.reach, last[:, None] + size + options.reach


def _beyond(
    ranks: Ranks,
    keys: Tokens,
    place: Int[Tensor, " t"],
    v: Float[Tensor, "b h t e"],
    cluster: Int[Tensor, "b h t"],
    options: NearFarOptions,
) -> Float[Tensor, "b h m e"]:
    """Sums of the values of each cluster over the tokens of all ranks outside this rank's span.

    Nothing is added that would have to be subtracted again. The tokens before a span are cut at the beginnings of the
    spans of earlier ranks: each of these ranks holds, and sums, the tokens from the beginning of its span to that of
    the next. The tokens after a span are cut at the ends of later spans in the same way. `place`, `v` and `cluster` are
    of the tokens that this rank holds.
    """
    m, (low, high) = options.num_clusters, _span(keys, ranks.rank, options)
    next_low, last_high = (
        _span(keys, min(max(ranks.rank + by, 0), ranks.size - 1), options)[side] for by, side in ((1, 0), (-1, 1))
    )

    def sums(some: Bool[Tensor, "b t"]) -> Float[Tensor, "b h m e"]:
        return cluster_sums(v, torch.where(some[:, None], cluster, m), m)

    before = sum_before(ranks, sums((place >= low) & (place < next_low)))
    return before + sum_after(ranks, sums((place >= last_high) & (place < high)))


def hops(size: int) -> list[int]:
    """The distance, in ranks, from which each exchange adds a partial sum.

    The first brings the next rank's tensor; each later one doubles the number of ranks in the sum.
    """
    distances = [1] if size > 1 else []
    while sum(distances) < size - 1:
        distances.append(sum(distances))
    return distances


def sum_before(ranks: Ranks, x: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m d"]:
    """The sum of tensors of equal shape over the ranks before this one; zeros on the first."""
    return _sum_beside(ranks, x, -1)


def sum_after(ranks: Ranks, x: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m d"]:
    """The sum over the ranks after this one; zeros on the last."""
    return _sum_beside(ranks, x, 1)


def _sum_beside(ranks: Ranks, x: Float[Tensor, "*b m d"], side: int) -> Float[Tensor, "*b m d"]:
    """The sum over the ranks on one side, by recursive doubling: about log2(ranks) exchanges."""
    total = None
    for distance in hops(ranks.size):
        came = _from(ranks, x if total is None else total, side * distance)
        total = came if total is None else total + came
    return x * 0 if total is None else total


def _from(ranks: Ranks, x: Float[Tensor, "*b m d"], offset: int) -> Float[Tensor, "*b m d"]:
    """The tensor of the rank `offset` away; zeros if there is none."""
    m = x.shape[-2]
    partners = [rank + offset for rank in range(ranks.size)]
    spans = [(m * other, m * (other + 1)) if 0 <= other < ranks.size else (0, 0) for other in partners]
    came = ranks.fetch(x.movedim(-2, 0), [m] * ranks.size, spans).movedim(0, -2)
    return F.pad(came, (0, 0, 0, m - came.shape[-2]))
