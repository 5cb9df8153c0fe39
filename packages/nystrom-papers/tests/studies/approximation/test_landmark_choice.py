from types import MappingProxyType

import pytest
import torch

from nystrom.attention.methods.nystrom import nystrom_attention
from nystrom_lab.measure.rows import Row
from nystrom_papers.studies.approximation.landmark_choice import STUDIES
from nystrom_papers.studies.approximation.landmark_errors import (
    ATTENTION,
    CHOOSING,
    GOOD,
    MATRIX,
    NEARER,
    OUTPUT,
    SPECTRAL,
    approximations,
    error_rows,
)
from nystrom_papers.studies.approximation.real_heads.recorded import find_heads
from nystrom_papers.studies.reproduce.study import Setting

CHOICE, NUMBERS = STUDIES["supplement-figure-1"], STUDIES["supplement-figure-2"]
METHODS = ("nystrom-uniform", "nystrom", "nystrom-kmeans", "nystrom-columns")


@pytest.fixture(scope="module")
def setting(tiny_bert, prose):
    # Times are measured at 4,096 tokens too.
    return Setting(model=tiny_bert, texts=(prose, prose))


@pytest.fixture(scope="module")
def heads(setting):
    (layer,) = find_heads(setting).layers("pretrained", (1,))
    return layer


def test_errors_are_those_of_the_attention_that_users_call(heads):
    rows = {(row.quantity, row.method): row for row in error_rows(heads, (16,), ("iterative",), 2)}
    s = heads.softmax()
    for method, landmarks in (("nystrom", "segment_means"), ("nystrom-kmeans", "kmeans")):
        out = nystrom_attention(heads.q, heads.k, heads.v, num_landmarks=16, landmarks=landmarks)
        exact = s @ heads.v
        expected = torch.linalg.matrix_norm(out - exact) / torch.linalg.matrix_norm(exact)
        assert rows[OUTPUT, method].value == pytest.approx(expected.mean().item(), rel=1e-9)
        assert rows[OUTPUT, method].repeats == 8
    assert rows[MATRIX, "nystrom-uniform"].repeats == rows[SPECTRAL, "nystrom-columns"].repeats == 16
    assert rows[NEARER, "nystrom-uniform"].value == 0


def test_columns_and_rows_meet_the_matrix_at_the_tokens_that_are_drawn(heads):
    s = heads.softmax()
    (made,) = approximations(heads, s, 64, torch.linalg.pinv, 1)["nystrom-columns"]
    drawn = torch.randint(512, (64,), generator=torch.Generator().manual_seed(0))
    # Rounding, by the condition of the matrix.
    torch.testing.assert_close(made[..., drawn, :][..., drawn], s[..., drawn, :][..., drawn], rtol=0, atol=1e-4)


PRETRAINED = MappingProxyType({"weights": "pretrained", "layer": 0, "inverse": "iterative"})


def row_of(quantity, method, value, *, m=64, n=512, facts=PRETRAINED, spread=0.0, repeats=144):
    return Row(
        study="", quantity=quantity, method=method, value=value, unit="", device="cpu", n=n, m=m, facts=facts,
        dtype="float64", low=value * (1 - spread), high=value * (1 + spread), repeats=repeats,
    )  # fmt: skip


def choice_rows(
    *, ours=0.5, drawn=0.8, clusters=0.48, spectral=(0.3, 0.5, 0.29), nearer=0.7, kmeans=9.0, spread=0.4, heads=144
):
    known = {"spread": spread, "repeats": heads}
    rows = [row_of(NEARER, "nystrom", nearer, repeats=heads)]
    for method, *errors in zip(METHODS[1::-1] + METHODS[2:3], (ours, drawn, clusters), spectral, strict=True):
        rows += [row_of(quantity, method, x, **known) for quantity, x in zip((MATRIX, SPECTRAL), errors, strict=True)]
    return [
        *rows,
        row_of(CHOOSING, "nystrom", 1.0, facts={"b": 1}, spread=0.1),
        row_of(CHOOSING, "nystrom-kmeans", kmeans, facts={"b": 1}, spread=0.1),
        # Rows that no rule reads.
        row_of(MATRIX, "nystrom", 99.0, facts={"weights": "initialised", "layer": 0, "inverse": "iterative"}),
        row_of(MATRIX, "nystrom", 99.0, facts={"weights": "pretrained", "layer": 0, "inverse": "exact"}),
    ]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"spread": 0.1}, [True, True, True]),
        # Worse than the draws and in fewer heads; in one norm alone; in the mean and not in most heads.
        ({"spread": 0.1, "drawn": 0.4, "spectral": (0.3, 0.2, 0.29), "nearer": 0.3}, [False, True, True]),
        ({"spread": 0.1, "drawn": 0.4}, [None, True, True]),
        ({"spread": 0.1, "nearer": 0.49}, [None, True, True]),
        ({"spread": 0.1, "clusters": 0.4, "spectral": (0.3, 0.5, 0.2)}, [True, False, True]),
        # 1.13 times in one norm, and the other way in the other; a tenth within the errors.
        ({"spread": 0.1, "clusters": 0.5 / 1.13, "spectral": (0.3, 0.5, 0.31)}, [True, None, True]),
        ({"spread": 0.4, "clusters": 0.5 / 1.13, "spectral": (0.3, 0.5, 0.3 / 1.13)}, [True, None, True]),
        ({"spread": 0.1, "kmeans": 0.5}, [True, True, False]),
        ({"spread": 0.1, "kmeans": 1.1}, [True, True, None]),
        ({"spread": 0.9, "heads": 6}, [None, None, True]),
    ],
)
def test_each_rule_of_the_choice_agrees_refuses_and_cannot_tell(changes, expected):
    assert [verdict.agrees for verdict in CHOICE.verdicts(choice_rows(**changes))] == expected


def number_rows(
    *, matrix=(0.7, 0.5, 0.3), output=(0.5, 0.3, 0.2), good=0.7, times=(1.0, 2.0, 9.0), spread=0.3, heads=72
):
    rows = [row_of(GOOD, "nystrom", good, repeats=heads)]
    for m, *values in zip((16, 64, 256), matrix, output, times, strict=True):
        for quantity, value in zip((MATRIX, OUTPUT), values, strict=False):
            rows.append(row_of(quantity, "nystrom", value, m=m, spread=spread, repeats=heads))
        rows.append(row_of(ATTENTION, "nystrom", values[2], m=m, facts={"b": 1}, spread=0.1))
    return rows


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [True, True, True]),
        ({"matrix": (0.5, 0.7, 0.3)}, [False, True, True]),
        ({"output": (0.5, 0.2, 0.3)}, [False, True, True]),
        ({"output": (0.5, 0.3, 0.29)}, [None, True, True]),
        ({"spread": 0.9, "heads": 8, "good": 1.0}, [None, True, True]),
        ({"times": (1.0, 2.0, 1.5)}, [True, False, True]),
        ({"times": (1.0, 1.1, 9.0)}, [True, None, True]),
        ({"good": 0.3}, [True, True, False]),
        ({"good": 0.45}, [True, True, None]),
    ],
)
def test_each_rule_of_the_numbers_agrees_refuses_and_cannot_tell(changes, expected):
    assert [verdict.agrees for verdict in NUMBERS.verdicts(number_rows(**changes))] == expected
