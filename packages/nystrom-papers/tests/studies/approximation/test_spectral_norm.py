import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from nystrom.attention.functions import FUNCTIONS
from nystrom_lab.measure.rows import Row
from nystrom_papers.studies.approximation.spectral_norm import STUDIES, printed_form
from nystrom_papers.studies.reproduce.encoders import find_encoder
from nystrom_papers.studies.reproduce.study import Setting

STUDY = STUDIES["skyformer-figure-1"]
RELATIVE = "relative spectral norm of the error"
QUANTITIES = (RELATIVE, "spectral norm of the error")
GAIN = "relative error with the fewest features over that with the most"
BEST = "share of heads with the smallest error of the four methods"


@pytest.fixture(scope="module")
def setting(tiny_bert, prose):
    # 8,000 tokens: two texts of 2,048.
    return Setting(model=tiny_bert, texts=(prose, prose))


@pytest.fixture(scope="module")
def part(setting, tmp_path_factory):
    """Rows of the first part, initialised weights at 512 tokens."""
    part = STUDY.plan(setting).parts[0]
    assert part.name == "initialised-n=512"
    return list(part.measure(tmp_path_factory.mktemp("figure-1")))


@pytest.mark.long
def test_every_method_has_both_errors_at_each_size(part):
    found = {(row.method, row.m) for row in part if row.quantity == RELATIVE}
    sized = ["skyformer_softmax", "nystrom", "performer", "informer", "linformer", "longformer", "bigbird", "reformer"]
    sized += ["near_far", "skyformer-printed", "nystrom-columns"]
    assert found == {(method, m) for method in sized for m in (16, 32, 64, 128, 256)} | {("linear", None)}
    errors = [row for row in part if row.quantity in QUANTITIES]
    assert len(errors) == 2 * len(found)
    assert {row.dtype for row in part if row.method in sized[-2:]} == {"float64"}
    assert all(math.isfinite(row.value) and row.low <= row.high and row.repeats == 8 for row in part)


def test_gains_and_the_smallest_errors_are_of_single_heads(part, setting):
    given = find_encoder(setting).record(512, 2, (0,), weights="initialised")[0]
    exact, attend = FUNCTIONS["softmax"](*given), FUNCTIONS["nystrom"]
    few, many = (
        torch.linalg.matrix_norm((attend(*given, num_landmarks=m) - exact).double(), ord=2).flatten() for m in (16, 256)
    )
    gains = {row.method: row for row in part if row.quantity == GAIN}
    assert set(gains) == {*FORMS, "nystrom", "performer", "informer"}
    # The power iteration's own accuracy.
    assert gains["nystrom"].value == pytest.approx((few / many).quantile(0.5).item(), rel=1e-4)
    assert gains["nystrom"].high == pytest.approx((few / many).quantile(0.75).item(), rel=1e-4)
    shares = {(row.method, row.m): row for row in part if row.quantity == BEST}
    assert set(shares) == {(form, m) for form in FORMS for m in (16, 32, 64, 128, 256)}
    assert {row.repeats for row in shares.values()} == {8}


# A landmark drawn twice makes the middle singular; larger tokens make averages that no guard keeps within the values.
@pytest.mark.parametrize(
    ("size", "drawn", "beyond"), [(1, [2, 5, 11, 16], False), (1, [2, 2, 11, 16, 16], False), (2, [2, 5, 11, 16], True)]
)
def test_the_printed_form_is_equations_4_to_6_with_exponentials_and_numpys_pseudoinverse(size, drawn, beyond):
    q, k, v = (size * torch.randn(9, 4, generator=torch.Generator().manual_seed(i)).double() for i in range(3))
    tokens = np.concatenate([q, k])
    b = np.exp(tokens @ tokens.T / 2)
    s = np.eye(18)[:, drawn] / len(drawn) ** 0.5
    whole = b @ s @ np.linalg.pinv(s.T @ b @ s, hermitian=True) @ s.T @ b
    a = np.eye(9, 18) @ whole @ np.eye(18)[:, 9:]
    expected = np.diag(1 / a.sum(1)) @ a @ v.numpy()
    # Rounding, by the condition of the middle: 4e7 for the larger tokens.
    np.testing.assert_allclose(
        printed_form(q, k, v, torch.tensor(drawn)), expected, rtol=0, atol=1e-8 if beyond else 1e-12
    )
    assert (expected < v.numpy().min(0)).any() == beyond


