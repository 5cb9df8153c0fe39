import math
from functools import partial

import pytest
import torch

from nystrom.kernels import gaussian_kernel
from nystrom_papers.studies.approximation.draw_errors import measure_draws, needed_draws, rounding
from nystrom_papers.studies.matrices.dense_nystrom import complete


@pytest.fixture
def completion():
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(10, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    return complete(partial(gaussian_kernel, scale=0.5), q, k)


def uniform(generator):
    return torch.randint(20, (4,), generator=generator)


def test_errors_of_each_draw_are_those_of_the_dense_formula(completion):
    errors = measure_draws(completion, uniform, draws=25, seed=3)
    assert [len(values) for values in errors] == [25, 25, 25]
    generator = torch.Generator().manual_seed(3)
    for block, whole, least in zip(*errors, strict=True):
        s = torch.zeros(20, 4, dtype=torch.float64)
        s[uniform(generator), range(4)] = 1.0
        c = completion @ s @ torch.linalg.pinv(s.mT @ completion @ s, hermitian=True) @ s.mT @ completion
        error = completion - c
        values = torch.linalg.eigvalsh(error)
        torch.testing.assert_close(whole, values[-1], rtol=0, atol=1e-9)
        assert block.item() == pytest.approx(torch.linalg.matrix_norm(error[:10, 10:], ord=2).item(), abs=1e-9)
        # The Schur complement of a positive semidefinite matrix is one, except for rounding.
        assert abs(least) <= rounding(completion)


def test_eigenvalues_are_left_out_where_nobody_asks_for_them(completion):
    errors = measure_draws(completion, uniform, draws=3, seed=3, eigenvalues=False)
    full = measure_draws(completion, uniform, draws=3, seed=3)
    torch.testing.assert_close(errors.block, full.block)
    assert errors.whole.isnan().all()


def test_the_needed_draws_lie_where_the_error_of_a_tenth_meets_the_limit():
    ten = torch.arange(1.0, 12.0) / 11
    # The .9 quantile of 11 values is the tenth.
    errors = [8 * ten, 2 * ten, 0.5 * ten]
    tenth = 10 / 11
    assert needed_draws((8, 16, 32), errors, 2 * tenth, 0.1) == pytest.approx(16)
    # Halfway between the errors on a logarithmic axis is halfway between the sizes.
    assert needed_draws((8, 16, 32), errors, tenth, 0.1) == pytest.approx(16 * math.sqrt(2))
    assert needed_draws((8, 16, 32), errors, 9.0, 0.1) == 8
    assert needed_draws((8, 16, 32), errors, 0.1, 0.1) is None
