"""The iterative inverse and its gradient, added to a program."""

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
from nystrom.gpu.program import Program, Slot


def inverse(program: Program, a: Slot, divisors: Slot | None, steps: int, z: Slot) -> None:
    """Compute the inverse.

    Args:
        program: What to add to.
        a: (b, h, m, m) Matrices.
        divisors: (b, h) Divisors of the initial value; None means the product of the norms.
        steps: Iterations.
        z: (b, h, m, m) The inverse, or (b, h, steps + 1, m, m) all iterates.
    """
    b, h, m, _ = a.shape
    every, precision = len(z.shape) == 5, {"PRECISION": FLOAT32_PRECISION}
    if m <= LARGEST_WHOLE:
        program.launch(kernels.inverse_whole, b * h, a, divisors, z, m, steps, EVERY=every, **precision, BLOCK=power(m))
        return
    iterates = z if every else program.scratch((b, h, 2, m, m), a.dtype)
    program.torch(_start, a, divisors, iterates)
    scratch = program.scratch((b, h, 3, m, m), a.dtype)
    program.launch(
        kernels.inverse_blocks, b * h, a, iterates, scratch, m, steps, EVERY=every, **precision, BLOCK=_block(a)
    )
    if not every:
        program.torch(_take, iterates, steps % 2, z)


def inverse_backward(program: Program, a: Slot, divisors: Slot | None, steps: int, grad: Slot) -> tuple[Slot, Slot]:
    """Gradient of the matrices, and of the divisors if they were given."""
    b, h, m, _ = a.shape
    precision = {"PRECISION": FLOAT32_PRECISION}
    iterates = program.scratch((b, h, steps + 1, m, m), a.dtype)
    inverse(program, a, divisors, steps, iterates)
    a_grad, divisor_grads = program.scratch(a.shape, a.dtype), program.scratch((b, h), a.dtype)
    if m <= largest_whole_backward(a.dtype, program.device):
        block = power(m)
        program.launch(
            kernels.inverse_whole_backward,
            b * h,
            a,
            divisors,
            iterates,
            grad,
            a_grad,
            divisor_grads,
            m,
            steps,
            **precision,
            BLOCK=block,
            # With 4 warps, a block of 64 rows spills more registers.
            num_warps=8 if block > 32 else 4,
        )
        return a_grad, divisor_grads
    z_grads, scratch = (program.scratch((b, h, each, m, m), a.dtype) for each in (2, 6))
    program.torch(_start_backward, grad, z_grads, a_grad)
    whole = power(m) if m <= LARGEST_WHOLE else 0
    program.launch(
        kernels.inverse_blocks_backward,
        b * h,
        a,
        divisors,
        iterates,
        a_grad,
        z_grads,
        divisor_grads,
        scratch,
        m,
        steps,
        **precision,
        BLOCK=_block(a),
        WHOLE=whole,
    )
    if not whole:
        program.torch(_through_start, a, divisors, z_grads, steps % 2, a_grad, divisor_grads)
    return a_grad, divisor_grads


def _start(a: Tensor, divisors: Tensor | None, iterates: Tensor) -> None:
    iterates[:, :, 0] = a.mT / _divisors(a, divisors)[..., None, None]


def _take(iterates: Tensor, which: int, z: Tensor) -> None:
    z.copy_(iterates[:, :, which])


def _start_backward(grad: Tensor, z_grads: Tensor, a_grad: Tensor) -> None:
    z_grads[:, :, 0] = grad
    a_grad.zero_()


def _through_start(
    a: Tensor, divisors: Tensor | None, z_grads: Tensor, which: int, a_grad: Tensor, divisor_grads: Tensor
) -> None:
    """Add the gradient through the initial value."""
    start_grad, value = z_grads[:, :, which], _divisors(a, divisors)
    a_grad += start_grad.mT / value[..., None, None]
    divisor_grads.copy_(-(start_grad * a.mT).sum((-2, -1)) / value.square())
    if divisors is None:
        columns, rows = a.abs().sum(-2), a.abs().sum(-1)
        most, widest = columns.amax(-1, keepdim=True), rows.amax(-1, keepdim=True)
        at_most, at_widest = (columns == most).to(a.dtype), (rows == widest).to(a.dtype)
        share = (divisor_grads[..., None] * widest / at_most.sum(-1, keepdim=True)) * at_most
        a_grad += a.sign() * share[..., None, :]
        share = (divisor_grads[..., None] * most / at_widest.sum(-1, keepdim=True)) * at_widest
        a_grad += a.sign() * share[..., :, None]


def _block(a: Slot) -> int:
    return INVERSE_BLOCK_FLOAT64 if a.dtype == torch.float64 else INVERSE_BLOCK


def _divisors(a: Tensor, divisors: Tensor | None) -> Tensor:
    return a.abs().sum(-2).amax(-1) * a.abs().sum(-1).amax(-1) if divisors is None else divisors
