r"""Moore-Penrose pseudoinverse of a batch of small square matrices, in three ways.

**Iterative**, by matrix products only. Start from $Z_0$ and repeat
$$Z_{k+1} = \tfrac14 Z_k (13 I - A Z_k (15 I - A Z_k (7 I - A Z_k))).$$
The residual $R_k = I - A Z_k$ obeys $R_{k+1} = \tfrac34 R_k^3 + \tfrac14 R_k^4$. Stopped early, the iteration acts as a
regulariser: singular values far below $\|A\|$ are damped, not inverted.

**Ridge**, $Z = (A^\top A + \lambda^2 I)^{-1} A^\top$ with $\lambda = 0.01 \sqrt{\|A\|_1 \|A\|_\infty}$: exact where
singular values are large, bounded by $1 / (2 \lambda)$ where they are not.

**Exact**, by a singular value decomposition, for study. With $\varepsilon$ the rounding unit of the dtype, singular
values below $\sqrt\varepsilon\, \|A\|$ count as zero. So rounding errors are amplified by at most
$1 / \sqrt\varepsilon$: matrices of repeated tokens have singular values of the size of rounding errors, which are
arbitrary. The derivative is that of this truncated function: with $F = (A^+)^\top = U f(S) V^\top$ and
$D = U^\top dA\, V$,
$$U^\top dF\, V = P \circ D + Q \circ D^\top, \qquad P_{ij} \pm Q_{ij} = \frac{f(s_i) \mp f(s_j)}{s_i \mp s_j}.$$
If i and j are kept, $P_{ij} = 0$ and $Q_{ij} = -1 / (s_i s_j)$. If only one is, with the singular value a, and the
other with b, $P_{ij} = 1 / (a^2 - b^2)$ and $Q_{ij} = P_{ij}\, b / a$. If none is, both are zero. The derivative in
torch takes b for zero, and multiplies the rounding of projectors by $1 / a^2$.

Source: Daleckii and Krein (1965) for the derivative of a function of eigenvalues, here those of $(0, A; A^\top, 0)$;
Razavi et al. (2014); used for attention by Xiong et al. (2021), arXiv:2102.03902, eq. (14).
Departs from the authors' code: by default, the initial value uses norms of each matrix ("paper"), not over batch and
heads ("authors"); "sequence" is the authors' initial value computed for each sequence separately.
"""

from typing import get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from nystrom.autograd_modes import for_one_gradient, needs_graph, pull_back
from nystrom.checks import Inverse, StartValue, check_at_least, check_choice, check_positive
from nystrom.native import iteration_gradients, run_iteration, runs_natively
from nystrom.private_torch import is_transformed
from nystrom.shapes import check_tensor

# Damps singular values below a hundredth of the largest; A^T A + ridge^2 stays well conditioned in float32.
RIDGE = 0.01
# Rows of a matrix above which torch's products are faster on a CPU than loops of our own.
_LARGE = 128


def pinv(
    a: Float[Tensor, "*b m m"], *, inverse: Inverse = "iterative", steps: int = 6, z0: StartValue = "paper"
) -> Float[Tensor, "*b m m"]:
    """Invert each square matrix of a batch by `inverse`: "iterative" with `steps` and `z0`, "ridge" or "exact".

    Raises:
        ValueError: An invalid `inverse` or `z0`, negative `steps`, or `a` that is not a batch of square matrices of
            floats.
    """
    check_choice("pinv", inverse, get_args(Inverse))
    if inverse == "ridge":
        return pinv_ridge(a)
    if inverse == "exact":
        return pinv_exact(a)
    return pinv_iterative(a, steps=steps, z0=z0)


def pinv_iterative(a: Float[Tensor, "*b m m"], *, steps: int = 6, z0: StartValue = "paper") -> Float[Tensor, "*b m m"]:
    r"""Approximate the inverse of each matrix in a batch by products.

    Args:
        a: Square matrices; the worse their condition, the more steps they need.
        steps: Iterations, each of four m-by-m products.
        z0: "paper": $A^\top / (\|A\|_1 \|A\|_\infty)$, per matrix. "authors": $A^\top$ divided by the largest column
            sum in the whole batch, with which published checkpoints were trained; a result then depends on the rest of
            the batch. "sequence": the same, but only over the last batch axis, the heads: the value of "authors" for a
            sequence alone.

    Raises:
        ValueError: Negative `steps`, an invalid `z0`, or `a` that is not a batch of square matrices of floats.
    """
    check_square("a", a)
    check_at_least("pinv_steps", steps, 0)
    return iterate(a, None if z0 == "paper" else start_value(a, z0=z0), steps)


