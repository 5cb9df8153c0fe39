r"""Sums of values weighted by a kernel of the distance, a stretch of queries at a time.

$$\mathrm{out}_i = \sum_j \kappa(\sqrt c\, \|q_i - k_j\|)\, v_j.$$

Of the n x s weights, only those of a few queries are held at a time: a few times as many numbers as the queries or keys
have. The backward pass computes them again. The plain formula is used in a compiler, since the number of stretches
would become part of its graph, inside `torch.func`, and if a graph of the backward pass is recorded. It stores n x s
numbers and raises for a second derivative (see `nystrom.kernels`).

Distances are computed from differences, not from a matrix product, so the distance of equal tokens is exactly zero. On
a CPU this takes several times as long as the fused call of the Gaussian kernel.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from nystrom.autograd_modes import pull_back
from nystrom.checks import Kernel
from nystrom.kernels import KERNELS

# Weights held at a time: at least _FEWEST, or a few times the numbers of the queries or keys if that is more, but no
# more than fit into a cache.
_FEWEST = 2**14
_TIMES_TOKENS = 4
_MOST = 2**20


def sum_by_distance(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    v: Float[Tensor, "b h s e"],
    *,
    kernel: Kernel,
    scale: float,
) -> Float[Tensor, "b h n e"]:
    """Sum the values of all keys, zeros where not real, each weighted by the kernel; in float32 or float64."""
    if torch.compiler.is_compiling() or not all(isinstance(x.shape[2], int) for x in (q, k)):
        return _plain(q, k, v, KERNELS[kernel], scale)
    return _SumByDistance.apply(q, k, v, KERNELS[kernel], scale)


def _plain(q: Tensor, k: Tensor, v: Tensor, kernel: Callable[..., Tensor], scale: float) -> Tensor:
    return kernel(q, k, scale=scale) @ v


def _stretch(q: Tensor, k: Tensor) -> int:
    """How many queries to take at a time."""
    numbers = min(max(_FEWEST, _TIMES_TOKENS * max(q.numel(), k.numel())), _MOST)
    return max(1, numbers // (k.shape[:3].numel()))


class _SumByDistance(torch.autograd.Function):
    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, kernel: Callable[..., Tensor], scale: float) -> Tensor:
        return torch.cat([_plain(part, k, v, kernel, scale) for part in q.split(_stretch(q, k), dim=2)], dim=2)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        q, k, v, ctx.kernel, ctx.scale = inputs
        ctx.save_for_backward(q, k, v)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad,), (q, k, v) = grads, ctx.saved_tensors
        if torch.is_grad_enabled():
            gradients = pull_back(lambda q, k, v: _plain(q, k, v, ctx.kernel, ctx.scale), (q, k, v), grad)
            return *gradients, None, None
        grad_q, grad_k, grad_v = [], torch.zeros_like(k), torch.zeros_like(v)
        length = _stretch(q, k)
        for part, coming in zip(q.split(length, dim=2), grad.split(length, dim=2), strict=True):
            leaves = part.detach().requires_grad_(), k.detach().requires_grad_()
            with torch.enable_grad():
                weights = ctx.kernel(*leaves, scale=ctx.scale)
            here, there = torch.autograd.grad(weights, leaves, coming @ v.mT)
            grad_q.append(here)
            # Not in place: what comes may be a batch of gradients.
            grad_k = grad_k + there
            grad_v = grad_v + weights.detach().mT @ coming
        return torch.cat(grad_q, dim=2), grad_k, grad_v, None, None

    @staticmethod
    def vmap(info, in_dims, *inputs):  # pyright: ignore[reportIncompatibleMethodOverride]
        return torch.vmap(_plain, in_dims)(*inputs), 0
