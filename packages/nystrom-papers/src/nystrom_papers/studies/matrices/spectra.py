r"""Quantities from singular values and eigenvalues, for a batch of matrices.

With singular values $\sigma_1 \ge \sigma_2 \ge \dots$ and $p_i = \sigma_i / \sum_j \sigma_j$:

- spectral norm $\|A\| = \sigma_1$, by a power iteration with $A^\top A$,
- effective rank $\exp(-\sum_i p_i \ln p_i)$,
- condition number, the largest singular value divided by the smallest.

For symmetric positive semidefinite C and a ridge $\lambda > 0$:

- leverage scores $\ell_i = (C (C + \lambda I)^{-1})_{ii}$, in [0, 1),
- statistical dimension $\sum_i \ell_i$, roughly the number of eigenvalues above $\lambda$.

Source: Roy and Vetterli (2007) for the effective rank; Chen et al. (2021), arXiv:2111.00035, Theorem 2, for the rest.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from nystrom.checks import check_at_least


def spectral_norm(a: Float[Tensor, "*b n s"], *, steps: int = 32) -> Float[Tensor, "*b"]:
    r"""Estimate the largest singular value of each matrix from below, by products with vectors.

    This is a power iteration that starts from a fixed vector x and keeps all its iterates. With Q an orthonormal basis
    of $(A^\top A)^i x$, $i = 0, \dots,$ `steps` - 1, the result is $\|A Q\|$, which is at least the estimate from the
    last iterate alone. It is exact up to rounding if `steps` reaches n or s. With fewer steps, the relative error falls
    roughly as $e^{-4 i \sqrt{1 - \sigma_2 / \sigma_1}}$ in the number i of steps; 32 steps leave about $10^{-6}$ for a
    square matrix of random numbers.

    Args:
        a: Matrices, such as the difference of an approximation and its target; one that is not finite gives NaN.
        steps: Iterations, each of two products of the matrix with a vector.

    Raises:
        ValueError: `steps` is below 1.
    """
    check_at_least("steps", steps, 1)
    a = a.mT if a.shape[-1] > a.shape[-2] else a
    # Relative to the largest entry, so that squares neither overflow nor underflow.
    size = a.abs().amax(dim=(-2, -1), keepdim=True)
    a = torch.where(size.isfinite() & (size > 0), a / size, 0.0)
    # From a separate generator: the start is the same in every call, and no other random draw changes.
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(a.shape[-1], 1, generator=generator, device="cpu", dtype=torch.float64)
    x = start.to(a).expand(*a.shape[:-2], -1, -1)
    basis = x[..., :0]
    for _ in range(min(steps, a.shape[-1])):
        x = x - basis @ (basis.mT @ x)
        length = torch.linalg.vector_norm(x, dim=-2, keepdim=True)
        x = x / torch.where(length > 0, length, 1.0)
        basis = torch.cat([basis, x], dim=-1)
        x = a.mT @ (a @ x)
    # Because of rounding the vectors are not quite orthogonal; without QR the result could be too large.
    norm = torch.linalg.matrix_norm(a @ torch.linalg.qr(basis).Q, ord=2)
    return torch.where(size.isfinite(), norm[..., None, None] * size, torch.nan)[..., 0, 0]


def effective_rank(singular_values: Float[Tensor, "*b r"]) -> Float[Tensor, "*b"]:
    """Exponential of the entropy of the normalised singular values: r if all are equal; NaN if all are 0."""
    shares = singular_values / singular_values.sum(dim=-1, keepdim=True)
    return torch.special.entr(shares).sum(dim=-1).exp()


def condition_number(singular_values: Float[Tensor, "*b r"]) -> Float[Tensor, "*b"]:
    """The largest singular value divided by the smallest: infinite for a singular matrix, NaN if all are 0."""
    return singular_values.amax(dim=-1) / singular_values.amin(dim=-1)


def statistical_dimension(c: Float[Tensor, "*b n n"], ridge: float | Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
    r"""Trace of $C (C + \lambda I)^{-1}$.

    Args:
        c: Symmetric positive semidefinite matrices; eigenvalues that rounding has made negative count as 0.
        ridge: $\lambda$, one for all matrices or one for each.

    Raises:
        ValueError: `ridge` is not positive.
    """
    return _shrunk(torch.linalg.eigvalsh(c), ridge).sum(dim=-1)


def leverage_scores(c: Float[Tensor, "*b n n"], ridge: float | Float[Tensor, "*b"]) -> Float[Tensor, "*b n"]:
    r"""Diagonal of $C (C + \lambda I)^{-1}$; it sums to `statistical_dimension`, which says what both take."""
    values, vectors = torch.linalg.eigh(c)
    return (vectors.square() @ _shrunk(values, ridge)[..., None])[..., 0]


def _shrunk(values: Float[Tensor, "*b n"], ridge: float | Float[Tensor, "*b"]) -> Float[Tensor, "*b n"]:
    """Eigenvalues of C (C + ridge I)^-1 from those of C."""
    ridge = torch.as_tensor(ridge, dtype=values.dtype, device=values.device)
    if not (ridge > 0).all():
        raise ValueError(f"ridge is {ridge.tolist()}; expected positive numbers.")
    values = values.clamp(min=0)
    return values / (values + ridge[..., None])
