import pytest
import torch

from nystrom import softmax_attention
from nystrom.attention.methods.skyformer_softmax import (
    SkyformerSoftmaxOptions,
    _guarded_ratio,
    _left,
    _levels,
    _middle,
    skyformer_softmax_attention,
)
from nystrom.kernels import gaussian_logarithm, softmax_kernel
from nystrom.landmarks import draw as draw_numbers
from nystrom.landmarks import uniform


def draw(seed, n, s=None, *, size=1.0, d=6):
    g = torch.Generator().manual_seed(seed)
    s = n if s is None else s
    return [x * torch.randn(2, 3, t, d, generator=g, dtype=torch.float64) for t, x in ((n, size), (s, size), (s, 1.0))]


def smooth(seed, n, *, size=1.0):
    return [x.cumsum(dim=2) / n**0.5 for x in draw(seed, n, size=size)]


def error(out, q, k, v):
    exact = softmax_attention(q, k, v)
    return (out - exact).norm() / exact.norm()


@pytest.mark.parametrize(("n", "s", "m"), [(24, 24, 8), (30, 17, 7)])
def test_it_is_the_formula_of_the_paper(n, s, m):
    q, k, v = draw(0, n, s, size=0.5)
    draws = draw_numbers(m, torch.Generator().manual_seed(5), q.device)
    marks = torch.cat([uniform(q, m // 2, draws=draws[: m // 2]), uniform(k, m - m // 2, draws=draws[m // 2 :])], dim=2)
    scale = 6**-0.5
    # Equation (5) with SM as the kernel; the ridge on the Gaussian is gamma exp(c |l|^2) on SM.
    ridge = torch.diag_embed(1e-3 * torch.exp(scale * marks.square().sum(-1)))
    middle = torch.linalg.inv(softmax_kernel(marks, marks, scale=scale) + ridge)
    a = softmax_kernel(q, marks, scale=scale) @ middle @ softmax_kernel(marks, k, scale=scale)
    expected = a @ v / a.sum(-1, keepdim=True)
    options = {"num_landmarks": m, "gamma": 1e-3, "pinv": "exact"}
    out = skyformer_softmax_attention(q, k, v, **options, generator=torch.Generator().manual_seed(5))
    torch.testing.assert_close(out, expected.clamp(v.amin(2, True), v.amax(2, True)), rtol=1e-9, atol=1e-10)
    # They are not equal because of the guard.
    assert ((expected == out) | ((expected - out).abs() < 1e-9)).double().mean() > 0.9


def test_all_queries_and_keys_as_landmarks_are_exact():
    q, k, v = draw(1, 7, 9)
    scale = 6**-0.5
    landmarks = torch.cat([q, k], dim=2)
    options = SkyformerSoftmaxOptions(num_landmarks=16, gamma=1e-9, pinv="exact")
    middle, sizes, _ = _middle(landmarks, k, v, None, scale, options)
    sums, total = _left(q, landmarks, sizes, middle, None, scale)
    # The ridge, times the condition of the Gaussian matrix of 16 points
    torch.testing.assert_close(sums / total, softmax_attention(q, k, v), rtol=0, atol=1e-6)


def test_more_landmarks_come_nearer_to_softmax():
    q, k, v = smooth(2, 256)
    options = {"gamma": 1e-3, "pinv": "exact"}
    errors = [error(skyformer_softmax_attention(q, k, v, num_landmarks=m, **options), q, k, v) for m in (4, 16, 64)]
    assert errors[0] > 2 * errors[1] > 4 * errors[2]


def test_scores_past_the_largest_float32_do_not_overflow():
    q, k, v = (x.float() for x in smooth(3, 256))
    # All queries and keys are far out in one direction: SM is about exp(200) everywhere.
    q, k = (x + torch.tensor([22.0, 0, 0, 0, 0, 0]) for x in (q, k))
    assert softmax_kernel(q, k, scale=6**-0.5).isinf().any()
    out = skyformer_softmax_attention(q, k, v, num_landmarks=64)
    assert error(out, q, k, v) < 0.05


@pytest.mark.parametrize("pinv", ["iterative", "ridge", "exact"])
def test_queries_far_from_all_keys_keep_their_scores_in_float32(pinv):
    q, k, v = smooth(4, 256, size=0.3)
    # Gaussian scores between the two clouds are about 1e-9; the rounding of a float32 inverse would take their place.
    q = q + torch.tensor([10.0, 0, 0, 0, 0, 0], dtype=torch.float64)
    wide, narrow = (
        skyformer_softmax_attention(*(x.to(dtype) for x in (q, k, v)), num_landmarks=64, pinv=pinv).double()
        for dtype in (torch.float64, torch.float32)
    )
    # Exponents of 20 rounded in float32, and what the inverse makes of them
    torch.testing.assert_close(narrow, wide, rtol=0, atol=2e-3)


def test_no_result_leaves_the_range_of_the_values():
    q, k, v = (x.requires_grad_() for x in draw(5, 200, size=4.0))
    out = skyformer_softmax_attention(q, k, v, num_landmarks=16)
    assert (out >= v.amin(2, True)).all()
    assert (out <= v.amax(2, True)).all()
    keep = torch.rand(2, 200, generator=torch.Generator().manual_seed(6)) < 0.5
    out = skyformer_softmax_attention(q, k, v, num_landmarks=16, keep=keep)
    real = keep[:, None, :, None]
    assert (out >= torch.where(real, v, torch.inf).amin(2, True)).logical_or(~real).all()
    assert (out <= torch.where(real, v, -torch.inf).amax(2, True)).logical_or(~real).all()


def test_a_row_without_a_positive_sum_gives_the_mean():
    v = draw(7, 5)[2].requires_grad_()
    sums = torch.ones(2, 3, 4, 6, dtype=torch.float64, requires_grad=True)
    total = torch.tensor([2.0, -1.0, 0.0, 1e-320], dtype=torch.float64)[:, None].expand(2, 3, 4, 1)
    out = _guarded_ratio(sums, total, v, None)
    mean = v.mean(2, keepdim=True)
    torch.testing.assert_close(out[:, :, 1:], mean.expand(-1, -1, 3, -1), rtol=1e-14, atol=0)
    torch.testing.assert_close(out[:, :, 0], torch.full_like(out[:, :, 0], 0.5).clamp(v.amin(2), v.amax(2)))
    out.sum().backward()
    assert not sums.grad[:, :, 1:].any()
    assert v.grad.isfinite().all()


@pytest.mark.refuses
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_landmarks": 1}, "num_landmarks is 1"),
        ({"gamma": 0.0}, r"gamma is 0\.0"),
        ({"pinv": "lu"}, "pinv is 'lu'"),
        ({"scale": -1.0}, r"scale is -1\.0"),
    ],
)
def test_bad_options_raise(options, message):
    with pytest.raises(ValueError, match=message):
        skyformer_softmax_attention(*draw(0, 8), **options)


@pytest.mark.parametrize("pinv", ["iterative", "ridge", "exact"])
@pytest.mark.parametrize(("n", "m", "d"), [(60, 6, 6), (256, 64, 4), (256, 64, 16)])
def test_scores_of_a_hundred_are_exact_in_float32(n, m, d, pinv):
    q, k, v = (x.float() for x in draw(3, n, d=d, size=10.0))
    options = {"num_landmarks": m, "pinv": pinv}
    out = skyformer_softmax_attention(q, k, v, **options)
    expected = skyformer_softmax_attention(*(x.double() for x in (q, k, v)), **options)
    # Exponents of a few hundred, each rounded to 2^-24 of itself
    assert (out - expected).norm() < 1e-3 * expected.norm()
    # Nearly every row has a positive sum.
    mean = v.mean(dim=2, keepdim=True)
    assert ((out - mean).abs().amax(dim=-1) < 1e-6).double().mean() < 0.5


def test_levels_hold_every_entry_at_one():
    # A long chain of landmarks: levels spread along it further than they are followed.
    points = torch.arange(40.0, dtype=torch.float64)[None, None, :, None]
    kernel = gaussian_logarithm(points, points, scale=3.0)
    logs = -30.0 * torch.arange(40.0, dtype=torch.float64)[None, None, :, None]
    levels = _levels(logs, kernel)
    assert (levels >= logs).all()
    assert (kernel + levels.mT - levels).max() <= 1e-9


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [1e3, 8e3, 1e4])
@pytest.mark.parametrize("seed", range(3))
def test_small_queries_of_huge_keys_have_finite_gradients(dtype, size, seed):
    results = []
    for held in (dtype, torch.float32):
        q, k, v = (x.to(dtype).to(held).requires_grad_() for x in draw(seed, 33, d=4))
        out = skyformer_softmax_attention(q, k * size, v, num_landmarks=6)
        out.float().square().sum().backward()
        results.append((out, q.grad, k.grad, v.grad))
    for found, wide in zip(*results, strict=True):
        assert wide.isfinite().all()
        # A gradient past the largest float16 is infinite: a gradient scaler must see it.
        assert found.isfinite().all() or wide.abs().max() > torch.finfo(dtype).max / 2


@pytest.mark.parametrize("seed", range(3))
def test_levels_far_apart_keep_the_sums_of_small_landmarks(seed):
    # Landmarks of queries have kernels near 1 with each other, and levels 1e10 below those of keys.
    q, k, v = draw(seed, 48, d=16)
    out = skyformer_softmax_attention(q, 6e4 * k, v, num_landmarks=6)
    # Rows whose sum vanishes give the mean; in no head are they many.
    lost = (out - v.mean(dim=2, keepdim=True)).abs().amax(dim=-1) < 1e-6
    assert lost.double().mean(dim=-1).max() < 0.5