def start_value(a: Float[Tensor, "*b m m"], *, z0: StartValue = "paper") -> Float[Tensor, "*b m m"]:
    """Initial value of the iteration, $Z_0$, as in `pinv_iterative`.

    Raises:
        ValueError: An invalid `z0`, or `a` that is not a batch of square matrices of floats.
    """
    check_square("a", a)
    check_choice("z0", z0, get_args(StartValue))
    if z0 == "authors":
        # Over one axis: ONNX has no maximum over all axes.
        return a.mT / a.abs().sum(dim=-2).flatten().amax(dim=0)
    if z0 == "sequence":
        largest = a.abs().sum(dim=-2).amax(dim=-1)
        return a.mT / largest.amax(dim=-1, keepdim=True)[..., None, None]
    return a.mT / _norm_product(a)


def iterate(a: Float[Tensor, "*b m m"], z: Float[Tensor, "*b m m"] | None, steps: int) -> Float[Tensor, "*b m m"]:
    """Steps of the iteration from any start: $Z_{k + steps}$ from $Z_k$; without one, from that of "paper"."""
    batch, m = a.shape[:-2], a.shape[-1]
    a, z = a.reshape(-1, m, m), None if z is None else z.reshape(-1, m, m)
    inputs = (a,) if z is None else (a, z)
    if m > _LARGE or not runs_natively(*inputs):
        return _iterate(a, z, steps).reshape(*batch, m, m)
    keep = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    return _Iterated.apply(a, z, steps, keep).reshape(*batch, m, m)


def _iterate(a: Float[Tensor, "b m m"], z: Float[Tensor, "b m m"] | None, steps: int) -> Float[Tensor, "b m m"]:
    z = start_value(a) if z is None else z
    for _ in range(steps):
        # From the inside out; each call computes a product plus a multiple of its left factor.
        az = a @ z
        x = torch.baddbmm(az, az, az, beta=7, alpha=-1)
        x = torch.baddbmm(az, az, x, beta=15, alpha=-1)
        z = torch.baddbmm(z, z, x, beta=3.25, alpha=-0.25)
    return z


class _Iterated(torch.autograd.Function):
    """The inverse by our own loops on a CPU."""

    @staticmethod
    def forward(ctx, a: Tensor, z: Tensor | None, steps: int, keep: bool) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        out, history = run_iteration(a, z, steps, keep=keep)
        ctx.save_for_backward(a, z, history)
        ctx.steps = steps
        return out

    @staticmethod
    @for_one_gradient
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad,), (a, z, history), steps = grads, ctx.saved_tensors, ctx.steps
        if not needs_graph(grad):
            return *iteration_gradients(a, z, history, grad), None, None
        inputs = (a,) if z is None else (a, z)
        of_a, *of_z = pull_back(lambda a, z=None: _iterate(a, z, steps), inputs, grad)
        return of_a, of_z[0] if of_z else None, None, None


def pinv_ridge(a: Float[Tensor, "*b m m"], *, ridge: float = RIDGE) -> Float[Tensor, "*b m m"]:
    r"""Invert with a ridge: $(A^\top A + \lambda^2 I)^{-1} A^\top$, $\lambda$ = `ridge` $\sqrt{\|A\|_1 \|A\|_\infty}$.

    Args:
        a: Square matrices.
        ridge: Relative size below which singular values are damped.

    Raises:
        ValueError: `ridge` is not a positive, finite number, or `a` is not a batch of square matrices of floats.
    """
    check_square("a", a)
    check_positive("ridge", ridge)
    eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    # `solve` raises for the whole batch if one matrix is zero or not finite; `solve_ex` gives only that one no result.
    return torch.linalg.solve_ex(a.mT @ a + ridge**2 * _norm_product(a) * eye, a.mT)[0]


def pinv_exact(a: Float[Tensor, "*b m m"]) -> Float[Tensor, "*b m m"]:
    """Invert by singular value decomposition; singular values below sqrt(eps) of the largest count as zero.

    A matrix that is not finite gives NaN and gets no gradient; the rest of the batch is not affected.

    Raises:
        ValueError: `a` is not a batch of square matrices of floats.
    """
    check_square("a", a)
    finite = a.isfinite().all(dim=-1, keepdim=True).all(dim=-2, keepdim=True)
    eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    # The decomposition raises for the whole batch if one matrix is not finite.
    a = torch.where(finite, a, eye)
    inverse = _Truncated.apply(a)[0] if not torch.compiler.is_compiling() else _truncated_in_a_compiler(a)
    return torch.where(finite, inverse, torch.nan)


