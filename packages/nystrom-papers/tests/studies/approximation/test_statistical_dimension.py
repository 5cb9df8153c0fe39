import math
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch

from nystrom.kernels import gaussian_kernel
from nystrom_lab.measure.rows import Row
from nystrom_papers.studies.approximation import statistical_dimension as findings
from nystrom_papers.studies.approximation.statistical_dimension import EPSILONS, STUDIES, head_rows
from nystrom_papers.studies.matrices.dense_nystrom import complete

STUDY = STUDIES["skyformer-theorem-2"]
HEAD = {"weights": "pretrained", "layer": 0, "head": "first"}


@pytest.fixture(scope="module")
def tokens():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(16, 4, generator=generator, dtype=torch.float64) for _ in range(2)]


@pytest.fixture(scope="module")
def rows(tokens):
    return list(head_rows(*tokens, columns=(4, 8, 16, 32), draws=40, leverage=True, facts=HEAD))


def only(rows, quantity, **wanted):
    eps = wanted.pop("eps", None)
    found = [row for row in rows if row.quantity == quantity and (eps is None or row.fact("eps") == str(eps))]
    (row,) = (row for row in found if all(getattr(row, name) == value for name, value in wanted.items()))
    return row


def test_the_dimension_and_the_bound_are_those_of_the_dense_inverse(tokens, rows):
    q, k = tokens
    completion = complete(partial(gaussian_kernel, scale=0.5), q, k)
    for eps in (0.5, 0.1):
        ridge = eps * torch.linalg.matrix_norm(completion[:16, 16:], ord=2)
        scores = (completion @ torch.linalg.inv(completion + ridge * torch.eye(32))).diagonal()
        dimension, beta = scores.sum().item(), (scores.sum() / (32 * scores.max())).item()
        assert only(rows, findings.DIMENSION, eps=eps).value == pytest.approx(dimension)
        assert only(rows, findings.BETA, eps=eps).value == pytest.approx(beta)
        bound = dimension / beta * math.log(16 / 0.1)
        assert only(rows, findings.BOUND, eps=eps).value == pytest.approx(bound)


def test_shares_and_quantiles_are_of_the_draws(rows):
    for method in ("uniform", "leverage"):
        assert only(rows, findings.ERROR, method=method, m=8).repeats == 40
        for m in (4, 8, 16, 32):
            tenth = only(rows, findings.TENTH, method=method, m=m).value
            for eps in EPSILONS:
                above = only(rows, findings.ABOVE, method=method, m=m, eps=eps).value
                ordered = only(rows, findings.ORDERED, method=method, m=m, eps=eps).value
                # Draws in the order are not above; more than a tenth above means a larger quantile.
                assert above <= 1 - ordered
                assert (tenth > eps) or above <= 0.1
    assert only(rows, findings.BROKEN).value == 0


def test_a_number_of_draws_that_is_not_found_says_so(tokens):
    few = list(head_rows(*tokens, columns=(2, 4), draws=20, leverage=False, facts=HEAD))
    missing = only(few, findings.NEEDED_ORDER, eps=0.02)
    assert math.isnan(missing.value)
    assert missing.note == "more than 4 draws"


def row_of(quantity, method, value, *, head=HEAD, eps=None, m=None, n=256, repeats=1):
    return Row(
        study="", quantity=quantity, method=method, value=value, unit="", device="cpu", n=n, m=m, repeats=repeats,
        facts=head if eps is None else {**head, "eps": eps}, note="more than 256 draws" if math.isnan(value) else "",
    )  # fmt: skip


def agreeing():
    """Rows that agree with every claim: four heads, the later ones of larger dimensions."""
    rows = [row_of(findings.BROKEN, "all", 0, repeats=400), row_of(findings.ORDERED, "uniform", 1.0, eps=0.5, m=256)]
    for place, eps in product(range(4), EPSILONS):
        head = {**HEAD, "layer": place}
        rows += [
            row_of(findings.DIMENSION, "gaussian", 10.0 + 2 * place, head=head, eps=eps),
            row_of(findings.BOUND, "gaussian", 200.0 + place, head=head, eps=eps),
            row_of(findings.NEEDED_ORDER, "uniform", 30.0 + place, head=head, eps=eps),
        ]
    for weights in ("initialised", "pretrained"):
        head = {**HEAD, "weights": weights}
        for n, dimension in ((64, 40.0), (512, 50.0), (1024, 55.0)):
            rows.append(row_of(findings.DIMENSION, "lengths", dimension, head=head, eps=0.1, n=n))
    for kernel in findings.KERNELS:
        for m, value in ((8, 0.4), (256, 0.1)):
            row = row_of(findings.ERROR, kernel, value, m=m, repeats=16)
            rows.append(replace(row, low=0.9 * value, high=1.1 * value))
    return rows


