import numpy as np
import torch
from scipy.spatial.distance import cdist

from nystrom.kernels import gaussian_kernel, softmax_kernel


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
