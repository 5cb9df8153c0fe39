import pytest
import torch

from nystrom.attention.methods.kernelized import sum_by_distance
from nystrom.kernels import KERNELS

OF_DISTANCES = [name for name in KERNELS if name != "gaussian"]


def draw(n, s, *, b=2, h=3, d=5, e=4):
    g = torch.Generator().manual_seed(0)
    return [torch.randn(b, h, t, w, generator=g, dtype=torch.float64) for t, w in ((n, d), (s, d), (s, e))]


@pytest.mark.parametrize("kernel", OF_DISTANCES)
# Many stretches, the last of them shorter; one query a stretch; one stretch.
@pytest.mark.parametrize(("n", "s"), [(150, 301), (2, 9000), (7, 9)])
def test_stretches_give_the_sum_and_its_gradients(kernel, n, s):
    inputs, plain = ([x.requires_grad_() for x in draw(n, s)] for _ in range(2))
    out = sum_by_distance(*inputs, kernel=kernel, scale=0.4)
    expected = KERNELS[kernel](*plain[:2], scale=0.4) @ plain[2]
    # float64 rounding of sums in another order
    torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-11)
    for result in (out, expected):
        result.square().sum().backward()
    for x, y in zip(inputs, plain, strict=True):
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-10, atol=1e-9)


@pytest.mark.parametrize("kernel", OF_DISTANCES)
def test_a_query_that_is_a_key_pulls_at_neither(kernel):
    q, _, v = (x.requires_grad_() for x in draw(1, 1))
    k = q.detach().clone().requires_grad_()
    sum_by_distance(q, k, v, kernel=kernel, scale=0.4).sum().backward()
    assert not q.grad.any()
    assert not k.grad.any()
    torch.testing.assert_close(v.grad, torch.ones_like(v))


@pytest.mark.parametrize("kernel", OF_DISTANCES)
def test_a_second_derivative_raises(kernel):
    q, k, v = (x.requires_grad_() for x in draw(3, 4))
    out = sum_by_distance(q, k, v, kernel=kernel, scale=0.4)
    (first,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="kernel of distances has no second derivative"):
        first.sum().backward()
