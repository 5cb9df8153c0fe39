"""The ablation of the arena: its arms can be trained, and its rules decide both ways on rows made by hand."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from nystrom_lab.config import TrainOptions
from nystrom_lab.data.lra.listops.task import prepare_listops
from nystrom_lab.data.lra.texts.reviews import prepare_text
from nystrom_lab.measure.rows import append_rows, new_row, read_rows
from nystrom_lab.studies.arena import ablation
from nystrom_lab.studies.arena.ablation import ARMS, SEEDS, STEPS, STUDIES
from nystrom_lab.studies.arena.ablation_report import CLAIMS, NAMES, TASKS
from nystrom_lab.studies.reproduce.run import check_study, run_study
from nystrom_lab.studies.reproduce.study import Setting
from nystrom_lab.studies.training.runs import Training, train
from nystrom_lab.training.run_settings import settle

STUDY = STUDIES["arena-ablation"]


def rows_of(task, arm, *values, samples=2000):
    shared = {"study": "", "method": arm, "unit": "", "device": "a CPU", "facts": {"layers": 2, "task": task}}
    return [
        new_row(quantity=quantity, value=value, seed=seed, repeats=samples, **shared)
        for seed, accuracy in enumerate(values)
        for quantity, value in (("test accuracy", accuracy), ("training time", 600.0), ("largest class of test", 0.2))
    ]


def verdict(arm, other, *rows):
    found = STUDY.verdicts([row for each in rows for row in each])
    return found[list(CLAIMS).index((arm, other))]


# One standard error of .4 over 2,000 samples is 1.1 points, that of a difference 1.5.
@pytest.mark.parametrize(
    ("listops", "text", "agrees"),
    [
        (0.44, 0.4, True),
        (0.42, 0.4, None),
        (0.36, 0.44, False),
        (0.44, None, None),
        (0.36, None, False),
        (None, None, None),
    ],
)
@pytest.mark.parametrize(("arm", "other"), list(CLAIMS))
def test_a_part_lifts_where_it_is_above_on_a_task_and_below_on_none(arm, other, listops, text, agrees):
    rows = [rows_of(task, other, 0.4) for task in TASKS]
    rows += [rows_of(task, arm, value) for task, value in (("listops", listops), ("text", text)) if value is not None]
    found = verdict(arm, other, *rows)
    assert found.agrees is agrees
    if (listops, text) == (0.36, 0.44):
        assert found.numbers == "listops -4.0 ± 1.5 points, below (1 seed); text +4.0 ± 1.6 points, above (1 seed)."
    if text is None:
        assert "text not trained" in found.numbers


def test_seeds_are_averaged_and_their_spread_widens_the_error():
    spread = [rows_of("listops", "normed", 0.4, 0.45, 0.5), rows_of("listops", "papers", 0.4, 0.4)]
    found = verdict("normed", "papers", *spread)
    # The deviation of .05 over the root of three, beside the binomial error of the other.
    assert "listops +5.0 ± 3.1 points, equal (3 and 2 seeds)" in found.numbers
    assert found.agrees is None
    text = [rows_of("text", arm, 0.4) for arm in ("normed", "papers")]
    even = verdict("normed", "papers", rows_of("listops", "normed", 0.45, 0.45, 0.45), spread[1], *text)
    assert even.agrees is True


def test_two_arms_at_the_best_guess_are_said_to_be_there():
    # The largest class has .2; one standard error is .9 points.
    found = verdict("normed", "papers", rows_of("text", "normed", 0.21), rows_of("text", "papers", 0.2))
    assert "text +1.0 ± 1.3 points, equal, both at the guess of the largest class (1 seed)" in found.numbers
    both = (rows_of("text", "normed", 0.23), rows_of("text", "papers", 0.2))
    assert "guess" not in verdict("normed", "papers", *both).numbers
    first = [replace(row, quantity="first operator of test", value=0.22) for row in both[0]]
    found = verdict("normed", "papers", *both, first[:1])
    assert "above, both at the guess of the first operator (1 seed)" in found.numbers
    listops = [rows_of("listops", arm, 0.4) for arm in ("normed", "papers")]
    assert verdict("normed", "papers", *both, *listops).agrees is True
    assert verdict("normed", "papers", *both, *listops, first[:1]).agrees is None


def test_the_table_and_the_figure_show_the_seeds_and_arms_that_are_there():
    rows = rows_of("text", "papers", 0.5) + rows_of("text", "normed", 0.6, 0.62) + rows_of("listops", "none", 0.3)
    [table] = STUDY.tables(rows)
    assert table.lines == [
        ["listops", "all, no attention", "1", "30.0", "", "", "10.0"],
        ["text", "the papers' model", "1", "50.0", "", "", "10.0"],
        ["text", "+ norm of the pooled", "2", "61.0 ± 1.4", "+11.0 ± 1.6", "", "10.0"],
    ]
    [figure] = STUDY.figures(rows, Path()).values()
    [axes] = figure.axes
    assert [text.get_text() for text in axes.get_yticklabels()] == [
        "the papers' model", "+ norm of the pooled", "all, no attention",
    ]  # fmt: skip
    assert len(axes.containers) == 2


def test_minutes_are_averaged_on_one_device_alone():
    here = rows_of("text", "papers", 0.5, 0.52)
    there = [
        replace(row, device="another CPU, 2 cores", seed=2, value=min(row.value, 180.0))
        for row in rows_of("text", "papers", 0.54)
    ]
    [table] = STUDY.tables(there + here + rows_of("text", "none", 0.5))
    assert table.heads[-2:] == ["min, a CPU", "min, another CPU"]
    assert table.lines == [
        ["text", "the papers' model", "3", "52.0 ± 2.0", "", "", "10.0", "3.0"],
        ["text", "all, no attention", "1", "50.0", "", "", "10.0", ""],
    ]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Small texts, and small expressions."""
    folder = tmp_path_factory.mktemp("data")
    lines = "".join(f"{i} {'good' if i % 2 else 'bad'} {'the ' * (i % 9)}film,{i % 2}\n" for i in range(60))
    (folder / "texts.csv").write_text("text,label\n" + lines)
    (folder / "long.csv").write_text("text,label\n" + lines.replace("the ", "the " * 400))
    prepare_text(folder / "texts.csv", folder / "text", max_length=64, progress=False)
    prepare_listops(folder / "listops", train=48, val=20, test=30, min_length=5, max_length=41, progress=False)
    return folder


