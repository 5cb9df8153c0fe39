r"""Kernelized attention: a Gaussian kernel in place of the softmax structure, without a normaliser.

$$\mathrm{out}_i = \sum_j \kappa_{ij} v_j, \qquad \kappa_{ij} = \exp(-\tfrac{c}{2} \|q_i - k_j\|^2)$$
with $c = 1 / \sqrt d$, which is $\kappa(q / d^{1/4}, k / d^{1/4})$.

One fused softmax call computes it. Widen queries and keys to
$q' = (q, -\tfrac12 \|q\|^2, 1)$ and $k' = (k, 1, -\tfrac12 \|k\|^2)$, so that $c\, q'^\top k' = \ln \kappa \le 0$;
add one null key of score 0, whose weight $w_i = 1 / (1 + \sum_j \kappa_{ij})$ comes back through a value column of
its own. Softmax over all of them gives $\sum_j \kappa_{ij} v_j\, w_i$; dividing by $w_i$ undoes the normalisation.
Nothing of size n x s is stored, and the weights never overflow. Time stays quadratic; `skyformer` is its linear
approximation.

Not normalised: with $\|q - k\|$ large for every key, output and gradient vanish.

Source: Chen et al. (2021), arXiv:2111.00035, eq. (3).
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from nystrom.attention.door import attend
from nystrom.attention.fused import fused_softmax
from nystrom.attention.options import KernelizedOptions, documented
from nystrom.precision import at_least_float32
from nystrom.shapes import score_scale


@documented(KernelizedOptions)
def kernelized_attention(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    v: Float[Tensor, "b h s e"],
    *,
    scale: float | None = None,
    keep: Bool[Tensor, "b s"] | None = None,
    query_keep: Bool[Tensor, "b n"] | None = None,
) -> Float[Tensor, "b h n e"]:
    """Attend by a Gaussian kernel over real keys, in memory linear in n; computed in float32 at least.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        **options: Those of `KernelizedOptions`.
        keep: Real keys; None where all are.
        query_keep: Real queries; None means `keep` where n == s, else all. Other queries give zeros.

    Raises:
        ValueError: Shapes, dtypes, masks or options that do not fit.
    """
    return attend(_kernelized, q, k, v, keep, query_keep, KernelizedOptions(scale=scale))


def _kernelized(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    v: Float[Tensor, "b h s e"],
    keep: Bool[Tensor, "b s"] | None,
    query_keep: Bool[Tensor, "b n"] | None,
    options: KernelizedOptions,
) -> Float[Tensor, "b h n e"]:
    return gaussian_sum(q, k, v, keep=keep, scale=options.scale)


def gaussian_sum(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    v: Float[Tensor, "b h s e"],
    *,
    keep: Bool[Tensor, "b s"] | None = None,
    scale: float | None = None,
) -> Float[Tensor, "b h n e"]:
    """Sum of values weighted by the Gaussian kernel, in one fused call and in float32 at least."""
    scale = score_scale(q, scale)
    q, k, v = (at_least_float32(x) for x in (q, k, v))
    q = torch.cat([q, _half_norm(q), torch.ones_like(q[..., :1])], dim=-1)
    k = torch.cat([k, torch.ones_like(k[..., :1]), _half_norm(k)], dim=-1)
    # The null key comes last; the last value column tells its weight.
    k = F.pad(k, (0, 0, 0, 1))
    null = F.pad(v.new_ones(1, 1), (0, 0, v.shape[-2], 0)).expand(*v.shape[:2], -1, -1)
    v = torch.cat([F.pad(v, (0, 0, 0, 1)), null], dim=-1)
    # Joined, not padded: torch's C++ code generator mixes up the types of a padded mask.
    keep = None if keep is None else torch.cat([keep, torch.ones_like(keep[:, :1])], dim=1)
    out = fused_softmax(q, k, v, keep=keep, scale=scale)
    # The weight is at least 1 / (1 + s); rounding of huge norms may push it below.
    return out[..., :-1] / out[..., -1:].clamp(min=1 / k.shape[-2])


def _half_norm(x: Float[Tensor, "b h n d"]) -> Float[Tensor, "b h n 1"]:
    # An infinite norm times a zero of the null key would be NaN.
    return -(0.5 * x.square().sum(dim=-1, keepdim=True)).clamp(max=torch.finfo(x.dtype).max / 8)
