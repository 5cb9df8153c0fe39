from functools import partial

import numpy as np
import pytest
import scipy.linalg
import torch

from nystrom.kernels import gaussian_kernel, laplace_kernel, matern32_kernel, matern52_kernel, softmax_kernel
from nystrom.linalg import pinv_iterative, pinv_ridge
from nystrom_lab.studies.matrices.column_draws import uniform_draws
from nystrom_lab.studies.matrices.dense_nystrom import (
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


@pytest.mark.parametrize("ridge", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
def test_it_is_the_formula(ridge, weighted):
    c, indices = matrices(), torch.tensor([3, 0, 7, 11])
    weights = torch.tensor([0.5, 2.0, 1.0, 3.0], dtype=torch.float64) if weighted else None
    sampling = np.zeros((12, 4))
    sampling[indices, range(4)] = 1 if weights is None else weights
    found = nystrom_psd(c, indices, weights=weights, ridge=ridge)
    for i in range(2):
        matrix = c[i].numpy()
        inner = sampling.T @ matrix @ sampling + ridge * np.eye(4)
        expected = matrix @ sampling @ scipy.linalg.pinvh(inner) @ sampling.T @ matrix
        # float64 rounding through an inverse whose condition is below a hundred
        np.testing.assert_allclose(found[i].numpy(), expected, rtol=0, atol=1e-12)


def test_all_columns_and_a_rank_no_larger_than_the_draws_are_exact():
    c = matrices()
    torch.testing.assert_close(nystrom_psd(c, torch.arange(12)), c, rtol=0, atol=1e-11)
    x = torch.randn(2, 12, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    low = x @ x.mT
    torch.testing.assert_close(nystrom_psd(low, torch.tensor([2, 5, 7])), low, rtol=0, atol=1e-11)


def test_a_column_that_is_drawn_twice_counts_once_and_weights_cancel():
    c, once = matrices(), torch.tensor([1, 4, 9])
    twice, weights = torch.tensor([1, 4, 9, 4, 4]), torch.rand(5, dtype=torch.float64) + 0.5
    torch.testing.assert_close(nystrom_psd(c, twice), nystrom_psd(c, once), rtol=0, atol=1e-11)
    torch.testing.assert_close(nystrom_psd(c, twice, weights=weights), nystrom_psd(c, once), rtol=0, atol=1e-11)


def test_each_matrix_may_have_its_own_columns():
    c, indices = matrices(), torch.tensor([[0, 1, 2], [5, 9, 7]])
    found = nystrom_psd(c, indices)
    for i in range(2):
        torch.testing.assert_close(found[i], nystrom_psd(c[i], indices[i]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("m", [20, 150, 300])
def test_it_stays_below_the_matrix_in_the_loewner_order_up_to_rounding(m):
    # Points in the plane: most eigenvalues are far below rounding.
    c = matrices(300, d=2, b=1)
    found = nystrom_psd(c, uniform_draws(300, m, torch.Generator().manual_seed(0)).indices)
    rounding = 300 * torch.finfo(c.dtype).eps * torch.linalg.matrix_norm(c, ord=2)
    assert (torch.linalg.eigvalsh(c - found)[..., 0] >= -rounding).all()
    assert (torch.linalg.eigvalsh(found)[..., 0] >= -rounding).all()


@pytest.mark.parametrize("way", [pinv_ridge, partial(pinv_iterative, steps=25)])
def test_another_inverse_may_take_its_place(way):
    c, indices = matrices(), torch.tensor([3, 0, 7, 11])
    columns = c[..., indices]
    expected = columns @ way(columns[:, indices]) @ columns.mT
    torch.testing.assert_close(nystrom_psd(c, indices, inverse=way), expected, rtol=1e-12, atol=1e-12)


def test_columns_and_rows_of_the_softmax_matrix():
    q, k = tokens(10, 10)
    s = torch.softmax(q @ k.mT, dim=-1)
    columns, rows = torch.tensor([0, 3, 8]), torch.tensor([0, 3, 8])
    found = nystrom_columns_and_rows(s, columns, rows)
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
    torch.testing.assert_close(nystrom_columns_and_rows(s, torch.arange(10), torch.arange(10)), s, rtol=0, atol=1e-8)


def test_columns_and_rows_may_differ_where_the_matrix_is_not_square():
    s = torch.rand(2, 6, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    found = nystrom_columns_and_rows(s, torch.tensor([8, 1]), torch.tensor([5, 0]))
    torch.testing.assert_close(found[:, [5, 0]], s[:, [5, 0]], rtol=0, atol=1e-10)


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_completion_is_positive_semidefinite_and_holds_the_block(kernel):
    q, k = tokens(20, 30)
    c = complete(partial(kernel, scale=0.4), q, k)
    torch.testing.assert_close(c[:, :20, 20:], kernel(q, k, scale=0.4), rtol=1e-13, atol=0)
    torch.testing.assert_close(c, c.mT, rtol=1e-13, atol=0)
    rounding = 50 * torch.finfo(c.dtype).eps * torch.linalg.matrix_norm(c, ord=2)
    assert (torch.linalg.eigvalsh(c)[:, 0] >= -rounding).all()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("options", [{}, {"ridge": 0.2, "weights": torch.tensor([1.0, 2, 3, 4, 5])}])
def test_the_block_is_that_of_the_completion(kernel, options):
    q, k = tokens(7, 9)
    kernel, indices = partial(kernel, scale=0.4), torch.tensor([0, 4, 6, 7, 15])
    whole = nystrom_psd(complete(kernel, q, k), indices, **options)
    torch.testing.assert_close(
        nystrom_off_diagonal(kernel, q, k, indices, **options), whole[:, :7, 7:], rtol=1e-9, atol=1e-10
    )


@pytest.mark.refuses
def test_a_negative_ridge_raises():
    with pytest.raises(ValueError, match=r"ridge is -0\.1; expected 0 or a positive number"):
        nystrom_psd(matrices(), torch.tensor([0]), ridge=-0.1)