def test_every_arm_is_a_training_that_settles_and_is_found_again(data, tmp_path):
    assert ARMS.keys() == NAMES.keys()
    setting = Setting(data=data, precision="float32")
    plan = STUDY.plan(setting)
    assert len(plan.parts) == len(SEEDS) * len(ARMS) * len(STEPS)
    # All arms of a seed come before the next seed.
    assert plan.parts[len(ARMS) * len(STEPS)].name == "listops-papers-seed1"
    models = set()
    for part in plan.parts[: len(ARMS) * len(STEPS)]:
        training = part.measure.args[0]
        words = dict(training.arguments)
        settings = settle(TrainOptions(device="cpu", **words))
        models.add(json.dumps(settings.encoder_config().to_dict() | {"task": settings.task}))
        run = tmp_path / training.name
        run.mkdir()
        (run / "run.json").write_text(
            json.dumps({"settings": settings.record(), "data": {"folder": "data", "fingerprint": "a"}})
        )
        append_rows(run / "rows.csv", rows_of("text", "none", 0.5))
        assert train(training, tmp_path).is_finished
        other = training._replace(arguments={**training.arguments, "positions": "rotary", "steps": 3})
        with pytest.raises(ValueError, match=r"holds a run with (positions|steps) = "):
            train(other, tmp_path)
    # Corrupted inputs are no part of a model.
    assert len(models) == (len(ARMS) - 1) * len(STEPS)


def test_the_paper_size_has_the_steps_of_the_preset(data):
    plan = STUDY.plan(Setting(size="paper", data=data))
    assert plan.setting["steps"] == "listops 5000, text 5000"
    assert plan.differs == "no paper has it"
    assert STUDY.plan(Setting(data=data)).setting["steps"] == "listops 1200, text 1000"


def test_what_is_missing_is_said_before_any_work(data, tmp_path):
    with pytest.raises(ValueError, match="DATA/text, reviews of up to 1,000 bytes: make it with nystrom data prepare"):
        STUDY.plan(Setting())
    with pytest.raises(ValueError, match="DATA/text"):
        STUDY.plan(Setting(data=tmp_path))
    prepare_text(data / "long.csv", tmp_path / "long" / "text", max_length=1200, progress=False)
    with pytest.raises(ValueError, match="holds a text of 1200 bytes; expected at most 1000"):
        STUDY.plan(Setting(data=tmp_path / "long"))
    prepare_text(data / "texts.csv", tmp_path / "text", max_length=64, progress=False)
    assert STUDY.plan(Setting(data=tmp_path)).setting["listops"] == "drawn"


@pytest.mark.slow
def test_a_part_is_a_run_that_goes_on(data, tmp_path, monkeypatch):
    few = {"steps": 2, "evaluate_every": 1}
    monkeypatch.setattr(ablation, "STEPS", dict.fromkeys(STEPS, few))
    monkeypatch.setattr(ablation, "SEEDS", (0,))
    monkeypatch.setattr(ablation, "ARMS", {name: ARMS[name] for name in ("lifted", "none")})
    job = check_study("arena-ablation", Setting(data=data, precision="float32"), tmp_path)
    summary = run_study(job, lambda line: None)
    assert [line[:3] for line in summary.tables[0].lines] == [
        [task, NAMES[arm], "1"] for task in TASKS for arm in ("lifted", "none")
    ]
    command = read_rows(tmp_path / "arena-small" / "text-lifted-seed0" / "rows.csv")[0].command
    assert "--denoise 1.0" in command
    assert isinstance(job.plan.parts[0].measure.args[0], Training)
    # The rows are gone, the runs stay.
    (job.folder / "rows.csv").unlink()
    assert len(run_study(job, lambda line: None).tables[0].lines) == 4
