r"""A correction of an approximation by its residual, learned from a few queries.

The features of a query are $\phi(q) = \mathrm{softmax}_j(c\, q^\top \mu_j + \ln \text{size}_j)$ over the clusters j of
the keys. Exact outputs are computed at r queries S; $R$ is what the approximation misses there. Ridge regression gives
$$\mathrm{out}_i + \phi(q_i)^\top W, \qquad W = \Phi_S^\top (\Phi_S \Phi_S^\top + \lambda I)^{-1} R.$$
The queries are spread evenly over the real ones, so padding changes nothing. The cost is r s + n m scores, in fused
calls. The rows of the attention matrix then still sum to one, but need not be positive.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nystrom.attention.fused import fused_softmax
from nystrom.attention.options import NearFarOptions
from nystrom.attention.parts.clusters import Chosen, cluster_sizes, cluster_sums
from nystrom.attention.parts.far_keys import SeenKeys, attend_with_bias
from nystrom.landmarks import all_real, insertion_points, ranks, take
from nystrom.shapes import score_scale

# The ridge, relative to features of size 1: the residual varies between queries by more than the features can explain.
RIDGE = 0.3


def add_residual(
    out: Float[Tensor, "b h n e"],
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    v: Float[Tensor, "b h s e"],
    keep: Bool[Tensor, "b s"] | None,
    query_keep: Bool[Tensor, "b n"] | None,
    chosen: Chosen,
    options: NearFarOptions,
) -> Float[Tensor, "b h n e"]:
    """Add to the outputs what they miss, predicted by regression on the clusters, in float32 or float64.

    Queries, keys and values are zeros where they are not real.
    """
    m, r, scale = options.num_clusters, options.num_samples, score_scale(q, options.scale)
    rank, count = ranks(all_real(q) if query_keep is None else query_keep)
    # Ranks never decrease, so the position of a rank is its insertion point.
    places = insertion_points(rank, sampled_queries(count, r)).clamp(max=q.shape[2] - 1)
    sampled = take(q, places)
    missed = fused_softmax(sampled, k, v, keep=keep, scale=scale) - take(out, places)
    sums = cluster_sums(k, chosen.cluster, m)
    return spread_residual(out, q, sampled, missed, cluster_sizes(k, chosen.cluster, m), sums, scale)


def sampled_queries(count: Int[Tensor, " b"], r: int) -> Int[Tensor, "b r"]:
    """Ranks, among the `count` real queries, of those whose exact outputs are computed."""
    return (2 * torch.arange(r, device=count.device) + 1) * count[:, None] // (2 * r)


def spread_residual(
    out: Float[Tensor, "b h n e"],
    q: Float[Tensor, "b h n d"],
    sampled: Float[Tensor, "b h r d"],
    missed: Float[Tensor, "b h r e"],
    sizes: Float[Tensor, "b h m"],
    sums: Float[Tensor, "b h m d"],
    scale: float,
) -> Float[Tensor, "b h n e"]:
    """Predict what all outputs miss from what those of the `sampled` queries miss, and add it.

    `sizes` and `sums` are the tokens and the sums of the keys of each cluster.
    """
    # If all keys are heavy, all clusters are empty, and softmax over nothing would be NaN.
    sizes = torch.where(sizes.sum(dim=-1, keepdim=True) > 0, sizes, 1.0)
    means = sums / sizes.clamp(min=1)[..., None]
    features = (scale * sampled @ means.mT + sizes.log()[:, :, None]).softmax(dim=-1)
    ridge = RIDGE * torch.eye(sampled.shape[2], dtype=q.dtype, device=q.device)
    # The matrix is never singular; `solve` would raise if any sequence of the batch holds NaN.
    learned = features.mT @ torch.linalg.solve_ex(features @ features.mT + ridge, missed).result
    return out + attend_with_bias(q, SeenKeys(means, learned, sizes.log()), scale)
