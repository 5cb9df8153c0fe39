r"""Heavy keys, and clusters of the other keys, for each sequence and head.

**Heavy keys** are those that receive the most attention. With $\tilde Q$ the means of eight segments of the queries,
key j has the weight $\sum_i \mathrm{softmax}(c\, \tilde Q K^\top)_{ij}$, and the g keys with the largest weights are
heavy. Among weights that are equal to about a thousandth, the first key wins: the weights of equal keys differ only by
rounding, which depends on padding. If no queries are known yet, all keys are first clustered, and the weight of a key
is its distance to the mean of its cluster.

**Clusters** are found by k-means. It starts from segment means, or, if the order of the keys has no meaning, from one
key of each segment: segment means of the rows of a table would all be alike. All steps except the last move centres,
each by another sample of the keys: a quarter of them, but at least m (or all) and at most 8 m, spread evenly. The last
step assigns every key to its nearest centre. Heavy keys take no part.

All this depends only on real tokens and their order: padding and masked tokens in between change nothing, and nothing
is drawn at random.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from nystrom.attention.options import NearFarOptions
from nystrom.attention.parts.order import first_in_order, in_order
from nystrom.attention.parts.stretches import cut, in_threads, num_parts
from nystrom.landmarks import all_real, insertion_points, middle_of, real_index, segment_means, uniform
from nystrom.native import run_landmarks, runs_natively
from nystrom.shapes import is_number, score_scale

# Number of mean queries that decide which keys are heavy.
QUERY_MEANS = 8
# Distances to centres that are held at a time: at least _FEWEST, or half as many as the tokens have numbers if that is
# more, but no more than fit into the cache of a CPU. On a GPU, fewer launches matter more.
_FEWEST = 2**14
_MOST, _MOST_ON_A_GPU = 2**19, 2**26
# Rounding units by which the scores of equal centres may differ, when their tokens were summed in another order.
_ROUNDINGS = 16


class Chosen(NamedTuple):
    """Which keys are heavy, and which cluster holds each of the others."""

    heavy: Int[Tensor, "b h g"]  # Positions of the heavy keys
    exists: Bool[Tensor, "b h g"]  # Which of them exist: a sequence may have fewer real keys
    cluster: Int[Tensor, "b h s"]  # The cluster of each key, 0 ... m - 1; m for heavy keys and keys that are not real.


@torch.no_grad()
def choose(
    q: Float[Tensor, "b h n d"] | None,
    k: Float[Tensor, "b h s d"],
    keep: Bool[Tensor, "b s"] | None,
    query_keep: Bool[Tensor, "b n"] | None,
    options: NearFarOptions,
    *,
    ordered: bool = True,
) -> Chosen:
    """Choose heavy keys and clusters; the choice has no gradient.

    Queries (None if not known) and keys come in float32 at least, with zeros where they are not real. `ordered` says
    whether neighbouring keys tend to be similar.
    """
    count, (b, h) = num_parts(k, *(() if q is None else (q,))), k.shape[:2]
    if count == 1:
        return _choose(q, k, keep, query_keep, options, ordered)
    rows = cut(b, count)
    heads = cut(h, -(-count // len(rows)))

    def part(place: tuple[slice, slice]) -> Chosen:
        some, of_queries = (None if mask is None else mask[place[0]] for mask in (keep, query_keep))
        return _choose(None if q is None else q[place], k[place], some, of_queries, options, ordered)

    parts = in_threads(part, [(row, head) for row in rows for head in heads])
    of_rows = [zip(*parts[i : i + len(heads)], strict=True) for i in range(0, len(parts), len(heads))]
    of_rows = [Chosen(*(torch.cat(field, dim=1) for field in each)) for each in of_rows]
    return Chosen(*(torch.cat(field) for field in zip(*of_rows, strict=True)))


def _choose(
    q: Float[Tensor, "b h n d"] | None,
    k: Float[Tensor, "b h s d"],
    keep: Bool[Tensor, "b s"] | None,
    query_keep: Bool[Tensor, "b n"] | None,
    options: NearFarOptions,
    ordered: bool,
) -> Chosen:
    # Neither weights nor clusters see a common offset of the keys; in comparisons it would cost digits.
    k = k - middle_of(k, keep)
    m, starts = options.num_clusters, segment_means(k, options.num_clusters, keep=keep)
    real = all_real(k) if keep is None else keep
    if not ordered:
        # With at most m keys, each key is its own segment mean.
        starts = torch.where((real.sum(dim=-1) > m)[:, None, None, None], uniform(k, m, keep=keep), starts)
    # In a sequence with fewer keys than clusters, the last clusters are empty.
    filled = torch.arange(m, device=k.device) < real.sum(dim=-1, keepdim=True)

    def clusters_of(free: Bool[Tensor, "b h s"]) -> Int[Tensor, "b h s"]:
        centres = _centres(k, starts, real, free, filled, options.iterations)
        return torch.where(free, nearest_cluster(k, centres, filled), m)

    all_free = real[:, None].expand(k.shape[:3])
    weight = _distances(k, clusters_of(all_free), m) if q is None else _attended(q, k, keep, query_keep, options)
    place = torch.arange(k.shape[2], device=k.device)
    heavy, exists = first_in_order(in_order(weight, place, None if keep is None else keep[:, None]), options.num_heavy)
    taken = torch.zeros_like(k[..., 0], dtype=torch.long).scatter_add(2, heavy, exists.long())
    return Chosen(heavy, exists, clusters_of(all_free & (taken == 0)))


def cluster_sums(x: Float[Tensor, "*b s d"], cluster: Int[Tensor, "*b s"], m: int) -> Float[Tensor, "*b m d"]:
    """The sum of the tokens of each cluster."""
    sums = x.new_zeros(*x.shape[:-2], m + 1, x.shape[-1])
    if _in_a_graph(x):
        return sums.scatter_add(-2, cluster[..., None].expand_as(x), x)[..., :m, :]
    place, flat = in_one_matrix(cluster, m + 1)[:, None], x.reshape(-1, x.shape[-1])
    return sums.flatten(0, -2).scatter_add(0, place.expand_as(flat), flat).view(sums.shape)[..., :m, :]


def take_rows(x: Shaped[Tensor, "*b s d"], rows: Int[Tensor, "*b r"]) -> Shaped[Tensor, "*b r d"]:
    """The tokens at positions that differ between heads."""
    if _in_a_graph(x):
        return x.gather(-2, rows[..., None].expand(*rows.shape, x.shape[-1]))
    place = in_one_matrix(rows, x.shape[-2])
    return x.reshape(-1, x.shape[-1]).index_select(0, place).view(*rows.shape, x.shape[-1])


def in_one_matrix(rows: Int[Tensor, "*b r"], size: int) -> Int[Tensor, " k"]:
    """Row indices in the concatenation of matrices of `size` rows: a CPU gathers and adds these much faster."""
    before = size * torch.arange(rows.shape[:-1].numel(), device=rows.device)
    return (rows + before.view(*rows.shape[:-1], 1)).flatten()


def _in_a_graph(x: Tensor) -> bool:
    """Whether a compiler or exporter traces, whose symbolic lengths do not allow a view as one matrix."""
    return torch.compiler.is_compiling() or not all(is_number(size) for size in x.shape)


def cluster_sizes(x: Float[Tensor, "*b s d"], cluster: Int[Tensor, "*b s"], m: int) -> Float[Tensor, "*b m"]:
    """How many tokens each cluster has, in the dtype of the tokens."""
    return cluster_sums(torch.ones_like(x[..., :1]), cluster, m)[..., 0]


def open_sizes(x: Float[Tensor, "*b s d"], chosen: Chosen, m: int) -> Float[Tensor, "*b m"]:
    """`cluster_sizes`, but one token (of zeros) for a sequence without real keys: softmax over nothing may be NaN."""
    return open_where_empty(cluster_sizes(x, chosen.cluster, m), chosen.exists)


def open_where_empty(sizes: Float[Tensor, "*b m"], exists: Bool[Tensor, "*b g"]) -> Float[Tensor, "*b m"]:
    """Sizes with one token in the first cluster for a sequence without any key, heavy or in a cluster."""
    nothing = (sizes.sum(dim=-1) == 0) & ~exists.any(dim=-1)
    return sizes + F.pad(nothing[..., None].to(sizes), (0, sizes.shape[-1] - 1))


def _attended(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    keep: Bool[Tensor, "b s"] | None,
    query_keep: Bool[Tensor, "b n"] | None,
    options: NearFarOptions,
) -> Float[Tensor, "b h s"]:
    """The logarithm of the attention that each key receives."""
    means = segment_means(q, QUERY_MEANS, keep=query_keep)
    scores = (score_scale(q, options.scale) * means) @ k.mT
    if keep is not None:
        scores = scores.masked_fill(~keep[:, None, None], -torch.inf)
    # In logarithms: weights that underflow would be equal.
    return scores.log_softmax(dim=-1).logsumexp(dim=2)


def _distances(k: Float[Tensor, "b h s d"], cluster: Int[Tensor, "b h s"], m: int) -> Float[Tensor, "b h s"]:
    """The logarithm of the squared distance of each key from the mean of its cluster."""
    sizes = cluster_sizes(k, cluster, m).clamp(min=1)[..., None]
    means = F.pad(cluster_sums(k, cluster, m) / sizes, (0, 0, 0, 1))
    far = (k - take_rows(means, cluster)).square().sum(dim=-1)
    # A key that equals the mean of its cluster does so only up to rounding.
    return (far + torch.finfo(k.dtype).eps * k.square().sum(dim=-1)).clamp(min=torch.finfo(k.dtype).tiny).log()


def _centres(
    k: Float[Tensor, "b h s d"],
    centres: Float[Tensor, "b h m d"],
    keep: Bool[Tensor, "b s"],
    free: Bool[Tensor, "b h s"],
    filled: Bool[Tensor, "b m"],
    iterations: int,
) -> Float[Tensor, "b h m d"]:
    """Centres after all steps except the last, which only assigns keys."""
    m, (rank, count) = filled.shape[1], real_index(keep)
    s = k.shape[2]
    for wanted, counted in sampled_ranks(count, s, m, iterations):
        # Ranks never decrease, so the position of a rank is its insertion point.
        positions = insertion_points(rank, wanted).clamp(max=s - 1)
        positions = positions[:, None].expand(*k.shape[:2], -1)
        sample, counts = take_rows(k, positions), free.gather(2, positions) & counted[:, None]
        cluster = torch.where(counts, nearest_cluster(sample, centres, filled), m)
        sizes = cluster_sizes(sample, cluster, m)[..., None]
        centres = torch.where(sizes > 0, cluster_sums(sample, cluster, m) / sizes.clamp(min=1), centres)
    return centres


def sampled_ranks(
    count: Int[Tensor, " b"], s: int, m: int, iterations: int
) -> Iterator[tuple[Int[Tensor, "b r"], Bool[Tensor, "b r"]]]:
    """For each step except the last, the ranks of a sample of the `count` real keys of s, and which entries count."""
    count = count[:, None]
    sizes, largest = torch.minimum(count, ((count + 3) // 4).clamp(m, 8 * m)), 8 * m
    # A symbolic length may be any.
    place = torch.arange(min(s, max(m, min(largest, -(-s // 4)))) if is_number(s) else largest, device=count.device)
    for step in range(iterations - 1):
        yield (place * (iterations - 1) + step) * count // (sizes * (iterations - 1)).clamp(min=1), place < sizes


def nearest_cluster(
    x: Float[Tensor, "b h s d"], centres: Float[Tensor, "b h m d"], filled: Bool[Tensor, "b m"]
) -> Int[Tensor, "b h s"]:
    """The nearest non-empty centre of each token, a stretch of tokens at a time.

    The last of nearly equally near centres wins: their distances differ by rounding, which depends on padding.
    """
    (b, h, s), m = x.shape[:3], centres.shape[2]
    # argmin |x - c|^2 = argmax x.c - |c|^2 / 2
    minus = (-0.5 * centres.square().sum(dim=-1)).masked_fill(~filled[:, None], -torch.inf)[:, :, None]
    rounding = _ROUNDINGS * torch.finfo(x.dtype).eps
    if runs_natively(x, centres):
        nearest = x.new_empty(b, h, s, 1)
        run_landmarks("nearest_forward", rounding, q=x, landmarks=centres, bias=minus, out=nearest)
        return nearest[..., 0].long()
    minus = minus.flatten(0, 1)
    numbered, tokens, wanted = (
        torch.arange(m, dtype=x.dtype, device=x.device),
        x.flatten(0, 1),
        centres.flatten(0, 1).mT,
    )

    # The norm of a centre about as near as the best is at most |x| plus the distance to the best. The rounding of its
    # score is relative to the square of that, which |x|^2 and the squared distance |x|^2 - 2 best together bound.
    length_of = torch.linalg.vector_norm(tokens, dim=-1, keepdim=True).square()

    def among(rows: slice, place: slice) -> Float[Tensor, "rows place"]:
        scores = torch.baddbmm(minus[rows], tokens[rows, place], wanted[rows])
        best = scores.amax(dim=-1, keepdim=True)
        # On a CPU this takes a fraction of the time of argmax.
        return scores.ge_(best - rounding * (length_of[rows, place] - best)).mul_(numbered).amax(dim=-1)

    if torch.compiler.is_compiling() or not is_number(s):
        # The number of stretches would become part of a compiler's graph.
        return among(slice(None), slice(None)).long().unflatten(0, (b, h))
    numbers = _MOST if x.device.type == "cpu" else _MOST_ON_A_GPU
    length = max(1, min(max(_FEWEST, x.numel() // 2), numbers) // m)
    heads = max(1, length // s)
    nearest = [
        torch.cat([among(slice(row, row + heads), slice(i, i + length)) for i in range(0, s, length)], dim=1)
        for row in range(0, b * h, heads)
    ]
    return torch.cat(nearest).long().unflatten(0, (b, h))
