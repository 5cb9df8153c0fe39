"""Products of float16 weights round as they say, where a tensor core would cut."""

import pytest
import torch

triton = pytest.importorskip("triton")
tl = triton.language

from nystrom.gpu.arithmetic import nearest_tf32  # noqa: E402


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