class _Truncated(torch.autograd.Function):
    """The inverse of the singular values that count, and the decomposition."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor) -> tuple[Tensor, ...]:
        return _decomposed(a)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*output[1:], *inputs)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _Gradient.apply(grads[0], *ctx.saved_tensors)


class _Gradient(torch.autograd.Function):
    """The gradient of a matrix from that of its inverse; its own derivative raises."""

    generate_vmap_rule = True

    @staticmethod
    def forward(grad: Tensor, u: Tensor, s: Tensor, vh: Tensor, a: Tensor) -> Tensor:
        # dA, with U and V moved to the other side of an inner product: P and Q are symmetric.
        p, q = _factors(s)
        w = u.mT @ grad.mT @ vh.mT
        return u @ (p * w + (q * w).mT) @ vh

    @staticmethod
    def setup_context(ctx, inputs, output) -> None: ...

    @staticmethod
    def backward(ctx, *grads: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        raise RuntimeError("the exact inverse has no second derivative; 'iterative' and 'ridge' have.")


def _truncated_in_a_compiler(a: Float[Tensor, "*b m m"]) -> Float[Tensor, "*b m m"]:
    """The inverse, plus its derivative times a change of zero, of which a compiler makes the gradient."""
    if is_transformed():
        raise RuntimeError(
            "the exact inverse takes no transform of torch.func inside torch.compile: call it without one of them."
        )
    inverse, u, s, vh = _decomposed(a.detach())
    (p, q), change = _factors(s), u.mT @ (a - a.detach()) @ vh.mT
    return inverse + (u @ (p * change + q * change.mT) @ vh).mT


def _decomposed(a: Float[Tensor, "*b m m"]) -> tuple[Tensor, ...]:
    u, s, vh = torch.linalg.svd(a)
    return (vh.mT * torch.where(_counts(s), 1 / s, 0.0)[..., None, :]) @ u.mT, u, s, vh


def _counts(s: Float[Tensor, "*b m"]) -> Bool[Tensor, "*b m"]:
    """Which singular values do not count as zero."""
    return s > torch.finfo(s.dtype).eps ** 0.5 * s[..., :1]


def _factors(s: Float[Tensor, "*b m"]) -> tuple[Float[Tensor, "*b m m"], Float[Tensor, "*b m m"]]:
    """P and Q of the derivative."""
    kept = _counts(s)
    both, one = (f(kept[..., :, None], kept[..., None, :]) for f in (torch.logical_and, torch.logical_xor))
    large, small = (f(s[..., :, None], s[..., None, :]) for f in (torch.maximum, torch.minimum))
    p = torch.where(one, 1 / torch.where(one, (large - small) * (large + small), 1.0), 0.0)
    return p, torch.where(both, -1 / torch.where(both, large * small, 1.0), p * small / torch.where(one, large, 1.0))


def pinv_similar(
    a: Float[Tensor, "*b m m"], symmetric: Float[Tensor, "*b m m"], *, inverse: Inverse = "iterative", steps: int = 6
) -> Float[Tensor, "*b m m"]:
    """Invert $A = e^{-t} S e^t$, a diagonal scaling of a symmetric positive definite matrix: $e^{-t} S^+ e^t$.

    Everything is computed on A, and S is only used for norms: rounding is then relative to the entries of A, whereas S
    has entries far below its norm. "exact" solves with A, without a threshold.

    Raises:
        ValueError: An invalid `inverse`, or negative `steps`.
    """
    check_choice("pinv", inverse, get_args(Inverse))
    check_at_least("pinv_steps", steps, 0)
    eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    if inverse == "exact":
        return torch.linalg.solve_ex(a, eye.expand_as(a))[0]
    # S is its own transpose, so A replaces both S and its transpose.
    norms = _norm_product(symmetric)
    if inverse == "ridge":
        return torch.linalg.solve_ex(a @ a + RIDGE**2 * norms * eye, a)[0]
    return iterate(a, a / norms, steps)


def residual(a: Float[Tensor, "*b m m"], z: Float[Tensor, "*b m m"]) -> Float[Tensor, "*b"]:
    r"""Spectral norm of $I - A Z$ per matrix: 0 for an exact inverse, 1 if some direction of A was not inverted.

    It is NaN if the matrix or its inverse is not finite.

    Raises:
        ValueError: The arguments are not batches of square matrices of floats, of equal size.
    """
    check_square("a", a)
    check_square("z", z)
    if z.shape[-1] != a.shape[-1]:
        raise ValueError(f"z has shape {tuple(z.shape)} but a has {tuple(a.shape)}; expected matrices of equal size.")
    left = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device) - a @ z
    finite = left.isfinite().all(dim=(-2, -1))
    # The singular value decomposition of a matrix that is not finite raises.
    norm = torch.linalg.matrix_norm(torch.where(finite[..., None, None], left, 0.0), ord=2)
    return torch.where(finite, norm, torch.nan)


def check_square(name: str, x: Tensor) -> None:
    """Raise if an argument is not a batch of square matrices of floats."""
    check_tensor(name, x)
    if x.ndim < 2 or x.shape[-1] != x.shape[-2] or not x.is_floating_point():
        raise ValueError(f"{name} is {tuple(x.shape)} of {x.dtype}; expected square matrices (.., m, m) of floats.")


def _norm_product(a: Float[Tensor, "*b m m"]) -> Float[Tensor, "*b 1 1"]:
    norm_1, norm_inf = (a.abs().sum(dim=dim).amax(dim=-1) for dim in (-2, -1))
    return (norm_1 * norm_inf)[..., None, None]
