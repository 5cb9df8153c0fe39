from dataclasses import replace

import numpy as np
import pytest
import torch

from nystrom.landmarks import segment_means
from nystrom_lab.measure.rows import Row
from nystrom_papers.studies.approximation.convergence import (
    CONDITION,
    CUBED,
    DISTANCE,
    LEMMA_HOLDS_AT_START,
    MATRIX,
    NEAR,
    ORDER,
    REGULAR,
    RESIDUAL,
    STARTS_BELOW,
    attention_rows,
    convergence_rows,
    landmark_matrix,
    lemma,
    true_inverse,
)
from nystrom_papers.studies.approximation.pseudoinverse import STUDIES
from nystrom_papers.studies.approximation.real_heads.recorded import LayerHeads

CONVERGENCE, SIX = STUDIES["supplement-figure-3"], STUDIES["supplement-figure-4"]


@pytest.fixture(scope="module")
def layers():
    """Three layers of heads that attend to tokens like themselves, so that their matrices are far from singular."""
    layers = []
    for layer in range(3):
        q = 3 * torch.randn(2, 4, 16, 8, generator=torch.Generator().manual_seed(layer)).double()
        layers.append(LayerHeads("pretrained", layer, (), q, q, q))
    return layers


@pytest.fixture(scope="module")
def rows(layers):
    return list(convergence_rows(layers, 4, 24))


def one(rows, quantity, method="paper", dtype="float64", **words):
    of = (quantity, method, dtype)
    (row,) = (r for r in rows if (r.quantity, r.method, r.dtype) == of and r.facts.items() >= words.items())
    return row


def test_distances_are_those_of_the_iteration_from_numpys_pseudoinverse(layers, rows):
    a = torch.cat([landmark_matrix(heads, 4)[0] for heads in layers]).numpy()
    z = a.transpose(0, 2, 1) / (np.linalg.norm(a, 1, (1, 2)) * np.linalg.norm(a, np.inf, (1, 2)))[:, None, None]
    eye = np.eye(4)
    for _ in range(3):
        az = a @ z
        z = 0.25 * z @ (13 * eye - az @ (15 * eye - az @ (7 * eye - az)))
    true = np.linalg.pinv(a)
    distance = np.linalg.norm(z - true, axis=(1, 2)) / np.linalg.norm(true, axis=(1, 2))
    residual = np.linalg.norm(eye - a @ z, 2, axis=(1, 2))
    assert one(rows, DISTANCE, k="3").value == pytest.approx(np.median(distance), rel=1e-8)
    assert one(rows, RESIDUAL, k="3").value == pytest.approx(np.median(residual), rel=1e-8)
    assert one(rows, NEAR, k="3").value == (distance <= 0.1).mean()
    assert one(rows, DISTANCE, k="3").repeats == 12
    condition = np.linalg.cond(torch.cat([landmark_matrix(heads, 4).flatten(0, 1) for heads in layers]).numpy())
    assert one(rows, CONDITION, "softmax").value == pytest.approx(np.median(condition), rel=1e-8)
    assert one(rows, CONDITION, "softmax").repeats == one(rows, DISTANCE, "ridge").repeats == 24


def test_lemma_1_holds_on_real_heads_and_the_iteration_arrives(rows):
    assert one(rows, DISTANCE, k="24").value < 1e-6
    assert one(rows, CUBED).value == 1
    assert 3 <= one(rows, ORDER).low <= one(rows, ORDER).high < 3.3
    for z0 in ("paper", "authors", "sequence"):
        assert one(rows, STARTS_BELOW, z0).value == one(rows, LEMMA_HOLDS_AT_START, z0).value == 1


def test_the_law_of_the_iteration_has_an_order_of_three_and_a_quadratic_one_is_found_out():
    def run(law, start=0.9, steps=7):
        errors = [torch.tensor([start], dtype=torch.float64)]
        for _ in range(steps):
            errors.append(law(errors[-1]))
        return torch.stack(errors)

    rounding = torch.tensor([1e-15], dtype=torch.float64)
    within, order = lemma(run(lambda e: (3 * e**3 + e**4) / 4), rounding)
    assert (within == 1).all()
    assert ((order >= 3) & (order < 3.2)).all()
    within, order = lemma(run(lambda e: e**2), rounding)
    assert (within == 0).any()
    assert (order < 2.1).all()
    assert lemma(run(lambda e: e**2), torch.tensor([0.02], dtype=torch.float64))[0].numel() == 0
    # From 1 on the lemma says nothing.
    assert lemma(torch.tensor([[1.0], [5.0]]), rounding)[0].numel() == 0


