import pytest
import torch

from nystrom.attention.methods.linear import linear_attention


def draw(seed, n, s=None, *, d=5, e=4, shift=0.0):
    g = torch.Generator().manual_seed(seed)
    s = n if s is None else s
    return [
        torch.randn(2, 3, t, w, generator=g, dtype=torch.float64) + by
        for t, w, by in ((n, d, shift), (s, d, shift), (s, e, 0.0))
    ]


def by_logarithms(q, k, v):
    """The n x s weights from the logarithms of the features, which stay in range for any q and k."""
    q, k = (torch.where(x > 0, x.clamp(min=0).log1p(), x) for x in (q, k))
    return torch.logsumexp(q[..., :, None, :] + k[..., None, :, :], dim=-1).softmax(dim=-1) @ v


def test_each_row_is_a_ratio_of_two_sums():
    q, k, v = draw(0, 7, 11)
    phi_q, phi_k = (torch.nn.functional.elu(x) + 1 for x in (q, k))
    out = linear_attention(q, k, v)
    for i in range(7):
        weights = (phi_q[:, :, i : i + 1] * phi_k).sum(-1)
        expected = (weights[..., None] * v).sum(2) / weights.sum(2)[..., None]
        # float64 rounding of sums of a dozen terms
        torch.testing.assert_close(out[:, :, i], expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("shift", [-1000.0, -60.0, 60.0, 1e6])
def test_it_keeps_its_precision_however_small_the_features_are(shift, dtype):
    # ELU + 1 is exactly 0 at -60, and its denominator with it.
    q, k, v = (x.to(dtype) for x in draw(1, 9, shift=shift))
    # Features are exponentials of numbers near 1000, rounded to 1000 * 2^-24 in float32.
    tolerance = 1e-3 if dtype == torch.float32 else 1e-11
    out = linear_attention(q, k, v)
    torch.testing.assert_close(out.double(), by_logarithms(q.double(), k.double(), v.double()), rtol=0, atol=tolerance)


def test_a_channel_may_be_far_below_the_others():
    q, k, v = draw(2, 9)
    # Either channel alone would let one of the sums vanish: e^-400 (1 + 300) in one, e^-500 in the other.
    q = q + torch.tensor([300.0, -500.0, -900.0, -900.0, -900.0], dtype=torch.float64)
    k = k + torch.tensor([-400.0, 0.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    torch.testing.assert_close(linear_attention(q, k, v), by_logarithms(q, k, v), rtol=1e-10, atol=1e-12)
    q, k, v = (x.float() for x in (q, k, v))
    # float32 holds 500 to 2^-16, and with it the exponents
    out, expected = linear_attention(q, k, v), by_logarithms(q.double(), k.double(), v.double())
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-3)


def test_weights_sum_to_one():
    q, k, v = draw(3, 8, 13)
    out = linear_attention(q, k, torch.ones_like(v))
    torch.testing.assert_close(out, torch.ones_like(out), rtol=1e-13, atol=0)


def test_its_gradient_is_that_of_the_dense_form():
    inputs = [x.requires_grad_() for x in draw(4, 8, 13, shift=-1.0)]
    weight = draw(5, 8)[2]
    written = torch.autograd.grad((linear_attention(*inputs) * weight).sum(), inputs)
    derived = torch.autograd.grad((by_logarithms(*inputs) * weight).sum(), inputs)
    for x, y in zip(written, derived, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-13)


def test_a_backward_under_autocast_keeps_its_precision():
    inputs = [x.float().requires_grad_() for x in draw(6, 20)]
    out = linear_attention(*inputs).square().sum()
    plain = torch.autograd.grad(out, inputs, retain_graph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = torch.autograd.grad(out, inputs)
    for x, y in zip(cast, plain, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


@pytest.mark.parametrize("wanted", ["qkv", "k", "qv"])
def test_it_has_a_second_derivative(wanted):
    inputs = [x[:1, :1, :, :2].requires_grad_(name in wanted) for name, x in zip("qkv", draw(7, 4), strict=True)]
    assert torch.autograd.gradgradcheck(linear_attention, inputs)


@pytest.mark.refuses
def test_another_feature_map_raises():
    with pytest.raises(ValueError, match="feature_map is 'relu'; expected one of 'elu'"):
        linear_attention(*draw(0, 4), feature_map="relu")
