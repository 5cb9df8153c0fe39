r"""A context that is compressed once and asked many times: cross-attention to heavy keys and clusters of all others.

With c the scale, the heavy keys G of a head, and $n_a$, $\mu_a$ and $\nu_a$ the number of other keys in cluster a,
their mean and the mean of their values,
$$\mathrm{out}_i = \frac{\sum_{j \in G} e^{c\, q_i^\top k_j} v_j + \sum_a n_a\, e^{c\, q_i^\top \mu_a} \nu_a}
{\sum_{j \in G} e^{c\, q_i^\top k_j} + \sum_a n_a\, e^{c\, q_i^\top \mu_a}},$$
the same as `near_far_attention` computes in cross-attention: g + m entries stand for s keys. The order of the keys has
no meaning here, so k-means starts from single keys, not from means of neighbours.

Heavy keys are those that a sample of the queries attends to most; without a sample, those farthest from the mean of
their cluster, see `nystrom.attention.parts.clusters`. The choice has no gradient; means and values do.

**Exact limit.** At most `num_heavy` real keys, or one key in each cluster.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from nystrom.attention.entry import attend
from nystrom.attention.options import NearFarOptions
from nystrom.attention.parts.clusters import choose
from nystrom.attention.parts.far_keys import SeenKeys, attend_with_bias, far_keys
from nystrom.precision import at_least_float32, cast_for_autocast, narrowed, without_autocast
from nystrom.shapes import Masks, check_inputs, score_scale, zero_masked


class NearFarContext(nn.Module):
    """Compressed keys and values; made by `near_far_context`.

    The state dict holds these three tensors: `NearFarContext(**torch.load(file))` restores what
    `torch.save(context.state_dict(), file)` saved.

    Attributes:
        keys: Heavy keys and mean keys of clusters.
        values: Their values, and the mean values of the clusters.
        sizes: Number of tokens that each entry stands for; 0 for an unused entry.
    """

    keys: Float[Tensor, "b h r d"]
    values: Float[Tensor, "b h r e"]
    sizes: Int[Tensor, "b h r"]

    def __init__(self, keys: Float[Tensor, "b h r d"], values: Float[Tensor, "b h r e"], sizes: Int[Tensor, "b h r"]):
        super().__init__()
        check_inputs(keys, keys, values, Masks())
        if sizes.shape != keys.shape[:3] or sizes.is_floating_point():
            raise ValueError(
                f"sizes has shape {tuple(sizes.shape)} and {sizes.dtype}; "
                f"expected whole numbers {tuple(keys.shape[:3])}."
            )
        self.register_buffer("keys", keys)
        self.register_buffer("values", values)
        self.register_buffer("sizes", sizes)

    def forward(
        self, q: Float[Tensor, "b h n d"], *, query_keep: Bool[Tensor, "b n"] | None = None
    ) -> Float[Tensor, "b h n e"]:
        """Attend to the context, in time and memory that do not depend on its length.

        Raises:
            ValueError: Invalid shapes, dtypes or mask.
        """
        return attend(_ask, q, self.keys, self.values, Masks(query_keep=query_keep), self.sizes)

    def extra_repr(self) -> str:
        """Entries and their tokens, for print."""
        return f"entries={self.keys.shape[2]}, tokens={self.sizes.sum(dim=-1)[:, 0].tolist()}"


def near_far_context(
    k: Float[Tensor, "b h s d"],
    v: Float[Tensor, "b h s e"],
    *,
    queries: Float[Tensor, "b h n d"] | None = None,
    num_heavy: int = 128,
    num_clusters: int = 640,
    iterations: int = 4,
    scale: float | None = None,
    key_keep: Bool[Tensor, "b s"] | None = None,
) -> NearFarContext:
    """Compress keys and values that many queries will attend to.

    Args:
        k: Keys.
        v: Values.
        queries: A sample of a few dozen future queries; they decide which keys are heavy. None chooses heavy keys
            without queries.
        num_heavy: Keys g of each head that are kept exactly.
        num_clusters: Clusters m of the other keys.
        iterations: Steps of k-means: the last on all keys, the others on a sample.
        scale: Factor on the scores; None means 1 / sqrt(d).
        key_keep: Real keys; None if all are.

    Returns:
        The context, a Module to call with queries: `near_far_context(k, v)(q)`.

    Raises:
        ValueError: Invalid shapes, dtypes, mask or sizes.
    """
    options = NearFarOptions(num_heavy=num_heavy, num_clusters=num_clusters, iterations=iterations, scale=scale)
    keep, _ = check_inputs(k if queries is None else queries, k, v, Masks(key_keep=key_keep))
    k, v = cast_for_autocast(k, v)
    if not all((k.shape[0], k.shape[2])):
        return NearFarContext(k[:, :, :0], v[:, :, :0], torch.zeros_like(k[:, :, :0, 0], dtype=torch.long))
    with without_autocast(k):
        dtype = v.dtype
        k, v = (at_least_float32(zero_masked(x, keep)).contiguous() for x in (k, v))
        sample = None if queries is None else at_least_float32(queries)
        chosen = choose(sample, k, keep, None, options, ordered=False)
        far = far_keys(k, v, chosen, options)
        # Asking takes the usual scale, so that another one is part of the keys.
        ratio = 1.0 if scale is None else scale / score_scale(k, None)
        keys = torch.cat([far.keys, far.means], dim=2) * ratio
        values = torch.cat([far.values, far.sums / far.sizes.clamp(min=1)[..., None]], dim=2)
        sizes = torch.cat([far.exists.long(), far.sizes.long()], dim=2)
        return NearFarContext(narrowed(keys, dtype), narrowed(values, dtype), sizes)


def _ask(
    q: Float[Tensor, "b h n d"],
    keys: Float[Tensor, "b h r d"],
    values: Float[Tensor, "b h r e"],
    keep: None,
    query_keep: Bool[Tensor, "b n"] | None,
    sizes: Int[Tensor, "b h r"],
) -> Float[Tensor, "b h n e"]:
    q, keys, values = (at_least_float32(x) for x in (q, keys, values))
    return attend_with_bias(q, SeenKeys(keys, values, sizes.to(q).log()), score_scale(q, None))
