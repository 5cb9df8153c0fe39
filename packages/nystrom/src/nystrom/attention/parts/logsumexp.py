r"""Softmax attention together with the logarithm of its normaliser, in one fused call.

$$\mathrm{mean}_i = \sum_j \mathrm{softmax}_j(\sigma_{ij})\, v_j, \qquad \ell_i = \ln \sum_j e^{\sigma_{ij}}, \qquad
\sigma_{ij} = c\, q_i^\top k_j + \beta_j.$$

Methods that sum unnormalised exponentials twice need both: they represent a sum of any size by a mean and a logarithm,
which neither overflow nor underflow.

A null key with the score $t_i = \max_j \sigma_{ij}$ (a constant for the gradient) is added. The key's weight
$w_i = 1 / (1 + e^{\ell_i - t_i})$ is between $1 / (1 + s)$ and $1/2$, and a separate column of the values returns it.
Then $\ell_i = t_i + \ln(1 - w_i) - \ln w_i$, and the mean is the rest of the output divided by $1 - w_i$.

Queries are few (landmarks or random features) and keys are many. The maxima are taken over d queries at a time, so
nothing larger than the keys is stored. The bias $\beta$ and the mask form a column of the keys, so the fused call needs
no mask.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from nystrom.attention.fused import fused_softmax
from nystrom.shapes import score_scale


def softmax_and_logsumexp(
    q: Float[Tensor, "b h r d"],
    k: Float[Tensor, "b h s d"],
    v: Float[Tensor, "b h s e"],
    *,
    keep: Bool[Tensor, "b s"] | None = None,
    scale: float | None = None,
    bias: Float[Tensor, "b h s 1"] | None = None,
) -> tuple[Float[Tensor, "b h r e"], Float[Tensor, "b h r 1"]]:
    """Means of the values and logarithms of the normalisers, for a few queries over many keys, in float32 or float64.

    Keys and values are zeros where a key is not real; a sequence without one gives zero means and logarithms far below
    all others. `bias` is added to all scores of a key; `scale` None means 1 / sqrt(d).
    """
    q = q * score_scale(q, scale)
    bias = torch.zeros_like(k[..., :1]) if bias is None else bias
    if keep is not None:
        bias = torch.where(keep[:, None, :, None], bias, -torch.finfo(bias.dtype).max / 4)
    top = _largest_scores(q, k, bias)
    wide_q = torch.cat([q, torch.ones_like(top), -top], dim=-1)
    # The null key comes last, with score 0: all scores are relative to the largest.
    wide_k = F.pad(torch.cat([k, bias, torch.ones_like(bias)], dim=-1), (0, 0, 0, 1))
    null = F.pad(v.new_ones(1, 1), (0, 0, v.shape[-2], 0)).expand(*v.shape[:2], -1, -1)
    wide_v = torch.cat([F.pad(v, (0, 0, 0, 1)), null], dim=-1)
    out = fused_softmax(wide_q, wide_k, wide_v, scale=1.0)
    # Rounding of huge scores may push the weight out of its range.
    weight = out[..., -1:].clamp(min=0.25 / wide_k.shape[-2], max=0.75)
    return out[..., :-1] / (1 - weight), top + torch.log1p(-weight) - weight.log()


@torch.no_grad()
def _largest_scores(
    q: Float[Tensor, "b h r d"], k: Float[Tensor, "b h s d"], bias: Float[Tensor, "b h s 1"]
) -> Float[Tensor, "b h r 1"]:
    size = q.shape[-1]
    blocks = [q[:, :, i : i + size] for i in range(0, q.shape[2], size)]
    return torch.cat([(k @ block.mT + bias).amax(dim=2)[..., None] for block in blocks], dim=2)
