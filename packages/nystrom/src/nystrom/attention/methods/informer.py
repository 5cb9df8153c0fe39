r"""Informer's ProbSparse attention: exact for the u queries that need it, the mean of the values for the rest.

A query whose scores are all equal attends to all keys equally. Distance from equal attention is measured by
$$M(q_i) = \max_{j \in S} c\, q_i^\top k_j - \frac{1}{|S|} \sum_{j \in S} c\, q_i^\top k_j, \qquad c = 1 / \sqrt d,$$
over a sample S of the keys. The u queries with the largest M, in each head, get exact attention over all real keys, in
one fused call of u queries; the others get the mean of the real values. The selection carries no gradient. If two
values of M are within a thousandth of each other, the earlier token wins: equal tokens differ by rounding, which
depends on padding. M is computed over a few keys at a time: nothing of size n x |S| is stored.

**Exact limit.** With u at least the number of real queries, softmax attention.

**Sizes.** The paper takes u = |S| = factor * ceil(ln n), and the two papers factor = ceil(128 / ln n) on the Long
Range Arena: u of about 128 for any n, which is the default here. A rule that depends on n would depend on the padding.

Source: Zhou et al. (2020), arXiv:2012.07436, eq. (4) and algorithm 1.
Departs from the authors' code: one key is drawn from each of |S| segments of the real keys, the same for all queries,
whereas theirs draws keys for each query, with replacement (the port in transformers shares the draw too): M then
compares queries on the same keys. The sum is divided by |S|, as in the paper, not by the number of all keys. Each
sequence and head selects its own queries among its real tokens.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nystrom.attention.entry import attend
from nystrom.attention.fused import fused_softmax
from nystrom.attention.options import InformerOptions, documented
from nystrom.attention.parts.by_heads import by_heads
from nystrom.attention.parts.order import first_in_order, in_order
from nystrom.landmarks import all_real, draw, insertion_points, real_index, take
from nystrom.precision import at_least_float32
from nystrom.shapes import Generator, Group, Masks, check_generator, is_number, score_scale

# Keys over which M is computed at a time.
_BLOCK = 16


@documented(InformerOptions)
def informer_attention(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    v: Float[Tensor, "b h s e"],
    *,
    num_queries: int = 128,
    num_samples: int = 128,
    scale: float | None = None,
    keep: Bool[Tensor, "b n"] | None = None,
    key_keep: Bool[Tensor, "b s"] | None = None,
    query_keep: Bool[Tensor, "b n"] | None = None,
    cu_seqlens: Int[Tensor, " ends"] | None = None,
    generator: Generator = None,
    group: Group = None,
) -> Float[Tensor, "b h n e"]:
    """Exact attention for the queries that stand out, the mean of the values for the rest; linear in n and s.

    Args:
        **usual: Tensors, masks, generator, group and `InformerOptions`.
    """
    check_generator(generator)
    options = InformerOptions(num_queries=num_queries, num_samples=num_samples, scale=scale)
    return attend(_informer, q, k, v, Masks(keep, key_keep, query_keep, cu_seqlens), options, generator, group=group)


def _informer(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    v: Float[Tensor, "b h s e"],
    keep: Bool[Tensor, "b s"] | None,
    query_keep: Bool[Tensor, "b n"] | None,
    options: InformerOptions,
    generator: Generator,
) -> Float[Tensor, "b h n e"]:
    n = q.shape[2]
    if is_number(n) and n <= options.num_queries:
        return fused_softmax(q, k, v, keep=keep, scale=options.scale)
    sample = _sample(k, keep, draw(options.num_samples, generator, q.device))
    return by_heads(lambda _, q, k, v: _attend_to_sample(q, k, v, keep, query_keep, sample, options), q, k, v)


def _attend_to_sample(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    v: Float[Tensor, "b h s e"],
    keep: Bool[Tensor, "b s"] | None,
    query_keep: Bool[Tensor, "b n"] | None,
    sample: Int[Tensor, "b r"],
    options: InformerOptions,
) -> Float[Tensor, "b h n e"]:
    n, scale = q.shape[2], options.scale
    with torch.no_grad():
        sparsity = _sparsity(q, take(k, sample), score_scale(q, scale))
        place = torch.arange(n, device=q.device)
        order = in_order(sparsity, place, None if query_keep is None else query_keep[:, None])
        chosen, exists = first_in_order(order, options.num_queries)
        # If fewer than u queries are real, the results of the missing ones go to a row past the end.
        chosen = torch.where(exists, chosen, n)[..., None]
    queries = q.gather(2, chosen.clamp(max=n - 1).expand(-1, -1, -1, q.shape[-1]))
    exact = fused_softmax(queries, k, v, keep=keep, scale=scale)
    lazy = _mean(v, keep).expand(-1, -1, n + 1, -1)
    return lazy.scatter(2, chosen.expand_as(exact), exact)[:, :, :n]


def _sample(
    k: Float[Tensor, "b h s d"], keep: Bool[Tensor, "b s"] | None, draws: Float[Tensor, " r"]
) -> Int[Tensor, "b r"]:
    """Positions of one real key from each of r segments; with fewer than r real keys, some more than once."""
    keep = all_real(k) if keep is None else keep
    rank, count = real_index(keep)
    size = draws.shape[0]
    spot = (torch.arange(size, device=k.device) + draws.double()) / size
    wanted = torch.minimum((spot * count[:, None]).long(), count[:, None] - 1)
    # Ranks never decrease: the insertion point of a rank is its real token, not a masked one after it.
    return insertion_points(rank, wanted).clamp(max=k.shape[2] - 1)


def _sparsity(q: Float[Tensor, "b h n d"], sample: Float[Tensor, "b h r d"], scale: float) -> Float[Tensor, "b h n"]:
    """M of each query, in float32 at least."""
    q, sample = at_least_float32(q) * scale, at_least_float32(sample)
    # M does not change if all keys are shifted alike. With the first at the origin, equal keys give exactly 0.
    sample = sample - sample[:, :, :1]
    blocks = sample.split(_BLOCK, dim=2)
    largest = (q @ blocks[0].mT).amax(dim=-1)
    for block in blocks[1:]:
        largest = torch.maximum(largest, (q @ block.mT).amax(dim=-1))
    return largest - (q @ sample.mean(dim=2)[..., None])[..., 0]


def _mean(v: Float[Tensor, "b h s e"], keep: Bool[Tensor, "b s"] | None) -> Float[Tensor, "b h 1 e"]:
    """Mean of the real values (masked ones are zero), summed in float32 at least."""
    count = v.shape[2] if keep is None else keep.sum(dim=-1).clamp(min=1)[:, None, None, None]
    return (at_least_float32(v).sum(dim=2, keepdim=True) / count).to(v.dtype)