def test_a_row_is_the_mean_of_dense_spectral_norms(part, setting):
    given = find_encoder(setting).record(512, 2, (0,), weights="initialised")[0]
    exact, ours = (FUNCTIONS[name](*given) for name in ("softmax", "linear"))
    expected = (torch.linalg.matrix_norm((ours - exact).double(), ord=2)).mean().item()
    (row,) = (row for row in part if row.method == "linear" and row.quantity != RELATIVE)
    # The power iteration's own accuracy.
    assert row.value == pytest.approx(expected, rel=1e-5)


def test_the_tables_and_the_figures_show_the_rows_and_a_method_without_a_size_at_each(part, tmp_path):
    relative, absolute = STUDY.tables(part)
    assert relative.heads == ["method", "d=16", "d=32", "d=64", "d=128", "d=256"]
    (linear,) = (line for line in relative.lines if line[0] == "linear")
    assert len(set(linear[1:])) == 1
    assert "spectral norm" in absolute.title
    figures = STUDY.figures(part, tmp_path)
    assert list(figures) == ["", "absolute", "others"]
    assert all(axes.get_title() == "initialised, n = 512" for f in figures.values() for axes in f.axes)


FORMS = ("skyformer-printed", "skyformer_softmax")


def made(name):
    """A part that agrees with every claim."""
    weights, _, n = name.partition("-n=")
    of = {"n": int(n), "weights": weights}
    rows = []
    for method in (*FORMS, "nystrom", "performer", "informer"):
        gain = (3.0, 5.0) if method in FORMS else (1.0, 1.5)
        rows.append(row_of(GAIN, method, None, sum(gain) / 2, low=gain[0], high=gain[1], **of))
        rows += [row_of(quantity, method, m, 1 / m, **of) for quantity in QUANTITIES for m in (16, 256)]
    return rows + [row_of(BEST, form, m, 0.9, **of) for form in FORMS for m in (16, 256)]


def row_of(quantity, method, m, value, *, n=512, weights="pretrained", **spread):
    return Row(
        study="", quantity=quantity, method=method, value=value, unit="", device="cpu", n=n, m=m, repeats=24,
        facts={"weights": weights, "b": 2, "h": 12, "d": 8}, **spread,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("quantity", "method", "change", "place", "expected"),
    [
        (GAIN, "skyformer-printed", {"low": 1.0, "high": 1.9}, 0, False),
        (GAIN, "skyformer-printed", {"low": 1.9, "high": 9.0}, 0, None),
        (GAIN, "skyformer_softmax", {"low": 1.0, "high": 1.9}, 1, False),
        (GAIN, "skyformer_softmax", {"low": 1.9, "high": 9.0}, 1, None),
        (GAIN, "performer", {"low": 2.1, "high": 3.0}, 2, False),
        (GAIN, "informer", {"low": 1.0, "high": 2.1}, 2, None),
        (BEST, "skyformer-printed", {"value": 0.1}, 3, False),
        (BEST, "skyformer-printed", {"value": 0.6}, 3, None),
        (BEST, "skyformer_softmax", {"value": 0.1}, 4, False),
        (BEST, "skyformer_softmax", {"value": 0.9, "repeats": 2}, 4, None),
    ],
)
def test_each_rule_agrees_refuses_and_cannot_tell(quantity, method, change, place, expected):
    rows = made("pretrained-n=512") + made("initialised-n=512")
    assert [verdict.agrees for verdict in STUDY.verdicts(rows)] == [True] * 5
    of = (quantity, method, "pretrained")
    changed = [replace(r, **change) if (r.quantity, r.method, r.fact("weights")) == of else r for r in rows]
    found = [verdict.agrees for verdict in STUDY.verdicts(changed)]
    assert found == [expected if other == place else True for other in range(5)]


def test_a_panel_without_the_rows_of_a_claim_cannot_tell():
    rows = made("pretrained-n=512") + made("initialised-n=512")
    lost = [row for row in rows if "pretrained" in row.words or row.quantity not in (GAIN, BEST)]
    assert [verdict.agrees for verdict in STUDY.verdicts(lost)] == [None] * 5
    one = [row for row in rows if row.method != "skyformer-printed"]
    assert [verdict.agrees for verdict in STUDY.verdicts(one)] == [None, True, True, None, True]


def test_what_cannot_run_is_one_line(tiny_bert, prose):
    with pytest.raises(ValueError, match="expected at least 40960"):
        STUDY.plan(Setting(size="paper", model=tiny_bert, texts=(prose,)))
    plan = STUDY.plan(Setting(size="paper", model=tiny_bert, texts=(prose,) * 16))
    assert plan.differs.startswith("tiny-bert instead of BERT-base, ")
    assert plan.differs.endswith(" instead of Wikitext-2")
