"""Lengths beyond the arena: rules on rows made by hand, settings that train, and what is not begun."""

from dataclasses import asdict
from pathlib import Path

import pytest

from nystrom_lab.measure.rows import new_row, read_rows
from nystrom_lab.studies.arena import lengths
from nystrom_lab.studies.arena.lengths import CASES, EXTENTS, STUDIES, Extent, LengthCase, settings_of
from nystrom_lab.studies.arena.lengths_report import ESTIMATE, LOSS, METHODS
from nystrom_lab.studies.arena.settled_steps import MEMORY, TIME
from nystrom_lab.studies.reproduce.run import check_study, run_study
from nystrom_lab.studies.reproduce.study import Setting
from nystrom_lab.training.options import TrainOptions
from nystrom_lab.training.run_settings import settle

STUDY = STUDIES["arena-lengths"]
TINY = {"listops-tiny": LengthCase("listops", 60, 2, 40, shortest=5)}


def row(method, quantity, value, *, facts=None, note="", unit="", n=4096, case="pathfinder-64"):
    return new_row(
        study="", quantity=quantity, method=method, value=value, unit=unit, n=n, note=note, device="a CPU",
        facts={"task": case, "b": 8, **(facts or {})},
    )  # fmt: skip


def trained(method, minutes=5.0):
    losses = [row(method, LOSS, 0.9 - 0.1 * k, facts={"step": k, "seconds": 10 * k}) for k in range(3)]
    return [*losses, row(method, "training time", 60 * minutes, unit="s")]


def refused(method, minutes=90.0, **facts):
    note = "would take about 18 s a step, the limit is 6 s"
    return [row(method, ESTIMATE, minutes, unit="min", note=note, facts=facts)]


@pytest.mark.parametrize(
    ("made", "agrees"),
    [
        ([refused("softmax"), trained("nystrom-32"), refused("near_far")], True),
        ([refused("softmax"), trained("nystrom-32")], True),
        ([trained("softmax"), trained("nystrom-32"), trained("near_far")], False),
        ([trained("softmax")], False),
        ([refused("softmax"), refused("nystrom-32"), refused("near_far")], False),
        ([refused("softmax"), refused("nystrom-32")], None),
        ([trained("nystrom-32")], None),
        # Twenty minutes are the limit of rows that do not say how far above it they are.
        ([refused("softmax", 21.0), trained("nystrom-32"), trained("near_far")], None),
        ([refused("softmax", 40.0, over=1.2), trained("nystrom-32"), refused("near_far")], None),
        ([refused("softmax", 21.0, over=1.6), trained("nystrom-32"), refused("near_far")], True),
    ],
)
def test_only_a_linear_method_trains_where_exact_attention_was_not_begun(made, agrees):
    [verdict] = STUDY.verdicts([each for rows in made for each in rows])
    assert verdict.agrees is agrees
    assert verdict.claim == "At 4,096 tokens (pathfinder-64) only a linear method trains here."
    if len(made) < len(METHODS):
        assert "not trained yet" in verdict.numbers


def test_the_table_and_the_figure_show_what_is_there():
    rows = trained("nystrom-32") + refused("softmax")
    rows += [row("softmax", TIME, 18_000.0, unit="ms"), row("softmax", MEMORY, 90.0, unit="MB")]
    rows += [
        row("near_far", TIME, float("nan"), unit="ms", note="would take about 300 s", n=16384, case="pathfinder-128")
    ]
    [table] = STUDY.tables(rows)
    why = "not begun, would take about 18 s a step, the limit is 6 s"
    assert table.lines == [
        ["pathfinder-64", "softmax", why, "4096", "18,000", "90", ""],
        ["pathfinder-64", "nystrom-32", "5.0 min", "4096", "", "", "0.900 to 0.700"],
        ["pathfinder-128", "near_far", "", "16384", "", "", ""],
    ]
    [figure] = STUDY.figures(rows, Path()).values()
    assert [axes.get_title() for axes in figure.axes][2:] == ["pathfinder-64", "pathfinder-128"]
    time, memory = figure.axes[:2]
    assert (time.get_yscale(), memory.get_yscale(), memory.get_ylim()[0]) == ("log", "linear", 0)
    [curve] = figure.axes[2].get_lines()
    assert list(curve.get_ydata()) == pytest.approx([0.9, 0.8, 0.7])


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("method", METHODS)
def test_a_run_trains_what_was_measured(case, method):
    words = dict(lengths._arguments(case, method, Setting(precision="float32"), EXTENTS["small"]))
    assert words.pop("max_length", case.n) == case.n
    trained = settle(TrainOptions(device="cpu", **words), positions=case.n)
    extent = {name: words[name] for name in ("steps", "evaluate_every", "log_every")}
    measured = asdict(settings_of(case, method, "float32")) | extent
    assert asdict(trained) | {"warmup_steps": 0} == measured | {"warmup_steps": 0}
    # About as many tokens a step at every length.
    assert 32_000 <= case.n * case.batch <= 32_768


def test_the_paper_size_trains_longer(tmp_path):
    small, paper = (STUDY.plan(Setting(size=size)) for size in ("small", "paper"))
    assert small.setting["training"] == "300 steps, at most 20 min"
    assert paper.setting["training"] == "3000 steps, at most 200 min"
    assert [part.name for part in small.parts][:5] == [
        *(f"{case}-steps" for case in CASES), "pathfinder-32-softmax",
    ]  # fmt: skip


def test_what_would_take_too_long_is_not_begun(tmp_path, monkeypatch):
    monkeypatch.setattr(lengths, "CASES", TINY)
    monkeypatch.setattr(lengths, "EXTENTS", {"small": Extent(20, 1e-6)})
    job = check_study("arena-lengths", Setting(precision="float32"), tmp_path)
    summary = run_study(job, lambda line: None)
    assert not (tmp_path / "arena-small").exists()
    assert [verdict.agrees for verdict in summary.verdicts] == [False]
    assert all("not begun, would take about" in line[2] for line in summary.tables[0].lines)
    rows = read_rows(job.folder / "rows.csv")
    assert {r.quantity for r in rows} == {TIME, MEMORY, ESTIMATE}
    assert all(r.value > 0 for r in rows)
    assert all(float(r.facts["over"]) > 1 for r in rows if r.quantity == ESTIMATE)


@pytest.mark.slow
def test_a_part_is_a_run_with_its_curve(tmp_path, monkeypatch):
    monkeypatch.setattr(lengths, "CASES", TINY)
    monkeypatch.setattr(lengths, "EXTENTS", {"small": Extent(20, 1e6)})
    job = check_study("arena-lengths", Setting(precision="float32"), tmp_path)
    part = next(part for part in job.plan.parts if part.name == "listops-tiny-nystrom-32")
    rows = list(part.measure(job.folder))
    assert {"train loss", "training time", "peak memory", "test accuracy"} == {r.quantity for r in rows}
    assert sum(r.quantity == LOSS for r in rows) == 20
    # A run that was begun goes on, whatever it would take.
    monkeypatch.setattr(lengths, "EXTENTS", {"small": Extent(20, 1e-6)})
    job = check_study("arena-lengths", Setting(precision="float32"), tmp_path)
    part = next(part for part in job.plan.parts if part.name == "listops-tiny-nystrom-32")
    assert len(list(part.measure(job.folder))) == len(rows)