def test_the_attention_matrix_is_that_of_the_inverse_after_k_iterations(layers):
    rows = list(attention_rows(layers[:1], 4, 2))
    heads = layers[0]
    s = heads.softmax()
    q, k = segment_means(heads.q, 4), segment_means(heads.k, 4)
    left, right = (heads.q @ k.mT / 8**0.5).softmax(-1), (q @ heads.k.mT / 8**0.5).softmax(-1)
    made = left @ true_inverse(landmark_matrix(heads, 4)) @ right
    error = torch.linalg.matrix_norm(made - s) / torch.linalg.matrix_norm(s)
    assert one(rows, MATRIX, "exact").value == pytest.approx(error.quantile(0.5).item(), rel=1e-9)
    assert {row.words.split()[-1] for row in rows} == {"k=0", "k=1", "k=2", "weights=pretrained"}


def test_a_singular_matrix_does_not_start_below_1():
    q = torch.zeros(2, 4, 16, 8, dtype=torch.float64)
    regular = torch.randn(2, 4, 16, 8, generator=torch.Generator().manual_seed(0)).double()
    layers = [LayerHeads("pretrained", i, (), 3 * x, 3 * x, x) for i, x in enumerate((q, regular))]
    rows = list(convergence_rows(layers, 4, 2))
    assert one(rows, REGULAR).value == 0.5
    assert one(rows, STARTS_BELOW).value == 0.5
    # The lemma's own norm is below 1 for singular matrices too.
    assert one(rows, LEMMA_HOLDS_AT_START).value == 1


def row_of(quantity, value, *, method="paper", facts=None, m=64, **spread):
    return Row(
        study="", quantity=quantity, method=method, value=value, unit="", device="cpu", n=512, m=m,
        facts={"weights": "pretrained", **(facts or {})}, dtype="float64", **spread,
    )  # fmt: skip


def convergence_of(*, near=0.7, heads=72, cubed=1.0, order=3.1, steps=50, starts=1.0, above=1.0):
    rows = [row_of(CONDITION, 10.0, method="softmax"), row_of(STARTS_BELOW, 0.5, facts={"k": 0})]
    rows += [row_of(REGULAR, starts, facts={"k": 0}), row_of(RESIDUAL, 1.0, facts={"k": 0}, low=0.9, high=above)]
    rows += [row_of(CUBED, cubed), row_of(MATRIX, 0.5, method="exact"), row_of(RESIDUAL, 0.1, facts={"k": 6})]
    rows += [row_of(ORDER, 3.2, low=order, high=3.3, repeats=steps)]
    for k in range(25):
        rows += [row_of(NEAR, near, facts={"k": k}, repeats=heads), row_of(MATRIX, 0.4, facts={"k": k})]
    return rows


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [True, True, True]),
        ({"near": 0.3}, [False, True, True]),
        ({"near": 0.45}, [None, True, True]),
        ({"heads": 10}, [None, True, True]),
        ({"cubed": 0.999}, [True, False, True]),
        ({"order": 2.8}, [True, False, True]),
        ({"steps": 11}, [True, None, True]),
        ({"steps": 11, "cubed": 0.999}, [True, False, True]),
        # Heads whose matrix may be singular, and a start value that is too large.
        ({"starts": 0.99}, [True, True, None]),
        ({"above": 1.01}, [True, True, False]),
    ],
)
def test_each_rule_of_the_convergence_agrees_refuses_and_cannot_tell(changes, expected):
    assert [verdict.agrees for verdict in CONVERGENCE.verdicts(convergence_of(**changes))] == expected


def test_the_norm_of_the_start_is_1_or_less_and_a_start_that_is_too_large_is_refused(rows):
    start = one(rows, RESIDUAL, k="0")
    assert start.high <= 1 + 1e-12
    assert CONVERGENCE.verdicts(rows)[2].agrees is True
    doubled = [replace(row, value=1.5, high=2.0) if row is start else row for row in rows]
    assert CONVERGENCE.verdicts(doubled)[2].agrees is False
