import numpy as np
import torch
from scipy.spatial.distance import cdist

from nystrom.kernels import elu_features, gaussian_kernel, positive_features, softmax_kernel


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


def test_elu_features_are_one_at_zero_and_smooth_there():
    x = torch.tensor([[-3.0, 0.0, 2.0]], dtype=torch.float64, requires_grad=True)
    features = elu_features(x)
    torch.testing.assert_close(features, torch.tensor([[np.exp(-3.0), 1.0, 3.0]]), rtol=1e-15, atol=1e-16)
    features.sum().backward()
    torch.testing.assert_close(x.grad, torch.tensor([[np.exp(-3.0), 1.0, 1.0]]), rtol=1e-15, atol=0)


def test_positive_features_are_the_softmax_kernel_on_average():
    q, k = 0.7 * points(5, n=3), 0.7 * points(6, n=4)
    rows = torch.randn(200_000, 5, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    estimate = positive_features(q, rows, scale=0.4) @ positive_features(k, rows, scale=0.4).mT
    exact = softmax_kernel(q, k, scale=0.4)
    # Lemma 1 of the Performer; one row has the variance SM^2 (exp(c |q + k|^2) - 1), its mean over r rows one r-th.
    spread = 0.4 * (q[..., :, None, :] + k[..., None, :, :]).square().sum(-1)
    deviation = exact * (torch.expm1(spread) / 200_000).sqrt()
    # 24 numbers, each beyond 5 standard deviations once in a million.
    assert ((estimate - exact).abs() <= 5 * deviation).all()
