r"""Kernel functions of two sets of points, as dense matrices.

With `scale` $c$ (the $1 / \sqrt{d}$ of attention):

- softmax kernel $\mathrm{SM}(q, k) = \exp(c\, q^\top k)$,
- Gaussian kernel $\kappa(q, k) = \exp(-\tfrac{c}{2} \|q - k\|^2)$; at $c = d^{-1/2}$ this is $\kappa(q / d^{1/4}, k /
  d^{1/4})$ of Skyformer, eq. (3).

They are tied by $\mathrm{SM}(q, k) = e^{c \|q\|^2 / 2}\, \kappa(q, k)\, e^{c \|k\|^2 / 2}$ (Skyformer, Lemma 1, whose
inline Gaussian lacks the minus sign).

Source: Chen et al. (2021), arXiv:2111.00035, sections 3.1 and 4.1.
"""

import torch
from jaxtyping import Float
from torch import Tensor


def softmax_kernel(q: Float[Tensor, "*b n d"], k: Float[Tensor, "*b s d"], *, scale: float) -> Float[Tensor, "*b n s"]:
    """Unnormalised softmax scores; they overflow where a score passes the logarithm of the largest number."""
    return torch.exp(scale * (q @ k.mT))


def gaussian_kernel(q: Float[Tensor, "*b n d"], k: Float[Tensor, "*b s d"], *, scale: float) -> Float[Tensor, "*b n s"]:
    """Gaussian scores in (0, 1]."""
    norms = 0.5 * (q.square().sum(-1)[..., :, None] + k.square().sum(-1)[..., None, :])
    # The exponent is at most 0; rounding of three large terms can leave it a little above.
    return torch.exp((scale * (q @ k.mT - norms)).clamp(max=0))
