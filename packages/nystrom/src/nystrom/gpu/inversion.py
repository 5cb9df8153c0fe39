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
    """Add the inverse of the matrices a (b, h, m, m) to a program, in z: alone, or (b, h, steps + 1, m, m) all
    iterates.

    `divisors` (b, h) divide the initial value; None means the product of the norms.
    """
    b, h, m, _ = a.shape
    every, precision = len(z.shape) == 5, {"PRECISION": FLOAT32_PRECISION}
    if m <= LARGEST_WHOLE:
        program.launch(kernels.inverse_whole, b * h, a, divisors, z, m, steps, EVERY=every, **precision, BLOCK=power(m))
        return
    iterates = z if every else program.scratch((b, h, 2, m, m), a.dtype)
    scratch = program.scratch((b, h, 3, m, m), a.dtype)
    given = (a, divisors, iterates, None if every else z, scratch, m, steps)
    program.launch(kernels.inverse_blocks, b * h, *given, **precision, BLOCK=_block(a), BLOCK_M=power(m))


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
    given = (a, divisors, iterates, grad, a_grad, z_grads, divisor_grads, scratch, m, steps)
    program.launch(kernels.inverse_blocks_backward, b * h, *given, **precision, BLOCK=_block(a), BLOCK_M=power(m))
    return a_grad, divisor_grads


def divisors(matrix: Tensor, z0: str) -> Tensor:
    """Divisors of the initial value that depend on more than one matrix."""
    largest = matrix.abs().sum(-2).amax(-1)
    largest = largest.amax() if z0 == "authors" else largest.amax(-1, keepdim=True)
    return largest.expand(matrix.shape[:2]).contiguous()


def divisors_backward(matrix: Tensor, given: Tensor, divisor_grads: Tensor, z0: str) -> Tensor:
    """Gradient of the matrices through `divisors`: all of the batch, or of a sequence, share the largest column sum."""
    columns = matrix.abs().sum(-2)
    shared = (0, 1) if z0 == "authors" else (1,)
    total = divisor_grads.sum(shared, keepdim=True)[..., None]
    most = (columns == given[..., None]).to(matrix.dtype)
    axes = (*shared, 2)
    return matrix.sign() * (total / most.sum(axes, keepdim=True) * most)[..., None, :]


def _block(a: Slot) -> int:
    return INVERSE_BLOCK_FLOAT64 if a.dtype == torch.float64 else INVERSE_BLOCK
