r"""A short depthwise convolution of tokens, with a kernel for each channel: neighbours, in linear time.

$$y_{i,c} = \sum_{t=0}^{K-1} w_{c,t}\, x_{i + t - (K-1)/2,\, c}$$
with an odd size K, and zeros outside the sequence and at tokens that are not real. Positions are relative, so padding
at either end changes nothing; holes inside count as positions.

The kernels start near the identity: 1 in the middle, plus uniform draws within $\tfrac12 K^{-1/2}$.

Source: So et al. (2021), arXiv:2109.08668, which convolves queries, keys and values after their projections with K = 3.
Departs from it: the convolution looks to both sides, and starts near the identity.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn


class ShortConvolution(nn.Module):
    """The convolution; `weight` has the layout of `nn.Conv1d(w, w, K, groups=w)`.

    Args:
        width: Channels.
        kernel_size: Taps K, an odd number.
    """

    # It reads neighbours, which other ranks may hold: see `nystrom.parallel.models`.
    over_ranks = False

    def __init__(self, width: int, kernel_size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, 1, kernel_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start near the identity."""
        size = self.weight.shape[2]
        nn.init.uniform_(self.weight, -0.5 * size**-0.5, 0.5 * size**-0.5)
        with torch.no_grad():
            self.weight[:, :, size // 2] += 1

    def forward(self, x: Float[Tensor, "b n w"], keep: Bool[Tensor, "b n"] | None) -> Float[Tensor, "b n w"]:
        """Convolve.

        Args:
            x: Tokens.
            keep: Real tokens, None where all are; the others count as zeros.
        """
        x = x if keep is None else torch.where(keep[..., None], x, 0.0)
        weight = self.weight.to(x.dtype)
        # On a CPU a row of a picture is convolved several times as fast as a line.
        lines = F.conv2d(x.mT[:, :, None], weight[:, :, None], padding=(0, weight.shape[2] // 2), groups=len(weight))
        return lines[:, :, 0].mT

    def extra_repr(self) -> str:
        """Channels and taps, for print."""
        return f"width={self.weight.shape[0]}, kernel_size={self.weight.shape[2]}"
