from functools import partial

import pytest
import scipy.stats
import torch

from nystrom.kernels import gaussian_kernel
from nystrom_lab.studies.matrices.column_draws import (
    Draws,
    approximate_leverage_scores,
    leverage_draws,
    recursive_leverage_draws,
    uniform_draws,
)
from nystrom_lab.studies.matrices.dense_nystrom import nystrom_psd
from nystrom_lab.studies.matrices.spectra import leverage_scores, spectral_norm


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def crowd_and_loners(n=200, loners=5):
    """Points of which nearly all are close together: a few columns hold what the others do not."""
    x = 0.2 * torch.randn(n, 2, generator=generator(1), dtype=torch.float64)
    x[:loners] += 20 * torch.arange(1, loners + 1)[:, None]
    return x, gaussian_kernel(x, x, scale=1.0)


def entries_of(c):
    return lambda rows, columns: c[rows][:, columns]


def test_uniform_draws_are_those_of_definition_1():
    indices, weights = uniform_draws(5, 50_000, generator())
    # Independent draws of equal probability: the chance of a statistic beyond is one in a million.
    assert scipy.stats.chisquare(torch.bincount(indices, minlength=5).numpy()).pvalue > 1e-6
    pairs = torch.bincount(5 * indices[:-1:2] + indices[1::2], minlength=25)
    assert scipy.stats.chisquare(pairs.numpy()).pvalue > 1e-6
    torch.testing.assert_close(weights, torch.full((50_000,), 50_000**-0.5, dtype=torch.float64))


def test_more_uniform_draws_than_columns_repeat_some():
    indices, _ = uniform_draws(3, 10, generator())
    assert len(indices.unique()) <= 3


def test_leverage_draws_follow_the_scores():
    scores = torch.tensor([0.1, 0.0, 0.4, 1.5])
    indices, weights = leverage_draws(scores, 20_000, generator())
    counts = torch.bincount(indices, minlength=4)
    assert counts[1] == 0
    expected = 20_000 * scores[[0, 2, 3]].double() / 2
    assert scipy.stats.chisquare(counts[[0, 2, 3]].numpy(), expected.numpy()).pvalue > 1e-6
    torch.testing.assert_close(weights, (20_000 * 4 * scores[indices].double() / 2).rsqrt(), rtol=1e-6, atol=0)


def test_with_equal_scores_the_weights_are_those_of_uniform_draws():
    weights = leverage_draws(torch.ones(7), 9, generator()).weights
    torch.testing.assert_close(weights, uniform_draws(7, 9, generator()).weights)


@pytest.mark.parametrize("ridge", [1e-3, 1.0])
def test_estimates_from_all_columns_are_the_scores(ridge):
    _, c = crowd_and_loners(60)
    every = Draws(torch.arange(60), torch.ones(60, dtype=torch.float64))
    found = approximate_leverage_scores(entries_of(c), c.diagonal(), every, ridge)
    # A difference from 1 over the ridge: 1e-16 * 60 / 1e-3
    torch.testing.assert_close(found, leverage_scores(c, ridge), rtol=0, atol=1e-11)
    some = torch.tensor([7, 50])
    found = approximate_leverage_scores(entries_of(c), c.diagonal(), every, ridge, among=some)
    torch.testing.assert_close(found, leverage_scores(c, ridge)[some], rtol=0, atol=1e-11)


def test_estimates_are_those_of_the_formula_and_no_less_than_the_scores_for_weights_of_one():
    _, c = crowd_and_loners(60)
    draws, ridge = Draws(torch.tensor([3, 40, 41, 7]), torch.tensor([1.0, 2.0, 0.5, 1.0], dtype=torch.float64)), 0.3
    s = torch.zeros(60, 4, dtype=torch.float64)
    s[draws.indices, range(4)] = draws.weights
    inner = torch.linalg.inv(s.mT @ c @ s + ridge * torch.eye(4))
    expected = (c - c @ s @ inner @ s.mT @ c).diagonal() / ridge
    torch.testing.assert_close(approximate_leverage_scores(entries_of(c), c.diagonal(), draws, ridge), expected)
    ones = Draws(draws.indices, torch.ones(4, dtype=torch.float64))
    assert (approximate_leverage_scores(entries_of(c), c.diagonal(), ones, ridge) >= leverage_scores(c, ridge)).all()


@pytest.mark.parametrize("m", [1, 2, 10, 64, 199])
def test_recursive_draws_are_as_many_different_columns(m):
    _, c = crowd_and_loners()
    indices, weights = recursive_leverage_draws(entries_of(c), c.diagonal(), m, generator())
    assert len(indices.unique()) == len(indices) == m
    assert (weights == 1).all()
    again, _ = recursive_leverage_draws(entries_of(c), c.diagonal(), m, generator())
    assert torch.equal(indices, again)


def test_where_there_are_no_more_columns_all_are_drawn():
    _, c = crowd_and_loners(20)
    drawn = recursive_leverage_draws(entries_of(c), c.diagonal(), 30, generator()).indices
    assert drawn.sort().values.tolist() == list(range(20))


def test_leverage_finds_the_columns_that_hold_what_others_do_not():
    x, c = crowd_and_loners()

    def entries(rows, columns):
        return gaussian_kernel(x[rows], x[columns], scale=1.0)

    draws = {
        "uniform": lambda g: uniform_draws(200, 60, g).indices,
        "exact": lambda g: leverage_draws(leverage_scores(c, 0.1), 60, g).indices,
        "recursive": lambda g: recursive_leverage_draws(entries, c.diagonal(), 60, g).indices,
    }
    errors = {
        name: [spectral_norm(c - nystrom_psd(c, draw(generator(seed)))).item() for seed in range(20)]
        for name, draw in draws.items()
    }
    # A loner that is not drawn leaves an error of 1. Sixty uniform draws find all five once in a thousand runs.
    assert min(errors["uniform"]) > 0.99
    for name in ("exact", "recursive"):
        assert sorted(errors[name])[10] < 0.1


def test_entries_are_asked_for_in_a_number_linear_in_n():
    x, asked = crowd_and_loners(1000)[0], 0

    def entries(rows, columns):
        nonlocal asked
        asked += len(rows) * len(columns)
        return gaussian_kernel(x[rows], x[columns], scale=1.0)

    recursive_leverage_draws(entries, torch.ones(1000, dtype=torch.float64), 20, generator())
    # Samples of about m columns against n, n / 2, n / 4 ... rows; their own matrices are small.
    assert asked < 4 * 1000 * 20


@pytest.mark.refuses
@pytest.mark.parametrize("scores", [[1.0, -0.1], [0.0, 0.0], [float("nan"), 1.0], [float("inf"), 1.0]])
def test_scores_that_are_no_shares_raise(scores):
    with pytest.raises(ValueError, match=r"scores run from .* expected finite numbers"):
        leverage_draws(torch.tensor(scores), 3, generator())


@pytest.mark.refuses
@pytest.mark.parametrize("draw", [partial(uniform_draws, 5), partial(leverage_draws, torch.ones(5))])
def test_no_draw_raises(draw):
    with pytest.raises(ValueError, match="m is 0; expected a whole number of at least 1"):
        draw(0, generator())
