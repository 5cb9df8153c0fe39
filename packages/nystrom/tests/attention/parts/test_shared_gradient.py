import pytest
import torch

from nystrom.attention.parts.shared_gradient import with_segment_means
from nystrom.landmarks import segment_means
from nystrom.shapes import zero_masked


def made(x, means):
    return (x.sin() * torch.linspace(1, 2, x.shape[2], dtype=x.dtype)[:, None]).sum() + means.cos().sum()


# Segments of equal and of unequal lengths; under the mask, sequences with fewer tokens than segments.
@pytest.mark.parametrize(("m", "masked"), [(5, False), (7, False), (7, True), (5, True)])
@pytest.mark.parametrize("create_graph", [False, True])
def test_the_gradient_is_that_of_both_uses(m, masked, create_graph):
    x = torch.randn(3, 2, 40, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    keep = None
    if masked:
        keep = torch.rand(3, 40, generator=torch.Generator().manual_seed(1)) < 0.7
        keep[1, 4:] = False
        keep[2] = False
    plain = zero_masked(x, keep)
    tokens, means = with_segment_means(plain, m, keep=keep)
    assert torch.equal(tokens, plain)
    torch.testing.assert_close(means, segment_means(plain, m, keep=keep), rtol=0, atol=0)
    (ours,) = torch.autograd.grad(made(tokens, means), x, create_graph=create_graph)
    plain = zero_masked(x, keep)
    (expected,) = torch.autograd.grad(made(plain, segment_means(plain, m, keep=keep)), x)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("masked", [False, True])
def test_each_use_may_be_the_only_one(masked):
    x = torch.randn(1, 2, 10, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    keep = torch.arange(10)[None] > 2 if masked else None
    for use in (0, 1):
        plain = zero_masked(x, keep)
        (ours,) = torch.autograd.grad(with_segment_means(plain, 5, keep=keep)[use].sin().sum(), x)
        plain = zero_masked(x, keep)
        expected = (plain, segment_means(plain, 5, keep=keep))[use].sin().sum()
        torch.testing.assert_close(ours, torch.autograd.grad(expected, x)[0], rtol=1e-12, atol=1e-12)


def test_it_has_second_derivatives_and_those_of_single_samples():
    x = torch.randn(2, 1, 6, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    keep = torch.tensor([[True] * 6, [True, False, True, True, False, True]])
    assert torch.autograd.gradgradcheck(lambda x: with_segment_means(x, 2, keep=keep), x, fast_mode=True)

    def loss(x, keep):
        return made(*with_segment_means(x[None], 2, keep=keep[None]))

    together = torch.func.vmap(torch.func.grad(loss))(x, keep)
    for i in range(2):
        (alone,) = torch.autograd.grad(loss(x[i], keep[i]), x)
        torch.testing.assert_close(together[i], alone[i], rtol=1e-12, atol=1e-12)
