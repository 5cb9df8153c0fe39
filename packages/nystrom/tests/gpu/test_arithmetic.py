"""Rounding: products of float16 weights where a tensor core would cut, and results in bfloat16."""

import pytest
import torch

triton = pytest.importorskip("triton")
tl = triton.language

from nystrom.gpu.arithmetic import nearest_tf32, stored  # noqa: E402


@triton.jit
def _round(x, y, N: tl.constexpr):
    places = tl.arange(0, N)
    tl.store(y + places, nearest_tf32(tl.load(x + places)))


def test_values_are_rounded_to_the_nearest_of_ten_bits():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    g = torch.Generator().manual_seed(0)
    drawn = torch.randn(1020, generator=g) * 10 ** torch.randint(-6, 6, (1020,), generator=g)
    special = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0])
    x = torch.cat([drawn, special]).to(device)
    y = torch.empty_like(x)
    _round[(1,)](x, y, 1024)
    fraction, exponent = torch.frexp(x[:1020].double())
    # 10 bits behind the leading one; no tie was drawn.
    nearest = torch.ldexp((fraction * 2**11).round(), exponent - 11)
    torch.testing.assert_close(y[:1020].double(), nearest, rtol=0, atol=0)
    torch.testing.assert_close(y[1020:], x[1020:], rtol=0, atol=0, equal_nan=True)
    half = x.half().float()
    _round[(1,)](half, y, 1024)
    torch.testing.assert_close(y, half, rtol=0, atol=0, equal_nan=True)


@triton.jit
def _store(x, y, N: tl.constexpr):
    places = tl.arange(0, N)
    tl.store(y + places, stored(tl.load(x + places), y.dtype.element_ty))


def test_results_in_bfloat16_are_rounded_as_by_torch():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    g = torch.Generator().manual_seed(0)
    drawn = torch.randn(1018, generator=g) * 10 ** torch.randint(-6, 6, (1018,), generator=g)
    # A tie to even either way, and what is no normal number.
    special = torch.tensor([0.0, -0.0, float("inf"), float("nan"), 1 + 2**-8, 1 + 3 * 2**-8])
    x = torch.cat([drawn, special]).to(device)
    y = torch.empty_like(x, dtype=torch.bfloat16)
    _store[(1,)](x, y, 1024)
    torch.testing.assert_close(y, x.bfloat16(), rtol=0, atol=0, equal_nan=True)
