from dataclasses import replace

import numpy as np
import pytest
import torch

from nystrom_papers.studies.approximation.preconditioner import BOUND, LARGEST, NORM, SMALLEST, STUDIES, scaled
from nystrom_papers.studies.approximation.preconditioner import singular_rows as rows_of_kernels

STUDY = STUDIES["skyformer-lemma-3"]
RATIO = "least of smallest singular value over the bound"


def kernel(score):
    """The kernel matrix of two landmarks."""
    return torch.tensor([[[1.0, score], [score, 1.0]]], dtype=torch.float64)


def test_two_landmarks_have_the_singular_values_of_the_closed_form():
    # N = (1 + g, s; s, 1 + g) / (1 + g + s): eigenvalues 1 and (1 + g - s) / (1 + g + s).
    n, d = scaled(kernel(0.6), 0.1)
    np.testing.assert_allclose(d, [[1.7, 1.7]])
    np.testing.assert_allclose(torch.linalg.svdvals(n), [[1.0, 0.5 / 1.7]], rtol=1e-14)
    found = {row.quantity: row.value for row in rows_of_kernels(kernel(0.6), "two") if row.fact("ridge") == "0.1"}
    assert found[f"most of {LARGEST}"] == pytest.approx(0, abs=1e-15)
    assert found[f"least of {SMALLEST}"] == pytest.approx(0.5 / 1.7)
    assert found[f"least of {BOUND}"] == pytest.approx(0.1 / 1.7)
    # The norm of I - N is 2 s / (1 + g + s).
    assert found[f"least of {NORM}"] == pytest.approx(1 - 1.2 / 1.7)


def test_the_root_of_the_row_sums_is_an_eigenvector_of_1():
    x = torch.randn(9, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    n, d = scaled(torch.exp(-(torch.cdist(x, x) ** 2))[None], 1e-3)
    root = d.sqrt()[0]
    torch.testing.assert_close(n[0] @ root, root, rtol=1e-13, atol=0)


def measured():
    """Rows of random landmarks, as the study has them."""
    x = torch.randn(3, 16, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return list(rows_of_kernels(torch.exp(-(torch.cdist(x, x) ** 2)), "random"))


def decided(**values):
    """Verdicts where rows of a quantity have another value."""
    rows = [replace(row, value=values.get(row.quantity, row.value)) for row in measured()]
    return [verdict.agrees for verdict in STUDY.verdicts(rows)]


def test_the_printed_lemma_is_refused_and_the_sharp_one_and_its_conclusion_agree():
    assert decided() == [False, True, True]


BELOW = {f"least of {LARGEST}": -0.1, f"most of {LARGEST}": -0.01}


@pytest.mark.parametrize(
    ("changed", "agrees"),
    [
        # A largest value that is clearly below 1, as printed.
        (BELOW, [True, False, True]),
        # The same, with a smallest one that is lost in rounding.
        (BELOW | {f"least of {SMALLEST}": 1e-16}, [None, False, True]),
        ({RATIO: 0.9}, [False, False, True]),
        ({f"least of {BOUND}": 1e-16}, [False, None, True]),
        ({f"least of {NORM}": 1e-16}, [False, True, None]),
        ({f"least of {NORM}": -0.1}, [False, True, False]),
    ],
)
def test_each_rule_decides_in_every_way(changed, agrees):
    assert decided(**changed) == agrees
