import numpy as np
import pytest
import scipy.special
import torch
from scipy.spatial.distance import cdist

from nystrom.kernels import (
    gaussian_kernel,
    laplace_kernel,
    matern32_kernel,
    matern52_kernel,
    softmax_kernel,
)


def points(seed, n=7, d=5):
    return torch.randn(2, n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_gaussian_is_that_of_the_distance():
    q, k = points(0), points(1, n=4)
    for i in range(2):
        expected = np.exp(-0.25 * cdist(q[i].numpy(), k[i].numpy(), "sqeuclidean"))
        np.testing.assert_allclose(gaussian_kernel(q, k, scale=0.5)[i].numpy(), expected, rtol=1e-12)


def test_lemma_1_ties_the_two_kernels():
    q, k = points(2), points(3)
    left, right = (torch.exp(0.5 * 0.3 * x.square().sum(-1)) for x in (q, k))
    product = left[..., :, None] * gaussian_kernel(q, k, scale=0.3) * right[..., None, :]
    torch.testing.assert_close(softmax_kernel(q, k, scale=0.3), product, rtol=1e-12, atol=0)


def test_a_point_is_at_no_distance_from_itself_however_large():
    q = 1e4 * points(4).float()
    assert gaussian_kernel(q, q, scale=1.0).max() <= 1


def matern(r, nu):
    """The Matérn kernel of any smoothness, by Rasmussen and Williams (2006), eq. 4.14."""
    x = np.sqrt(2 * nu) * r
    return 2 ** (1 - nu) / scipy.special.gamma(nu) * x**nu * scipy.special.kv(nu, x)


@pytest.mark.parametrize(("kernel", "nu"), [(laplace_kernel, 0.5), (matern32_kernel, 1.5), (matern52_kernel, 2.5)])
def test_laplace_and_matern_are_those_of_the_bessel_function(kernel, nu):
    q, k = points(0), points(1, n=4)
    for i in range(2):
        expected = matern(0.25**0.5 * cdist(q[i].numpy(), k[i].numpy()), nu)
        np.testing.assert_allclose(kernel(q, k, scale=0.25)[i].numpy(), expected, rtol=1e-12)


OF_DISTANCES = [laplace_kernel, matern32_kernel, matern52_kernel]


@pytest.mark.parametrize("kernel", [gaussian_kernel, *OF_DISTANCES])
def test_the_scale_is_that_of_the_paper(kernel):
    q, k = points(2), points(3)
    torch.testing.assert_close(kernel(q, k, scale=5**-0.5), kernel(q / 5**0.25, k / 5**0.25, scale=1.0))


@pytest.mark.parametrize("kernel", [softmax_kernel, gaussian_kernel, *OF_DISTANCES])
def test_a_kernel_of_points_with_themselves_is_positive_semidefinite(kernel):
    x = points(4, n=40, d=2)
    c = kernel(x, x, scale=0.7)
    # Rounding of the eigenvalues of 40 x 40 numbers
    rounding = 40 * torch.finfo(c.dtype).eps * torch.linalg.matrix_norm(c, ord=2)
    assert (torch.linalg.eigvalsh(c)[..., 0] >= -rounding).all()


@pytest.mark.parametrize("kernel", OF_DISTANCES)
def test_rounding_leaves_no_distance_between_equal_points(kernel):
    x = 1e3 + points(5).float()
    assert (kernel(x, x, scale=1.0).diagonal(dim1=-2, dim2=-1) == 1).all()


@pytest.mark.parametrize("kernel", OF_DISTANCES)
def test_gradients_are_right_and_zero_between_equal_points(kernel):
    q, k = points(6, n=4, d=3).requires_grad_(), points(7, n=3, d=3).requires_grad_()
    assert torch.autograd.gradcheck(lambda q, k: kernel(q, k, scale=0.4), (q, k))
    x = points(8)[:, :1].requires_grad_()
    kernel(x, x.detach(), scale=0.4).sum().backward()
    assert not x.grad.any()


@pytest.mark.parametrize("kernel", [laplace_kernel, matern32_kernel, matern52_kernel])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_far_points_have_a_kernel_of_zero_without_a_gradient(kernel, dtype):
    far = torch.tensor([[0.0], [1e30]], dtype=dtype, requires_grad=True)
    near = torch.tensor([[0.0]], dtype=dtype, requires_grad=True)
    found = kernel(near, far, scale=0.5)
    found.sum().backward()
    assert found.tolist() == [[1.0, 0.0]]
    assert not far.grad.any()
    assert not near.grad.any()
