import math
from dataclasses import replace

import pytest
import torch

from nystrom.attention.registry import find_function
from nystrom_lab.measure.rows import new_row
from nystrom_lab.studies.approximation.spectral_norm import STUDIES
from nystrom_lab.studies.reproduce.encoders import find_encoder
from nystrom_lab.studies.reproduce.run import check_study, run_study
from nystrom_lab.studies.reproduce.study import Setting

STUDY = STUDIES["skyformer-figure-1"]
RELATIVE = "relative spectral norm of the error"


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


def test_every_method_has_both_errors_at_each_size(part):
    found = {(row.method, row.m) for row in part if row.quantity == RELATIVE}
    sized = ["skyformer_softmax", "nystrom", "performer", "informer", "linformer", "longformer", "bigbird", "reformer"]
    sized += ["near_far"]
    sized += ["skyformer-independent", "nystrom-columns"]
    assert found == {(method, m) for method in sized for m in (16, 32, 64, 128, 256)} | {("linear", None)}
    assert len(part) == 2 * len(found)
    assert {row.dtype for row in part if row.method in sized[-2:]} == {"float64"}
    assert all(math.isfinite(row.value) and row.low <= row.high and row.repeats == 8 for row in part)


def test_a_row_is_the_mean_of_dense_spectral_norms(part, setting):
    given = find_encoder(setting).record(512, 2, (0,), weights="initialised")[0]
    exact, ours = (find_function(name)(*given) for name in ("softmax", "linear"))
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


@pytest.mark.long
def test_an_interrupted_study_goes_on_with_the_lengths_that_have_no_rows(setting, tmp_path):
    job = check_study("skyformer-figure-1", setting, tmp_path)
    assert [part.name for part in job.plan.parts] == [
        f"{weights}-n={n}" for weights in ("initialised", "pretrained") for n in (512, 1024, 2048)
    ]
    # Short parts in place of the real ones, whose work is in the other tests.
    quick = [part._replace(measure=_made(part.name)) for part in job.plan.parts]
    first = job._replace(plan=job.plan._replace(parts=quick[:2]))
    run_study(first)
    said = []
    summary = run_study(job._replace(plan=job.plan._replace(parts=quick)), said.append)
    assert "2 of 6 parts" in said[0]
    assert len(said) == 5
    assert summary.rows == 6 * 16
    assert [verdict.agrees for verdict in summary.verdicts] == [True, True, True]


def _made(name):
    """A part in which skyformer_softmax falls from .4 to .1 and the others stay at .5."""
    weights, _, n = name.partition("-n=")
    errors = {"skyformer_softmax": (0.4, 0.1), "nystrom": (0.5, 0.5), "performer": (0.5, 0.5), "informer": (0.5, 0.5)}
    return lambda folder: [
        row_of(method, m, value, n=int(n), weights=weights, quantity=quantity)
        for quantity in (RELATIVE, "spectral norm of the error")
        for method, values in errors.items()
        for m, value in zip((16, 256), values, strict=True)
    ]


def row_of(method, m, value, *, n=512, weights="pretrained", quantity=RELATIVE):
    return new_row(
        study="", quantity=quantity, method=method, value=value, unit="", device="cpu", n=n, m=m,
        facts={"weights": weights, "b": 2, "h": 4, "d": 8},
    )  # fmt: skip


def test_each_rule_decides_both_ways():
    rows = _made("pretrained-n=512")(None)
    assert [verdict.agrees for verdict in STUDY.verdicts(rows)] == [True, True, True]

    def changed(method, m, value):
        return [replace(row, value=value) if (row.method, row.m) == (method, m) else row for row in rows]

    assert [v.agrees for v in STUDY.verdicts(changed("skyformer_softmax", 256, 0.3))] == [False, True, True]
    assert [v.agrees for v in STUDY.verdicts(changed("informer", 256, 0.2))] == [True, False, True]
    assert [v.agrees for v in STUDY.verdicts(changed("nystrom", 16, 0.3))] == [True, True, False]
    one_size = [row for row in rows if row.m == 16]
    assert [v.agrees for v in STUDY.verdicts(one_size)] == [None, None, None]


def test_what_cannot_run_is_one_line(tiny_bert, prose):
    with pytest.raises(ValueError, match="bert-base-cased: name its folder with --model"):
        STUDY.plan(Setting(size="paper"))
    with pytest.raises(ValueError, match="expected at least 4096, for 2 x 2048: name more or longer files"):
        STUDY.plan(Setting(model=tiny_bert, texts=(prose,)))
    with pytest.raises(ValueError, match="expected at least 40960"):
        STUDY.plan(Setting(size="paper", model=tiny_bert, texts=(prose,)))
    plan = STUDY.plan(Setting(size="paper", model=tiny_bert, texts=(prose,) * 16))
    assert plan.differs.startswith("tiny-bert instead of BERT-base, ")
    assert plan.differs.endswith(" instead of Wikitext-2")
