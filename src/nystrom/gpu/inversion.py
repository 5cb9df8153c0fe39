# Triton's stubs expect its own wrapper around numbers that a kernel is specialised to.
# pyright: reportArgumentType=false, reportCallIssue=false
"""Launches of the iterative inverse and of its gradient."""

import torch
from torch import Tensor

from nystrom.gpu import inverse as kernels
from nystrom.gpu.launch import (
    FLOAT32_PRECISION,
    INVERSE_BLOCK,
    INVERSE_BLOCK_FLOAT64,
    LARGEST_WHOLE,
    largest_whole_backward,
    power,
)


def inverse(a: Tensor, divisors: Tensor | None, steps: int, *, every: bool = False) -> Tensor:
    """The inverse (b, h, m, m), or with `every` all iterates (b, h, steps + 1, m, m).

    Args:
        a: Matrices.
        divisors: (b, h) Divisors of the initial value; None means the product of the norms.
        steps: Iterations.
        every: Return all iterates.
    """
    b, h, m, _ = a.shape
    if m <= LARGEST_WHOLE:
        z = a.new_empty((b, h, steps + 1, m, m) if every else a.shape)
        block = power(m)
        kernels.inverse_whole[(b * h,)](a, divisors, z, m, steps, EVERY=every, PRECISION=FLOAT32_PRECISION, BLOCK=block)
        return z
    z = a.new_empty(b, h, steps + 1 if every else 2, m, m)
    z[:, :, 0] = a.mT / _divisors(a, divisors)[..., None, None]
    kernels.inverse_blocks[(b * h,)](
        a, z, a.new_empty(b, h, 3, m, m), m, steps, EVERY=every, PRECISION=FLOAT32_PRECISION, BLOCK=_block(a)
    )
    return z if every else z[:, :, steps % 2].contiguous()


def inverse_backward(a: Tensor, divisors: Tensor | None, steps: int, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient of the matrices, and of the divisors if they were given."""
    b, h, m, _ = a.shape
    iterates = inverse(a, divisors, steps, every=True)
    if m <= largest_whole_backward(a.dtype, a.device):
        a_grad, divisor_grads = torch.empty_like(a), a.new_empty(b, h)
        block = power(m)
        kernels.inverse_whole_backward[(b * h,)](
            a,
            divisors,
            iterates,
            grad,
            a_grad,
            divisor_grads,
            m,
            steps,
            PRECISION=FLOAT32_PRECISION,
            BLOCK=block,
            # With 4 warps, a block of 64 rows spills more registers.
            num_warps=8 if block > 32 else 4,
        )
        return a_grad, divisor_grads
    a_grad, z_grads, divisor_grads = torch.zeros_like(a), a.new_empty(b, h, 2, m, m), a.new_empty(b, h)
    z_grads[:, :, 0] = grad
    whole = power(m) if m <= LARGEST_WHOLE else 0
    kernels.inverse_blocks_backward[(b * h,)](
        a,
        divisors,
        iterates,
        a_grad,
        z_grads,
        divisor_grads,
        a.new_empty(b, h, 6, m, m),
        m,
        steps,
        PRECISION=FLOAT32_PRECISION,
        BLOCK=_block(a),
        WHOLE=whole,
    )
    if whole:
        return a_grad, divisor_grads
    start_grad, value = z_grads[:, :, steps % 2], _divisors(a, divisors)
    a_grad += start_grad.mT / value[..., None, None]
    divisor_grads = -(start_grad * a.mT).sum((-2, -1)) / value.square()
    if divisors is None:
        columns, rows = a.abs().sum(-2), a.abs().sum(-1)
        most, widest = columns.amax(-1, keepdim=True), rows.amax(-1, keepdim=True)
        at_most, at_widest = (columns == most).to(a.dtype), (rows == widest).to(a.dtype)
        share = (divisor_grads[..., None] * widest / at_most.sum(-1, keepdim=True)) * at_most
        a_grad += a.sign() * share[..., None, :]
        share = (divisor_grads[..., None] * most / at_widest.sum(-1, keepdim=True)) * at_widest
        a_grad += a.sign() * share[..., :, None]
    return a_grad, divisor_grads


def _block(a: Tensor) -> int:
    return INVERSE_BLOCK_FLOAT64 if a.dtype == torch.float64 else INVERSE_BLOCK


def _divisors(a: Tensor, divisors: Tensor | None) -> Tensor:
    return a.abs().sum(-2).amax(-1) * a.abs().sum(-1).amax(-1) if divisors is None else divisors
