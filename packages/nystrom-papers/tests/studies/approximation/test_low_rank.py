import math
from dataclasses import replace

import numpy as np
import pytest
import scipy.linalg
import torch

from nystrom_lab.measure.rows import Row
from nystrom_papers.studies.approximation import low_rank
from nystrom_papers.studies.approximation.low_rank import STUDIES, spectrum_rows

STUDY = STUDIES["low-rank"]


@pytest.fixture(scope="module")
def tokens():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, 70, 4, generator=generator, dtype=torch.float64) for _ in range(2)]


def only(rows, quantity, method, m=None):
    (row,) = (row for row in rows if (row.quantity, row.method, row.m) == (quantity, method, m))
    return row


def test_rows_are_those_of_scipys_singular_values(tokens):
    q, k = tokens
    rows = list(spectrum_rows(q, k, facts={"weights": "pretrained"}))
    scores = (q @ k.mT / 2).numpy()
    distances = ((q[..., :, None, :] - k[..., None, :, :]) ** 2).sum(-1).numpy()
    matrices = {
        "unnormalised": np.exp(scores),
        "softmax": np.exp(scores) / np.exp(scores).sum(-1, keepdims=True),
        "kernelized": np.exp(-distances / 4),
    }
    for name, matrix in matrices.items():
        values = np.array([scipy.linalg.svdvals(head) for head in matrix[0]])
        shares = values / values.sum(-1, keepdims=True)
        assert only(rows, low_rank.SINGULAR, name, 8).value == pytest.approx((values[:, 7] / values[:, 0]).mean())
        energy = (values[:, :64] ** 2).sum(-1) / (values**2).sum(-1)
        assert only(rows, low_rank.ENERGY, name, 64).value == pytest.approx(energy.mean())
        ranks = np.exp(-(shares * np.log(shares)).sum(-1))
        assert only(rows, low_rank.RANK, name).value == pytest.approx(ranks.mean())
        conditions = np.log10(values[:, 0] / values[:, -1]).mean()
        # The smallest singular value is good to some digits only.
        assert only(rows, low_rank.CONDITION, name).value == pytest.approx(conditions, rel=1e-3)


def test_condition_numbers_beyond_float64_count_as_what_it_resolves():
    # Equal tokens make matrices of rank one.
    ones = torch.ones(1, 2, 16, 4, dtype=torch.float64)
    rows = list(spectrum_rows(ones, ones, facts={"weights": "pretrained"}))
    limit = -math.log10(16 * 2.0**-52)
    assert only(rows, low_rank.CONDITION, "softmax").value == pytest.approx(limit)
    # Neither of two such matrices is known to be the better one.
    assert not [row for row in rows if row.quantity == low_rank.BETTER]


def row_of(quantity, method, value, weights, m=None, repeats=36):
    return Row(
        study="", quantity=quantity, method=method, value=value, unit="", device="cpu", n=512, m=m, repeats=repeats,
        facts={"weights": weights, "layer": 0}, low=0.9 * value, high=1.1 * value,
    )  # fmt: skip


def agreeing():
    rows = []
    for weights in ("initialised", "pretrained"):
        for matrix in low_rank.MATRICES:
            rows += [
                row_of(low_rank.ENERGY, matrix, 0.97, weights, 64),
                row_of(low_rank.SINGULAR, matrix, 0.05, weights, 64),
                row_of(low_rank.RANK, matrix, 40.0, weights),
                row_of(low_rank.CONDITION, matrix, 7.0, weights),
            ]
        rows.append(row_of(low_rank.BETTER, "kernelized", 0.9, weights))
    return rows


# Two standard errors of these rows are a twentieth of the value.
@pytest.mark.parametrize(
    ("place", "quantity", "method", "value", "expected"),
    [
        (0, low_rank.ENERGY, "softmax", 0.8, False),
        (0, low_rank.ENERGY, "softmax", 0.88, None),
        (1, low_rank.SINGULAR, "softmax", 0.2, False),
        (1, low_rank.SINGULAR, "softmax", 0.102, None),
        (2, low_rank.RANK, "kernelized", 10.0, False),
        (2, low_rank.RANK, "softmax", 100.0, False),
        (2, low_rank.RANK, "kernelized", 21.0, None),
        (3, low_rank.CONDITION, "unnormalised", 5.0, False),
        (3, low_rank.CONDITION, "unnormalised", 6.1, None),
        (5, low_rank.BETTER, "kernelized", 0.5, False),
        (5, low_rank.BETTER, "kernelized", 0.8, None),
    ],
)
def test_each_rule_agrees_refuses_and_cannot_tell(place, quantity, method, value, expected):
    assert [verdict.agrees for verdict in STUDY.verdicts(agreeing())] == [True] * 6
    changed, of = {"value": value, "low": 0.9 * value, "high": 1.1 * value}, (quantity, method, "pretrained")
    rows = [replace(r, **changed) if (r.quantity, r.method, r.fact("weights")) == of else r for r in agreeing()]
    found = [verdict.agrees for verdict in STUDY.verdicts(rows)]
    assert found == [expected if other == place else True for other in range(6)]


def test_too_few_heads_and_one_kind_of_weights_cannot_tell():
    few = [replace(row, repeats=3) if row.quantity == low_rank.BETTER else row for row in agreeing()]
    assert [verdict.agrees for verdict in STUDY.verdicts(few)] == [True] * 4 + [None] * 2
    one = [row for row in agreeing() if "pretrained" in row.words]
    assert [verdict.agrees for verdict in STUDY.verdicts(one)] == [None] * 5 + [True]
