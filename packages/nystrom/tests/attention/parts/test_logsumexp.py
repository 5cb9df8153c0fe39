import pytest
import torch

from nystrom.attention.parts.logsumexp import softmax_and_logsumexp


def draw(seed, r, s, *, size=1.0, d=5, e=3):
    g = torch.Generator().manual_seed(seed)
    shapes = ((r, d), 1.0), ((s, d), size), ((s, e), 1.0), ((s, 1), size)
    return [x * torch.randn(2, 3, *shape, generator=g, dtype=torch.float64) for shape, x in shapes]


@pytest.mark.parametrize("size", [1e-3, 1.0, 30.0, 1e3])
@pytest.mark.parametrize("r", [1, 5, 12])
def test_both_are_those_of_the_dense_scores(r, size):
    q, k, v, bias = draw(0, r, 40, size=size)
    means, logs = softmax_and_logsumexp(q, k, v, scale=0.3, bias=bias)
    scores = 0.3 * q @ k.mT + bias.mT
    # The scores are rounded at their own size.
    tolerance = 1e-12 * (1 + size)
    torch.testing.assert_close(means, scores.softmax(-1) @ v, rtol=0, atol=tolerance)
    torch.testing.assert_close(logs, scores.logsumexp(-1, keepdim=True), rtol=1e-13, atol=tolerance)


def test_the_logarithm_of_one_key_is_its_score():
    q, k, v, _ = draw(1, 4, 1)
    means, logs = softmax_and_logsumexp(q, k, v, scale=1.0)
    torch.testing.assert_close(logs, q @ k.mT, rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(means, v.expand_as(means), rtol=1e-13, atol=0)


def test_float32_holds_a_logarithm_far_from_zero():
    q, k, v, bias = draw(2, 6, 3000)
    scores = q @ k.mT + (bias - 2000).mT
    _, logs = softmax_and_logsumexp(q.float(), k.float(), v.float(), scale=1.0, bias=bias.float() - 2000)
    # 2000 is rounded to 2^-14 in float32, three times.
    torch.testing.assert_close(logs.double(), scores.logsumexp(-1, keepdim=True), rtol=0, atol=3 * 2**-13)


def test_masked_keys_are_absent():
    q, k, v, bias = draw(3, 6, 20)
    keep = torch.rand(2, 20, generator=torch.Generator().manual_seed(4)) < 0.5
    zeroed = [torch.where(keep[:, None, :, None], x, 0.0) for x in (k, v)]
    means, logs = softmax_and_logsumexp(q, *zeroed, keep=keep, bias=bias)
    for i in range(2):
        alone = [x[i : i + 1, :, keep[i]] for x in (k, v, bias)]
        expected = softmax_and_logsumexp(q[i : i + 1], alone[0], alone[1], bias=alone[2])
        torch.testing.assert_close((means[i : i + 1], logs[i : i + 1]), expected, rtol=1e-12, atol=1e-13)


def test_no_key_gives_no_mean_and_the_lowest_logarithm():
    q, k, v, _ = draw(5, 6, 20)
    means, logs = softmax_and_logsumexp(q, 0 * k, 0 * v, keep=torch.zeros(2, 20, dtype=torch.bool))
    assert not means.any()
    assert logs.isfinite().all()
    assert (logs < -1e300).all()


def test_gradients_are_right():
    q, k, v, bias = (x[:1, :1].requires_grad_() for x in draw(6, 4, 7))
    call = lambda q, k, v, bias: softmax_and_logsumexp(q, k, v, bias=bias)  # noqa: E731
    assert torch.autograd.gradcheck(call, (q, k, v, bias))
