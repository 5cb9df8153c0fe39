import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from nystrom_lab.measure.rows import Row
from nystrom_papers.studies.approximation.completion import (
    BELOW,
    COMPLETED,
    LEAST,
    LEMMA,
    MADE,
    ROUNDING,
    SCORES,
    SOFTMAX,
    STUDIES,
    eigenvalue_rows,
    least_eigenvalue,
    made_heads,
    matrices,
    searched,
)

STUDY = STUDIES["skyformer-lemma-1"]


def pair(distance):
    """A query and a key on a line, so far apart."""
    return torch.zeros(1, 1, 1, dtype=torch.float64), torch.full((1, 1, 1), distance, dtype=torch.float64)


def test_the_eigenvalues_of_two_tokens_are_in_closed_form():
    found = {name: least_eigenvalue(matrix).item() for name, matrix in matrices(*pair(1.5)).items()}
    score = math.exp(-(1.5**2) / 2)
    # Eigenvalues 1 + s and 1 - s.
    assert found[COMPLETED] == pytest.approx((1 - score) / (1 + score))
    # (1, 1; 1, e) with e = exp(1.5^2).
    large = math.exp(1.5**2)
    root = math.hypot(large - 1, 2)
    assert found["softmax kernel, completed"] == pytest.approx((1 + large - root) / (1 + large + root))
    # (1/2, 1/2; 1 / (1 + e), e / (1 + e)), made symmetric.
    last, beside = large / (1 + large), (0.5 + 1 / (1 + large)) / 2
    root = math.hypot(last - 0.5, 2 * beside)
    assert found["softmax, completed"] == pytest.approx((0.5 + last - root) / (0.5 + last + root))


def test_matrices_are_those_of_numpy():
    q, k = torch.randn(2, 3, 5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = matrices(q, k)
    a, b = q[1].numpy(), k[1].numpy()
    x = np.concatenate([a, b])

    def gaussian(x, y):
        return np.exp(-((x[:, None] - y) ** 2).sum(-1) / 4)

    def softmax(x, y):
        return np.exp(x @ y.T / 2) / np.exp(x @ y.T / 2).sum(1, keepdims=True)

    wanted = {
        LEMMA: np.exp(a @ a.T / 2),
        "softmax kernel, completed": np.exp(x @ x.T / 2),
        COMPLETED: gaussian(x, x),
        SCORES: gaussian(a, b),
        SOFTMAX: softmax(a, b),
        "softmax, completed": softmax(x, x),
    }
    for name, matrix in wanted.items():
        np.testing.assert_allclose(found[name][1], (matrix + matrix.T) / 2, rtol=1e-12)


def test_a_search_makes_softmax_indefinite_and_leaves_the_gaussian_completion_positive():
    start = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for name, sign in (("softmax, completed", -1), (COMPLETED, 1)):
        x = searched(start, name, steps=60)
        before, after = (least_eigenvalue(matrices(y[:, :4], y[:, 4:])[name]) for y in (start, x))
        assert (after < before).all()
        assert (sign * after > 0).all()


def test_equal_tokens_are_singular_and_not_below_rounding():
    q, k = made_heads("every token twice")
    rows = [row for row in eigenvalue_rows(q, k, "twice") if row.method == COMPLETED]
    least, below, rounding = (next(r.value for r in rows if r.quantity == x) for x in (LEAST, BELOW, ROUNDING))
    assert abs(least) <= rounding < 1e-10
    assert below == 0


def row_of(quantity, method, value, inputs):
    return Row(
        study="", quantity=quantity, method=method, value=value, unit="", device="cpu", repeats=12,
        facts={"inputs": inputs},
    )  # fmt: skip


def agreeing():
    return [
        row_of(quantity, method, value, inputs)
        for inputs in ("pretrained", "initialised", *MADE)
        for method, below in ((LEMMA, 0.0), (COMPLETED, 0.0), (SOFTMAX, 1.0), (SCORES, 1.0))
        for quantity, value in ((LEAST, -0.1 if below else 1e-9), (BELOW, below), (ROUNDING, 1e-11))
    ]


def decided(**changed):
    """Verdicts where rows of a quantity of some inputs and a matrix have another value."""
    rows = [
        replace(row, value=changed["value"])
        if changed and row.quantity == changed["quantity"] and row.method in changed["of"]
        and row.fact("inputs") in changed["inputs"] else row
        for row in agreeing()
    ]  # fmt: skip
    return [verdict.agrees for verdict in STUDY.verdicts(rows)]


def test_each_rule_decides_in_every_way():
    assert decided() == [True, True, True]
    assert decided(quantity=BELOW, of=(LEMMA, COMPLETED), inputs=("searched",), value=0.1) == [False, False, True]
    assert decided(quantity=ROUNDING, of=(LEMMA, COMPLETED), inputs=("long tokens",), value=1e-5) == [None, None, True]
    real = ("pretrained", "initialised")
    assert decided(quantity=BELOW, of=(SOFTMAX,), inputs=real, value=0.2) == [True, True, False]
    assert decided(quantity=BELOW, of=(SCORES,), inputs=real, value=0.5) == [True, True, None]


def test_inputs_that_are_missing_cannot_tell():
    rows = [row for row in agreeing() if row.fact("inputs") not in ("pretrained", "initialised")]
    assert [verdict.agrees for verdict in STUDY.verdicts(rows)] == [None] * 3
