r"""The Nyström method on dense matrices: the reference for attention through landmarks.

- Symmetric positive semidefinite C, with columns chosen by S:
  $\tilde C = C S\, (S^\top C S)^+ S^\top C$ (`nystrom_psd`; Skyformer, eq. 5).
- Any matrix S, such as the softmax matrix itself, with columns c and rows r:
  $\hat S = S_{:c}\, A^+ S_{r:}$ with $A = S_{rc}$ (`nystrom_columns_and_rows`; Nyströmformer, eq. 3-6).
- $B = \phi(Q, K)$ for a positive semidefinite kernel $\phi$: an off-diagonal block of the completion
  $\bar B = \phi(\binom QK, \binom QK)$ (`complete`; Skyformer, eq. 4), and that block of its approximation
  (`nystrom_off_diagonal`; eq. 5-6), which needs neither $\bar B$ nor B.

For symmetric W, the product $L\, W^+ R$ is computed as $(L\, W^{+1/2})(W^{+1/2} R)$, since kernel matrices are nearly
singular. In this form, $\tilde C \preceq C$ holds in float64 up to a few rounding errors of the norm; with $W^+$ in the
middle it holds only up to about $10^{-5}$ of the norm.

Source: Chen et al. (2021), arXiv:2111.00035, section 4.2; Xiong et al. (2021), arXiv:2102.03902.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

# A kernel function as a dense matrix: points (.., n, d) and (.., s, d) -> (.., n, s).
DenseKernel = Callable[[Tensor, Tensor], Tensor]
# An approximate inverse of a batch of square matrices, such as one of `nystrom.linalg.pinv`.
SquareInverse = Callable[[Tensor], Tensor]


def nystrom_psd(c: Float[Tensor, "*b n n"], indices: Int[Tensor, "*#b m"]) -> Float[Tensor, "*b n n"]:
    """Approximate symmetric positive semidefinite matrices from some of their columns.

    Indices are the same for all matrices or different for each; a repeated column changes nothing.
    """
    rows = _rows(c, indices)
    return _through(rows.mT, _rows(rows.mT, indices), rows)


def nystrom_columns_and_rows(
    s: Float[Tensor, "*b n t"], indices: Int[Tensor, "*#b m"], *, inverse: SquareInverse = torch.linalg.pinv
) -> Float[Tensor, "*b n t"]:
    """Approximate matrices from some of their columns and the rows of the same indices."""
    left, right = _rows(s.mT, indices).mT, _rows(s, indices)
    return left @ inverse(_rows(left, indices)) @ right


def complete(
    kernel: DenseKernel, q: Float[Tensor, "*b n d"], k: Float[Tensor, "*b s d"]
) -> Float[Tensor, "*b all all"]:
    """The positive semidefinite matrix of queries and keys together, of which kernel(q, k) is a block."""
    tokens = torch.cat([q, k], dim=-2)
    return kernel(tokens, tokens)


def nystrom_off_diagonal(
    kernel: DenseKernel,
    q: Float[Tensor, "*b n d"],
    k: Float[Tensor, "*b s d"],
    indices: Int[Tensor, "*#b m"],
    *,
    inverse: SquareInverse | None = None,
) -> Float[Tensor, "*b n s"]:
    """Approximate kernel(q, k): the upper right block of `nystrom_psd(complete(kernel, q, k), ...)`.

    Args:
        kernel: A positive semidefinite kernel, such as those of `nystrom.kernels`.
        q: Queries.
        k: Keys.
        indices: Landmarks: queries below n, keys from n on.
        inverse: Replaces the Moore-Penrose inverse of the landmarks' matrix.
    """
    landmarks = _rows(torch.cat([q, k], dim=-2), indices)
    left, inner, right = kernel(q, landmarks), kernel(landmarks, landmarks), kernel(landmarks, k)
    return _through(left, inner, right) if inverse is None else left @ inverse(inner) @ right


def _rows(x: Float[Tensor, "*b n d"], indices: Int[Tensor, "*#b m"]) -> Float[Tensor, "*b m d"]:
    return torch.take_along_dim(x, indices.expand(*x.shape[:-2], -1)[..., None], dim=-2)


def _through(
    left: Float[Tensor, "*b n m"], inner: Float[Tensor, "*b m m"], right: Float[Tensor, "*b m s"]
) -> Float[Tensor, "*b n s"]:
    """The product of the left factor, the inverse of the symmetric inner matrix, and the right factor."""
    values, vectors = torch.linalg.eigh(inner)
    # Eigenvalues within rounding of 0 count as 0, as in the Moore-Penrose inverse.
    least = values.shape[-1] * torch.finfo(values.dtype).eps * values.amax(dim=-1, keepdim=True)
    root = torch.where(values > least, values, torch.inf).rsqrt()
    return (left @ vectors * root[..., None, :]) @ (root[..., :, None] * (vectors.mT @ right))