CHAIN, CONSTANT, GROWTH, SHORT, INITIALISED, PRETRAINED, KERNELS = range(7)


def changed(value, **wanted):
    """The agreeing rows, those with some columns or facts changed."""
    rows = []
    for row in agreeing():
        if all(getattr(row, name, None) == x or row.facts.get(name) == str(x) for name, x in wanted.items()):
            new = value(row) if callable(value) else value
            ends = {} if row.low is None else {"low": 0.9 * new, "high": 1.1 * new}
            row = replace(row, value=new, note="not found" if math.isnan(new) else "", **ends)
        rows.append(row)
    return rows


LAPLACE = {"quantity": findings.ERROR, "method": "laplace", "m": 256}
NEEDED, BOUND = {"quantity": findings.NEEDED_ORDER}, {"quantity": findings.BOUND}


@pytest.mark.parametrize(
    ("place", "value", "wanted", "expected"),
    [
        (CHAIN, 1, {"quantity": findings.BROKEN}, False),
        # Draws that are needed beyond the bound, about as many, and draws that were not found within it.
        (CONSTANT, 20.0, BOUND, False),
        (CONSTANT, 32.0, BOUND, None),
        (CONSTANT, math.nan, {**NEEDED, "eps": 0.5, "layer": 3}, False),
        (GROWTH, lambda row: 60.0 - row.value, NEEDED, False),
        (GROWTH, lambda row: 30.0 if row.fact("layer") in "13" else 29.0, NEEDED, None),
        (SHORT, 2.0, {"method": "lengths", "n": 64}, False),
        # Half of n, and a share that stays.
        (SHORT, 31.0, {"method": "lengths", "n": 64, "weights": "initialised"}, True),
        (SHORT, 30.0, {"method": "lengths", "n": 64}, None),
        (INITIALISED, 100.0, {"method": "lengths", "n": 1024, "weights": "initialised"}, False),
        (INITIALISED, 61.0, {"method": "lengths", "n": 1024, "weights": "initialised"}, None),
        (PRETRAINED, 100.0, {"method": "lengths", "n": 1024, "weights": "pretrained"}, False),
        (PRETRAINED, 61.0, {"method": "lengths", "n": 1024, "weights": "pretrained"}, None),
        (KERNELS, 0.3, LAPLACE, False),
        (KERNELS, 0.2, LAPLACE, None),
    ],
)
def test_each_rule_agrees_refuses_and_cannot_tell(place, value, wanted, expected):
    assert [verdict.agrees for verdict in STUDY.verdicts(agreeing())] == [True] * 7
    found = [verdict.agrees for verdict in STUDY.verdicts(changed(value, **wanted))]
    assert found == [expected if other == place else True for other in range(7)]


def test_draws_that_were_found_for_half_of_the_heads_alone_decide_nothing():
    # The bound is beyond the most draws, so that what was not found says nothing.
    far = [replace(row, value=1000.0) if row.quantity == findings.BOUND else row for row in agreeing()]
    assert STUDY.verdicts(far)[CONSTANT].agrees is True
    lost = [
        replace(row, value=math.nan, note="not found")
        if row.quantity == findings.NEEDED_ORDER and row.fact("layer") in "23"
        else row
        for row in far
    ]
    assert STUDY.verdicts(lost)[CONSTANT].agrees is None
    # They are more than those of the other heads.
    assert STUDY.verdicts(lost)[GROWTH].agrees is True


def test_draws_that_grow_as_epsilon_falls_say_nothing_of_the_heads():
    one = [row for row in agreeing() if row.fact("layer") in ("", "0")]
    assert STUDY.verdicts(one)[GROWTH].agrees is None
    alike = changed(10.0, quantity=findings.DIMENSION, method="gaussian")
    assert STUDY.verdicts(alike)[GROWTH].agrees is None
