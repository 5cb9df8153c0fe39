"""The inverse by kernels is the iteration of `nystrom.linalg`, and so is its gradient."""

import pytest
import torch

pytest.importorskip("triton")

from nystrom.gpu import inversion
from nystrom.gpu.program import Program, key_of
from nystrom.linalg.pinv import pinv_iterative

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def draw(m, dtype=torch.float64, seed=0):
    """Matrices without rows or columns of equal sums, so that rounding does not decide which one attains a norm."""
    a = torch.randn(2, 2, m, m, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (a.softmax(-1) + 0.1 * torch.rand(a.shape, generator=torch.Generator().manual_seed(1))).to(DEVICE, dtype)


def inverse(a, divisors, steps):
    program = Program(key_of(a, divisors))
    inversion.inverse(program, *program.inputs, steps, program.result(a.shape, a.dtype))
    return program(a, divisors)[0]


def inverse_backward(a, divisors, steps, grad):
    program = Program(key_of(a, divisors, grad))
    first, second, third = program.inputs
    for slot in inversion.inverse_backward(program, first, second, steps, third):
        program.torch(lambda x, copy: copy.copy_(x), slot, program.result(slot.shape, slot.dtype))
    return program(a, divisors, grad)


# In registers up to 64 (32 backward in float64), in scratch memory above.
@pytest.mark.parametrize(
    ("m", "steps"), [(1, 6), (5, 0), (5, 1), (32, 6), (40, 1), (64, 1), pytest.param(66, 1, marks=pytest.mark.long)]
)
def test_values_and_gradients_are_those_of_the_reference(m, steps):
    a = draw(m).requires_grad_()
    expected = pinv_iterative(a, steps=steps)
    grad = torch.randn(a.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(DEVICE)
    (wanted,) = torch.autograd.grad(expected, a, grad)
    # float64 rounding through steps that each multiply it by a few.
    torch.testing.assert_close(inverse(a.detach(), None, steps), expected, rtol=1e-9, atol=1e-9)
    mine, _ = inverse_backward(a.detach(), None, steps, grad)
    torch.testing.assert_close(mine, wanted, rtol=1e-8, atol=1e-8 * wanted.abs().max().item())


@pytest.mark.parametrize("m", [5, pytest.param(34, marks=pytest.mark.long)])
def test_a_divisor_has_its_gradient(m):
    a, divisors = draw(m).requires_grad_(), torch.tensor([[3.0, 5.0], [4.0, 6.0]]).double().to(DEVICE).requires_grad_()
    z = a.mT / divisors[..., None, None]
    for _ in range(2):
        az = a @ z
        eye = torch.eye(m, dtype=a.dtype, device=DEVICE)
        z = 0.25 * z @ (13 * eye - az @ (15 * eye - az @ (7 * eye - az)))
    grad = torch.ones_like(z)
    wanted = torch.autograd.grad(z, (a, divisors), grad)
    torch.testing.assert_close(inverse(a.detach(), divisors.detach(), 2), z, rtol=1e-9, atol=1e-9)
    mine = inverse_backward(a.detach(), divisors.detach(), 2, grad)
    for x, y in zip(mine, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-8, atol=1e-8)


def test_float32_is_kept():
    a = draw(20, torch.float32)
    torch.testing.assert_close(inverse(a, None, 6), pinv_iterative(a), rtol=1e-4, atol=1e-4)
