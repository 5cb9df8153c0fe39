r"""Dropout whose random draws on a CPU cost a fraction of torch's.

$$y_i = \frac{z_i}{1 - p}\, x_i, \qquad z_i \in \{0, 1\}, \quad P(z_i = 0) = p.$$

On a CPU, torch draws a number of 32 or 64 bits for each $z_i$, one after the other. Here, one draw of 64 bits gives
four of them, from 16 bits each. So p is rounded to the nearest multiple of $2^{-16}$; the scale factor uses the rounded
p, which keeps the mean exact. Draws come from torch's global generator. On other devices, in a compiler, and if the
rounded p is 0 or 1, torch's own dropout is used.

Source: Srivastava et al. (2014), Journal of Machine Learning Research 15, section 4.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

_LANES, _VALUES = 4, 2**16


def dropout(x: Float[Tensor, "*shape"], share: float) -> Float[Tensor, "*shape"]:
    """Replace a share of the numbers by zeros, and scale the others so that the mean is unchanged.

    Raises:
        ValueError: `share` is not a probability.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share is {share}; expected a probability from 0 to 1.")
    dropped = round(share * _VALUES)
    if x.device.type != "cpu" or torch.compiler.is_compiling() or dropped in (0, _VALUES):
        return F.dropout(x, share)
    count = x.numel()
    # `randint`, since an in-place draw has no rule for `torch.vmap` with different draws. It leaves out one of the 2^64
    # values, which changes no probability measurably.
    draws = torch.randint(-(2**63), 2**63 - 1, (-(-count // _LANES),), device=x.device)
    lanes = draws.view(torch.int16)[:count].view(x.shape)
    kept = (lanes >= dropped - _VALUES // 2).to(x.dtype)
    return x * kept.mul_(_VALUES / (_VALUES - dropped))


class Dropout(nn.Dropout):
    """`dropout` in training; the identity in evaluation."""

    def __init__(self, share: float):
        super().__init__(share)

    def forward(self, input: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Apply dropout."""
        return dropout(input, self.p) if self.training else input
