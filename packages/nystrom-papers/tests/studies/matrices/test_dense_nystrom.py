from functools import partial

import numpy as np
import pytest
import scipy.linalg
import torch

from nystrom.kernels import gaussian_kernel, laplace_kernel, matern32_kernel, matern52_kernel, softmax_kernel
from nystrom.linalg import pinv_ridge
from nystrom_papers.studies.matrices.dense_nystrom import (
    complete,
    nystrom_columns_and_rows,
    nystrom_off_diagonal,
    nystrom_psd,
)

KERNELS = [gaussian_kernel, laplace_kernel, matern32_kernel, matern52_kernel, softmax_kernel]


def tokens(n, s, *, seed=0, d=5, b=2):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(b, size, d, generator=g, dtype=torch.float64) for size in (n, s))


def matrices(n=12, **options):
    q, k = tokens(n // 2, n - n // 2, **options)
    return complete(partial(gaussian_kernel, scale=0.5), q, k)


def test_it_is_the_formula():
    c, indices = matrices(), torch.tensor([3, 0, 7, 11])
    for i in range(2):
        matrix = c[i].numpy()
        columns = matrix[:, indices]
        expected = columns @ scipy.linalg.pinvh(columns[indices]) @ columns.T
        # float64 rounding through an inverse whose condition is below a hundred
        np.testing.assert_allclose(nystrom_psd(c, indices)[i].numpy(), expected, rtol=0, atol=1e-12)


def test_all_columns_and_a_rank_no_larger_than_the_draws_are_exact():
    c = matrices()
    torch.testing.assert_close(nystrom_psd(c, torch.arange(12)), c, rtol=0, atol=1e-11)
    x = torch.randn(2, 12, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    low = x @ x.mT
    torch.testing.assert_close(nystrom_psd(low, torch.tensor([2, 5, 7])), low, rtol=0, atol=1e-11)


@pytest.mark.parametrize("m", [20, 150, 300])
def test_it_stays_below_the_matrix_in_the_loewner_order_up_to_rounding(m):
    # Points in the plane: most eigenvalues are far below rounding.
    c = matrices(300, d=2, b=1)
    found = nystrom_psd(c, torch.randint(300, (m,), generator=torch.Generator().manual_seed(0)))
    rounding = 300 * torch.finfo(c.dtype).eps * torch.linalg.matrix_norm(c, ord=2)
    assert (torch.linalg.eigvalsh(c - found)[..., 0] >= -rounding).all()
    assert (torch.linalg.eigvalsh(found)[..., 0] >= -rounding).all()


def test_columns_and_rows_of_the_softmax_matrix():
    q, k = tokens(10, 10)
    s = torch.softmax(q @ k.mT, dim=-1)
    columns, rows = torch.tensor([0, 3, 8]), torch.tensor([0, 3, 8])
    found = nystrom_columns_and_rows(s, rows)
    for i in range(2):
        matrix = s[i].numpy()
        core = matrix[np.ix_(rows, columns)]
        expected = matrix[:, columns] @ scipy.linalg.pinv(core) @ matrix[rows]
        # An inverse carries rounding times its condition, 3e4 in one of the two, where the largest result is 1e4.
        rounding = np.finfo(np.float64).eps * np.linalg.cond(core) * np.abs(expected).max()
        np.testing.assert_allclose(found[i].numpy(), expected, rtol=0, atol=max(1e-10, 2 * rounding))
    # Eq. 4: the rows and columns themselves come back, with A regular.
    torch.testing.assert_close(found[:, rows], s[:, rows], rtol=0, atol=1e-10)
    torch.testing.assert_close(found[..., columns], s[..., columns], rtol=0, atol=1e-10)
    torch.testing.assert_close(nystrom_columns_and_rows(s, torch.arange(10)), s, rtol=0, atol=1e-8)


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_completion_is_positive_semidefinite_and_holds_the_block(kernel):
    q, k = tokens(20, 30)
    c = complete(partial(kernel, scale=0.4), q, k)
    torch.testing.assert_close(c[:, :20, 20:], kernel(q, k, scale=0.4), rtol=1e-13, atol=0)
    torch.testing.assert_close(c, c.mT, rtol=1e-13, atol=0)
    rounding = 50 * torch.finfo(c.dtype).eps * torch.linalg.matrix_norm(c, ord=2)
    assert (torch.linalg.eigvalsh(c)[:, 0] >= -rounding).all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_block_is_that_of_the_completion(kernel):
    q, k = tokens(7, 9)
    kernel, indices = partial(kernel, scale=0.4), torch.tensor([0, 4, 6, 7, 15])
    whole = nystrom_psd(complete(kernel, q, k), indices)
    torch.testing.assert_close(nystrom_off_diagonal(kernel, q, k, indices), whole[:, :7, 7:], rtol=1e-9, atol=1e-10)
    ridged = nystrom_off_diagonal(kernel, q, k, indices, inverse=pinv_ridge)
    points = torch.cat([q, k], dim=1)[:, indices]
    expected = kernel(q, points) @ pinv_ridge(kernel(points, points)) @ kernel(points, k)
    torch.testing.assert_close(ridged, expected, rtol=1e-12, atol=1e-12)
