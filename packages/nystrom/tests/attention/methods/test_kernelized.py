import pytest
import torch

from nystrom import kernelized_attention, skyformer_attention
from nystrom.kernels import KERNELS, gaussian_kernel


def draw(seed, n, s, *, size=1.0, d=6, e=4):
    g = torch.Generator().manual_seed(seed)
    return [size * torch.randn(2, 3, t, w, generator=g, dtype=torch.float64) for t, w in ((n, d), (s, d), (s, e))]


@pytest.mark.parametrize("size", [0.01, 1.0, 3.0])
@pytest.mark.parametrize("scale", [None, 0.05])
def test_one_fused_call_is_the_dense_sum(size, scale):
    q, k, v = draw(0, 13, 21, size=size)
    expected = gaussian_kernel(q, k, scale=6**-0.5 if scale is None else scale) @ v
    # float64 rounding of |q|^2 + |k|^2 - 2 q.k
    torch.testing.assert_close(kernelized_attention(q, k, v, scale=scale), expected, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("kernel", list(KERNELS))
def test_every_kernel_is_the_dense_sum(kernel):
    q, k, v = draw(0, 13, 21)
    expected = KERNELS[kernel](q, k, scale=6**-0.5) @ v
    # float64 rounding of |q|^2 + |k|^2 - 2 q.k, or of sums
    torch.testing.assert_close(kernelized_attention(q, k, v, kernel=kernel), expected, rtol=1e-9, atol=1e-13)


def test_it_vanishes_far_from_every_key():
    q, k, v = draw(1, 5, 9)
    out = kernelized_attention(q + 100, k, v)
    # exp(-|q - k|^2 / 2 sqrt(d)) with |q - k| about 245
    assert out.abs().max() < 1e-300


def test_it_grows_with_the_number_of_near_keys():
    q = torch.zeros(1, 1, 1, 4, dtype=torch.float64)
    k = torch.zeros(1, 1, 500, 4, dtype=torch.float64)
    out = kernelized_attention(q, k, torch.ones(1, 1, 500, 1, dtype=torch.float64))
    # No normaliser: 500 keys at distance 0 add up.
    torch.testing.assert_close(out.flatten(), torch.tensor([500.0], dtype=torch.float64), rtol=1e-12, atol=0)


@pytest.mark.parametrize("size", [1e6, 1e12, 1e16])
def test_huge_norms_stay_finite(size):
    q, _, v = (x.float().requires_grad_() for x in draw(2, 9, 9))
    # |q|^2 - 2 q.k + |k|^2 is rounding alone here, and its exponential could be anything.
    out = kernelized_attention(size * q, size * q.flip(2), v)
    out.sum().backward()
    assert out.isfinite().all()
    assert out.abs().max() <= 10 * v.abs().max()
    assert q.grad.isfinite().all()


@pytest.mark.parametrize("attend", [kernelized_attention, skyformer_attention])
def test_a_sum_beyond_float16_is_the_largest_number_of_it(attend):
    q, v = torch.ones(1, 1, 3000, 8, dtype=torch.float16), 50 * torch.ones(1, 1, 3000, 8, dtype=torch.float16)
    out = attend(q, q, v)
    assert (out == torch.finfo(torch.float16).max).all()


@pytest.mark.parametrize("offset", [0.0, 10.0])
@pytest.mark.parametrize("d", [4, 16, 64])
def test_float32_rounds_distances_rather_than_norms(d, offset):
    def direct(q, k, v):
        return torch.exp(-0.5 * d**-0.5 * (q[..., :, None, :] - k[..., None, :, :]).square().sum(-1)) @ v

    error, plain = 0.0, 0.0
    for seed in range(8):
        g = torch.Generator().manual_seed(seed)
        q, k, v = (x * torch.randn(1, 2, 48, d, generator=g) for x in (10**0.5, 10**0.5, 1.0))
        q, k = q + offset, k + offset
        expected = direct(*(x.double() for x in (q, k, v)))
        error += (kernelized_attention(q, k, v) - expected).norm() / expected.norm()
        plain += (direct(q, k, v) - expected).norm() / expected.norm()
    # There, differences are taken before any product; here, differences of groups of channels.
    assert error <= 4 * plain
