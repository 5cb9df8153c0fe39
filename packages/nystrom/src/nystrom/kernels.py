r"""Kernel functions between two sets of points, as dense matrices.

With `scale` $c$ (the $1 / \sqrt{d}$ of attention):

- softmax kernel $\mathrm{SM}(q, k) = \exp(c\, q^\top k)$,
- Gaussian kernel $\kappa(q, k) = \exp(-\tfrac{c}{2} \|q - k\|^2)$; at $c = d^{-1/2}$ this is $\kappa(q / d^{1/4}, k /
  d^{1/4})$ of Skyformer, eq. (3),
- with $r = \sqrt c\, \|q - k\|$: Laplace $e^{-r}$ and Matérn $(1 + \sqrt3 r)\, e^{-\sqrt3 r}$ (smoothness 3/2) and
  $(1 + \sqrt5 r + \tfrac53 r^2)\, e^{-\sqrt5 r}$ (smoothness 5/2); the Laplace kernel of the Euclidean norm is the
  Matérn kernel of smoothness 1/2.

All are positive semidefinite. The first two are computed from inner products. Kernels of r are computed from
differences of tokens, because the square root magnifies the rounding of small differences of squares. The gradient of r
is taken as 0 where q = k: this is correct for both Matérn kernels, and a subgradient for the Laplace kernel, which has
a peak there. Asking for a second derivative of a kernel of r raises an error.

The first two are related by $\mathrm{SM}(q, k) = e^{c \|q\|^2 / 2}\, \kappa(q, k)\, e^{c \|k\|^2 / 2}$ (Skyformer,
Lemma 1, whose inline Gaussian lacks the minus sign).

Source: Chen et al. (2021), arXiv:2111.00035, sections 3.1 and 4.1; Rasmussen and Williams (2006), section 4.2.1,
for the Matérn class.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from nystrom.checks import Kernel
from nystrom.private_torch import cdist_backward, is_transformed


def softmax_kernel(q: Float[Tensor, "*b n d"], k: Float[Tensor, "*b s d"], *, scale: float) -> Float[Tensor, "*b n s"]:
    """Unnormalised softmax scores; they overflow if a score exceeds the logarithm of the dtype's largest number."""
    return torch.exp(scale * (q @ k.mT))


def gaussian_kernel(q: Float[Tensor, "*b n d"], k: Float[Tensor, "*b s d"], *, scale: float) -> Float[Tensor, "*b n s"]:
    """Gaussian scores in (0, 1]."""
    return torch.exp(gaussian_logarithm(q, k, scale=scale))


def gaussian_logarithm(
    q: Float[Tensor, "*b n d"], k: Float[Tensor, "*b s d"], *, scale: float
) -> Float[Tensor, "*b n s"]:
    """Logarithms of Gaussian scores, at most 0."""
    norms = 0.5 * (q.square().sum(-1)[..., :, None] + k.square().sum(-1)[..., None, :])
    # Rounding of three large terms can give slightly more than 0.
    return (scale * (q @ k.mT - norms)).clamp(max=0)


def laplace_kernel(q: Float[Tensor, "*b n d"], k: Float[Tensor, "*b s d"], *, scale: float) -> Float[Tensor, "*b n s"]:
    """Laplace scores of Euclidean distances, in (0, 1]."""
    return torch.exp(-_distances(q, k, scale=scale))


def matern32_kernel(q: Float[Tensor, "*b n d"], k: Float[Tensor, "*b s d"], *, scale: float) -> Float[Tensor, "*b n s"]:
    """Matérn scores of smoothness 3/2, in (0, 1]."""
    x = 3**0.5 * _distances(q, k, scale=scale)
    return (1 + x) * torch.exp(-x)


def matern52_kernel(q: Float[Tensor, "*b n d"], k: Float[Tensor, "*b s d"], *, scale: float) -> Float[Tensor, "*b n s"]:
    """Matérn scores of smoothness 5/2, in (0, 1]."""
    x = 5**0.5 * _distances(q, k, scale=scale)
    return (1 + x + x.square() / 3) * torch.exp(-x)


def _distances(q: Float[Tensor, "*b n d"], k: Float[Tensor, "*b s d"], *, scale: float) -> Float[Tensor, "*b n s"]:
    """Distances times the root of the scale, clamped so that their squares stay finite."""
    if not torch.compiler.is_compiling():
        distances = _Distances.apply(q, k)
    elif is_transformed():
        # A compiler sees neither the rule for a map nor the missing second derivative.
        squares = (q[..., :, None, :] - k[..., None, :, :]).square().sum(dim=-1)
        distances = torch.where(squares == 0, 0.0, torch.where(squares == 0, 1.0, squares).sqrt())
    else:
        distances = _directly(q, k)
    return (scale**0.5 * distances).clamp(max=torch.finfo(distances.dtype).max ** 0.5 / 8)


def _directly(q: Float[Tensor, "*b n d"], k: Float[Tensor, "*b s d"]) -> Float[Tensor, "*b n s"]:
    """Distances from differences; inside `torch.vmap` the gradient that torch has for them is wrong."""
    return torch.cdist(q, k, compute_mode="donot_use_mm_for_euclid_dist")


class _Distances(torch.autograd.Function):
    """`_directly`, with a gradient that can be mapped."""

    @staticmethod
    def forward(q: Tensor, k: Tensor) -> Tensor:
        return _directly(q, k)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad,), (q, k, r) = grads, ctx.saved_tensors
        return _Gradient.apply(grad, q, k, r), _Gradient.apply(grad.mT, k, q, r.mT)

    @staticmethod
    def vmap(info, in_dims, *inputs):  # pyright: ignore[reportIncompatibleMethodOverride]
        return _Distances.apply(*_mapped_first(info, in_dims, inputs)), 0


class _Gradient(torch.autograd.Function):
    """The gradient of the first points of `_Distances`, zero between equal ones."""

    @staticmethod
    def forward(*inputs: Tensor) -> Tensor:
        grad, q, k, r = (x.contiguous() for x in inputs)
        return cdist_backward(grad, q, k, 2.0, r)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None: ...

    @staticmethod
    def backward(ctx, *grads: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        raise RuntimeError(
            "a kernel of distances has no second derivative: use a method that has one (see `nystrom methods`)."
        )

    @staticmethod
    def vmap(info, in_dims, *inputs):  # pyright: ignore[reportIncompatibleMethodOverride]
        return _Gradient.apply(*_mapped_first(info, in_dims, inputs)), 0


def _mapped_first(info, in_dims: tuple[int | None, ...], inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Inputs of a map with the mapped axis first, one more of the batch."""
    return [
        x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
        for x, dim in zip(inputs, in_dims, strict=True)
    ]


# The dense function of each kernel that depends on a distance.
KERNELS: dict[Kernel, Callable[..., Tensor]] = {
    "gaussian": gaussian_kernel,
    "laplace": laplace_kernel,
    "matern32": matern32_kernel,
    "matern52": matern52_kernel,
}


def half_norms(x: Float[Tensor, "*b n d"], *, scale: float = 1.0) -> Float[Tensor, "*b n 1"]:
    """Half the squared norm of each token, times `scale`, clamped so that sums of a few stay finite."""
    return (0.5 * scale * x.square().sum(dim=-1, keepdim=True)).clamp(max=torch.finfo(x.dtype).max / 8)
