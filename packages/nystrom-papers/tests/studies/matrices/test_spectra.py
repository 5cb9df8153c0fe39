import math

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nystrom_papers.studies.matrices.spectra import (
    condition_number,
    effective_rank,
    leverage_scores,
    spectral_norm,
    statistical_dimension,
)


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def positive(n, seed=0, b=3):
    x = normal(b, n, n + 2, seed=seed)
    return x @ x.mT


@settings(deadline=None, max_examples=40)
@given(n=st.integers(1, 40), s=st.integers(1, 40), rank=st.integers(0, 40), seed=st.integers(0, 1000))
def test_as_many_steps_as_columns_give_the_norm(n, s, rank, seed):
    a = normal(2, n, rank, seed=seed) @ normal(2, rank, s, seed=seed + 1)
    # float64 rounding of a few products
    torch.testing.assert_close(spectral_norm(a, steps=40), torch.linalg.matrix_norm(a, ord=2), rtol=1e-10, atol=1e-12)


@settings(deadline=None, max_examples=40)
@given(n=st.integers(1, 90), s=st.integers(1, 90), steps=st.integers(1, 32), seed=st.integers(0, 1000))
def test_fewer_steps_give_less_and_never_more(n, s, steps, seed):
    a = normal(n, s, seed=seed)
    fewer, more, exact = spectral_norm(a, steps=steps), spectral_norm(a, steps=steps + 3), np.linalg.norm(a.numpy(), 2)
    assert fewer <= more * (1 + 1e-12)
    assert more <= exact * (1 + 1e-12)


def test_tiny_and_huge_entries_are_fine():
    sizes = torch.tensor([1e-30, 1.0, 1e30])
    a = sizes[:, None, None] * normal(5, 4, dtype=torch.float32)
    expected = sizes * torch.linalg.matrix_norm(normal(5, 4).float(), ord=2)
    torch.testing.assert_close(spectral_norm(a), expected, rtol=1e-5, atol=0)


def test_the_norm_is_zero_for_a_zero_matrix_and_nan_for_one_that_is_not_finite():
    a = torch.zeros(3, 4, 5)
    a[1, 2, 2], a[2, 0, 0] = torch.nan, torch.inf
    found = spectral_norm(a)
    assert found[0] == 0
    assert found[1:].isnan().all()


def test_it_is_the_same_in_every_call_and_leaves_the_global_generator_alone():
    a, state = normal(50, 60), torch.get_rng_state()
    assert torch.equal(spectral_norm(a, steps=3), spectral_norm(a, steps=3))
    assert torch.equal(torch.get_rng_state(), state)


def test_the_ranks_of_equal_and_of_single_values():
    equal, single = torch.full((2, 7), 3.0), torch.tensor([5.0, 0.0, 0.0])
    torch.testing.assert_close(effective_rank(equal), torch.tensor([7.0, 7.0]))
    assert effective_rank(single) == 1
    assert effective_rank(torch.zeros(3)).isnan()


def test_the_ranks_are_those_of_scipy():
    a = normal(9, 6, seed=2)
    values = scipy.linalg.svdvals(a.numpy())
    shares = values / values.sum()
    found = torch.linalg.svdvals(a)
    assert effective_rank(found).item() == pytest.approx(math.exp(-(shares * np.log(shares)).sum()), rel=1e-12)
    assert condition_number(found).item() == pytest.approx(np.linalg.cond(a.numpy()), rel=1e-12)
    assert condition_number(torch.tensor([2.0, 0.0])).item() == math.inf


@pytest.mark.parametrize("ridge", [1e-3, 0.5, 100.0])
def test_leverage_scores_are_those_of_the_definition(ridge):
    c = positive(8)
    for i in range(3):
        matrix = c[i].numpy()
        expected = np.diag(matrix @ scipy.linalg.inv(matrix + ridge * np.eye(8)))
        np.testing.assert_allclose(leverage_scores(c, ridge)[i].numpy(), expected, rtol=1e-10)
        assert statistical_dimension(c, ridge)[i].item() == pytest.approx(expected.sum(), rel=1e-10)


def test_the_statistical_dimension_counts_what_is_above_the_ridge():
    c = torch.diag(torch.tensor([1e6, 1e6, 1e6, 1e-6, 0.0]))
    # Three eigenvalues a million times the ridge, one a millionth of it.
    assert statistical_dimension(c, 1.0).item() == pytest.approx(3, abs=1e-5)


@pytest.mark.refuses
@pytest.mark.parametrize("ridge", [0.0, -1.0, math.nan, torch.tensor([1.0, 0.0, 1.0])])
def test_a_ridge_that_is_not_positive_raises(ridge):
    with pytest.raises(ValueError, match="expected positive numbers"):
        statistical_dimension(positive(4), ridge)
