r"""Heavy keys, and clusters of the other keys, of each sequence and head.

Heavy keys are those on which attention falls most. With $\tilde Q$ the means of eight segments of the queries, key j
has the weight $\sum_i \mathrm{softmax}(c\, \tilde Q K^\top)_{ij}$; the g largest are taken.

Clusters are found by k-means, which starts from segment means. All steps but the last move the centres by a sample of
the keys, another one in each step: of s keys and m clusters $\min(s, \max(4 m, \min(16 m, \lceil s / 4 \rceil)))$,
spread evenly. The last step assigns every key to its nearest centre. Heavy keys are then in no cluster.

All this depends on real tokens and their order alone: padding and holes change nothing, and nothing is drawn.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nystrom.attention.options import NearFarOptions
from nystrom.landmarks import all_real, ranks, segment_means, take
from nystrom.shapes import score_scale

# Means of the queries that decide which keys are heavy.
_QUERY_MEANS = 8
# Distances to centres that are held at a time: these, or a few times the tokens' own size where that is more, but no
# more than fit into a cache.
_FEWEST = 2**14
_TIMES_TOKENS = 4
_MOST = 2**19


class Chosen(NamedTuple):
    """Which keys are heavy, and which cluster holds each of the others.

    Attributes:
        heavy: Positions of the heavy keys.
        found: Which of these exist: a sequence may have fewer real keys.
        cluster: The cluster of each key, 0 ... m - 1; m for heavy keys and keys that are not real.
    """

    heavy: Int[Tensor, "b h g"]
    found: Bool[Tensor, "b h g"]
    cluster: Int[Tensor, "b h s"]


@torch.no_grad()
def choose(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    keep: Bool[Tensor, "b s"] | None,
    query_keep: Bool[Tensor, "b n"] | None,
    options: NearFarOptions,
) -> Chosen:
    """Choose heavy keys and clusters; what is chosen has no gradient.

    Args:
        q: Queries, in float32 at least; zeros where they are not real.
        k: Keys, likewise.
        keep: Real keys; None where all are.
        query_keep: Real queries; None where all are.
        options: The sizes.
    """
    heavy, found = _heavy(q, k, keep, query_keep, options)
    starts = segment_means(k, options.num_clusters, keep=keep)
    keep = all_real(k) if keep is None else keep
    m = options.num_clusters
    # A sequence with fewer keys than clusters leaves the last ones without any.
    filled = torch.arange(m, device=k.device) < keep.sum(dim=-1, keepdim=True)
    nearest = _nearest(k, _centres(k, starts, keep, filled, options.iterations), filled)
    cluster = torch.where(keep[:, None], nearest, m)
    # The largest number wins, so that a place that was not found takes nothing.
    cluster = cluster.scatter_reduce(2, heavy, torch.where(found, m, 0), "amax")
    return Chosen(heavy, found, cluster)


def cluster_sums(x: Float[Tensor, "*b s d"], cluster: Int[Tensor, "*b s"], m: int) -> Float[Tensor, "*b m d"]:
    """The sum of the tokens of each cluster."""
    sums = x.new_zeros(*x.shape[:-2], m + 1, x.shape[-1]).scatter_add(-2, cluster[..., None].expand_as(x), x)
    return sums[..., :m, :]


def cluster_sizes(x: Float[Tensor, "*b s d"], cluster: Int[Tensor, "*b s"], m: int) -> Float[Tensor, "*b m"]:
    """How many tokens each cluster has, in the dtype of the tokens."""
    return cluster_sums(torch.ones_like(x[..., :1]), cluster, m)[..., 0]


def _heavy(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    keep: Bool[Tensor, "b s"] | None,
    query_keep: Bool[Tensor, "b n"] | None,
    options: NearFarOptions,
) -> tuple[Int[Tensor, "b h g"], Bool[Tensor, "b h g"]]:
    """Positions of the keys of the largest weight, and which of them are real."""
    means = segment_means(q, _QUERY_MEANS, keep=query_keep)
    scores = score_scale(q, options.scale) * (means @ k.mT)
    if keep is not None:
        scores = scores.masked_fill(~keep[:, None, None], -torch.inf)
    # In logarithms: weights that vanish would be equal.
    weight = scores.log_softmax(dim=-1).logsumexp(dim=2)
    if keep is not None:
        weight = torch.where(keep[:, None], weight, -torch.inf)
    # A sequence, perhaps of a length that is only a symbol, may have fewer keys than are asked for.
    weight = torch.nn.functional.pad(weight, (0, options.num_heavy), value=-torch.inf)
    top = weight.topk(options.num_heavy, dim=-1)
    return top.indices.clamp(max=k.shape[2] - 1), top.values > -torch.inf


def _centres(
    k: Float[Tensor, "b h s d"],
    centres: Float[Tensor, "b h m d"],
    keep: Bool[Tensor, "b s"],
    filled: Bool[Tensor, "b m"],
    iterations: int,
) -> Float[Tensor, "b h m d"]:
    """Centres after all steps but the last, which only assigns."""
    m, (rank, count) = filled.shape[1], ranks(keep)
    count = count[:, None]
    sizes = torch.minimum(count, ((count + 3) // 4).clamp(4 * m, 16 * m))
    place = torch.arange(_most(k.shape[2], m), device=k.device)
    for step in range(iterations - 1):
        wanted = (place * (iterations - 1) + step) * count // (sizes * (iterations - 1)).clamp(min=1)
        # Ranks never decrease, so the position of a rank is its insertion point.
        sample = take(k, torch.searchsorted(rank, wanted).clamp(max=k.shape[2] - 1))
        cluster = torch.where((place < sizes)[:, None], _nearest(sample, centres, filled), m)
        found = cluster_sizes(sample, cluster, m)[..., None]
        centres = torch.where(found > 0, cluster_sums(sample, cluster, m) / found.clamp(min=1), centres)
    return centres


def _most(s: int, m: int) -> int:
    """The largest sample of at most s keys; of a length that is a symbol, of any."""
    return min(s, max(4 * m, min(16 * m, -(-s // 4)))) if isinstance(s, int) else 16 * m


def _nearest(
    x: Float[Tensor, "b h s d"], centres: Float[Tensor, "b h m d"], filled: Bool[Tensor, "b m"]
) -> Int[Tensor, "b h s"]:
    """The nearest centre of each token, among those that have tokens, a stretch of tokens at a time."""
    (b, h, s), m = x.shape[:3], centres.shape[2]
    # argmin |x - c|^2 = argmax x.c - |c|^2 / 2
    minus = (-0.5 * centres.square().sum(dim=-1)).masked_fill(~filled[:, None], -torch.inf).flatten(0, 1)[:, None]
    # A compiler takes the whole: the number of stretches would be part of its graph.
    whole = torch.compiler.is_compiling() or not isinstance(s, int)
    numbers = 0 if whole else min(max(_FEWEST, _TIMES_TOKENS * x.numel()), _MOST)
    parts = [x] if whole else x.split(max(1, numbers // (b * h * m)), dim=2)
    numbered, tokens = torch.arange(m, dtype=x.dtype, device=x.device), centres.flatten(0, 1).mT
    found = []
    for part in parts:
        scores = torch.baddbmm(minus, part.flatten(0, 1), tokens)
        # On a CPU this takes a fraction of the time of argmax.
        found.append(scores.eq_(scores.amax(dim=-1, keepdim=True)).mul_(numbered).amax(dim=-1))
    return torch.cat(found, dim=1).long().unflatten(0, (b, h))
