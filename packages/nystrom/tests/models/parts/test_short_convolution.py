"""The short convolution is torch's depthwise one over the real tokens."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from nystrom.models.parts import modern
from nystrom.models.parts.modern import ShortConvolution


@pytest.mark.parametrize("size", [1, 3, 7])
@pytest.mark.parametrize("n", [1, 2, 20])
def test_it_is_the_convolution_of_torch_and_so_are_its_gradients(size, n):
    ours = ShortConvolution(6, size).double()
    theirs = nn.Conv1d(6, 6, size, padding=size // 2, groups=6, bias=False).double()
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, n, 6, dtype=torch.float64, requires_grad=True)
    grad = torch.randn_like(x)
    results = []
    for conv, out in ((ours, ours(x, None)), (theirs, theirs(x.mT).mT)):
        results.append((out, *torch.autograd.grad(out, (x, conv.weight), grad)))
    # float64 rounding over a few products.
    assert_close(results[0], results[1], rtol=1e-12, atol=1e-12)


def test_what_is_not_real_counts_as_zeros():
    conv = ShortConvolution(4, 5).double()
    x, keep = torch.randn(1, 9, 4, dtype=torch.float64), torch.tensor([[0, 0, 1, 1, 0, 1, 1, 0, 0]]).bool()
    x[0, 4] = torch.nan
    among = conv(x, keep)[:, 2:7]
    alone = conv(x[:, 2:7].nan_to_num(0.0) * keep[:, 2:7, None], None)
    assert_close(among, alone, rtol=1e-12, atol=1e-12)


def test_it_starts_near_the_identity():
    torch.manual_seed(0)
    conv = ShortConvolution(200, 5)
    away = conv.weight.detach() - torch.tensor([0, 0, 1.0, 0, 0])
    assert 0.9 < away.abs().max() / (0.5 * 5**-0.5) <= 1
    assert abs(away.mean()) < 0.02


# Kernels below and above those whose gradient is a product of windows, at lengths around a window's 32 tokens and where
# torch's library was wrong.
@pytest.mark.parametrize(
    ("n", "size"), [(76, 33), (100, 31), (33, 15), (32, 15), (1, 15), (5, 65), (64, 65), (90, 13), (3, 13)]
)
def test_the_gradients_of_float32_are_those_of_float64(n, size, monkeypatch):
    # One sequence at a time.
    monkeypatch.setattr(modern, "_NUMBERS", 1)
    conv, x = ShortConvolution(12, size), torch.randn(2, n, 12, requires_grad=True)
    grad = torch.randn(2, n, 12)
    single = torch.autograd.grad(conv(x, None), (x, conv.weight), grad)
    conv = conv.double()
    double = torch.autograd.grad(conv(x.double(), None), (x, conv.weight), grad.double())
    # float32 sums over some 200 products of numbers about 1.
    assert_close(single[0], double[0], rtol=1e-4, atol=1e-4)
    assert_close(single[1].double(), double[1], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("size", [5, 15])
def test_float32_has_forward_derivatives_of_values_and_of_gradients(size):
    conv, x = ShortConvolution(3, size), torch.randn(2, 40, 3)
    weight, along = conv.weight.detach(), (torch.randn_like(x), torch.randn_like(conv.weight))

    def out(x, weight):
        return torch.func.functional_call(conv, {"weight": weight}, (x, None))

    def gradients(x, weight):
        return torch.func.grad(lambda *given: out(*given).tanh().square().sum(), argnums=(0, 1))(x, weight)

    for function in (out, gradients):
        for moved in ((0,), (1,), (0, 1)):
            ways = [way if i in moved else torch.zeros_like(way) for i, way in enumerate(along)]
            single = torch.func.jvp(function, (x, weight), tuple(ways))[1]
            double = torch.func.jvp(function, (x.double(), weight.double()), tuple(way.double() for way in ways))[1]
            # float32 rounding of sums of some 1,000 products.
            torch.testing.assert_close(single, double, rtol=1e-4, atol=1e-3, check_dtype=False)
    alone = torch.func.jvp(lambda x: out(x, weight), (x,), along[:1])[1]
    assert_close(alone, out(along[0], weight), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [5, 15])
def test_float32_has_second_derivatives_and_gradients_of_each_sample(size):
    conv, x = ShortConvolution(3, size), torch.randn(2, 7, 3)

    def loss(x, weight):
        return torch.func.functional_call(conv, {"weight": weight}, (x, None)).tanh().square().sum()

    def sharpness(x, weight):
        return sum(grad.square().sum() for grad in torch.func.grad(loss, argnums=(0, 1))(x, weight))

    weight = conv.weight.detach()
    single = torch.func.grad(sharpness, argnums=(0, 1))(x, weight)
    double = torch.func.grad(sharpness, argnums=(0, 1))(x.double(), weight.double())
    # float32 rounding of sums of some 100 products.
    assert_close(single, tuple(grad.float() for grad in double), rtol=1e-4, atol=1e-4)
    gradients = torch.func.grad(loss, argnums=1)
    each = torch.func.vmap(gradients, in_dims=(0, None))(x[:, None], weight)
    assert_close(each, torch.stack([gradients(sample[None], weight) for sample in x]), rtol=1e-5, atol=1e-5)


def test_it_is_exported_and_cast_as_a_plain_convolution():
    conv, x = ShortConvolution(4, 15), torch.randn(2, 9, 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert conv(x, None).dtype == torch.bfloat16
    exported = torch.export.export(conv, (x, None))
    assert_close(exported.module()(x, None), conv(x, None))
