"""A search tries each combination once, continues where it was killed, and scores the best on validation."""

import csv
import json

import pytest

from nystrom_lab.config import PAPER_GRID, SearchGrid
from nystrom_lab.measure.rows import read_rows
from nystrom_lab.training.finetune.search import Search
from nystrom_lab.training.grid.run_grid import status_lines
from nystrom_lab.training.run_folder import RunFolder, alone
from nystrom_lab.training.run_trainer import RunTrainer
from nystrom_lab.training.trials import Outcome, outcome_of

GRID = SearchGrid(batch_size=(4, 8), learning_rate=(1e-3,))


def table(folder):
    with (folder / "trials.tsv").open(newline="") as file:
        return list(csv.DictReader(file, delimiter="\t"))


def test_the_grid_of_the_paper():
    assert len(PAPER_GRID.trials()) == 12
    assert {tuple(trial.values()) for trial in PAPER_GRID.trials()} == {
        (batch, rate) for batch in (8, 16, 32) for rate in (2e-5, 3e-5, 4e-5, 5e-5)
    }


@pytest.mark.refuses
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"search": True, "grid": SearchGrid(seed=(1, 2))}, r"search\.seed for another: leave one out"),
        ({"search": True, "batch_size": 4}, r"batch_size is given, but the search tries .* in search\.batch_size"),
        ({"grid": SearchGrid(seed=(1, 2)), "seed": 9}, "seed is given, but the search tries other values"),
        ({"grid": SearchGrid(epochs=(1.0, 2.0)), "epochs": None}, "steps are given, but the search tries numbers of"),
    ],
)
def test_what_a_search_would_not_heed_is_refused(tuned, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        tuned(tmp_path / "run", **changes)
    assert not (tmp_path / "run").exists()


def test_what_holds_no_search_of_this_version_is_refused_and_stays(tuned, tmp_path):
    for name, content, says in (
        ("search.json", "mine\n", r"search\.json is not valid JSON .*: choose another folder with --to"),
        ("search.json", '{"data": "a"', "search.json is not valid JSON"),
        ("search.json", '{"data": "a", "trials": [1]}', r"search\.json does not describe a search of this library"),
        ("search.json", "{}", r"search\.json does not describe a search of this library: choose another"),
        (
            "study.log",
            "{}\n",
            "holds study.log, a search that an earlier version kept with Optuna: finish it with that",
        ),
        ("notes.txt", "mine\n", "holds notes.txt and no search: choose another folder"),
    ):
        folder = tmp_path / str(len([*tmp_path.iterdir()]))
        folder.mkdir()
        (folder / name).write_text(content)
        with pytest.raises(ValueError, match=says):
            tuned(folder, grid=GRID, steps=2, resume=True)
        assert (folder / name).read_text() == content
    with pytest.raises(ValueError, match=r"holds study\.log, a search that an earlier version kept with Optuna"):
        status_lines(tmp_path / "4")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("mine\n", r"outcome\.json is not valid JSON .*: delete it, and the same command continues the trial"),
        ('{"value": 0.5}', r"outcome\.json does not say how a trial ended: delete it"),
        (json.dumps(Outcome("accuracy")._asdict() | {"value": "0.5"}), "does not say how a trial ended: delete it"),
    ],
)
def test_an_outcome_that_is_damaged_is_named(tmp_path, content, says):
    (tmp_path / "outcome.json").write_text(content)
    with pytest.raises(ValueError, match=says):
        outcome_of(RunFolder(tmp_path))


def test_one_run_is_no_folder_of_runs(tmp_path):
    (tmp_path / "run.json").touch()
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1" / "run.json").touch()
    with pytest.raises(ValueError, match=f"^{tmp_path} is one run"):
        status_lines(tmp_path)
    with pytest.raises(ValueError, match="holds one run, where `nystrom lra run` has no place"):
        alone(tmp_path, "`nystrom lra run`").__enter__()


def test_a_trial_without_finite_numbers_is_listed_with_the_reason(tmp_path):
    run = RunFolder(tmp_path / "trials" / "seed-1")
    run.path.mkdir(parents=True)
    (run.path / "run.json").write_text("{}")
    Outcome("accuracy", error="the loss is NaN").write(run)
    assert status_lines(tmp_path) == ["trials/seed-1: the loss is NaN", "1 of 1 finished"]


def test_a_search_that_version_0_3_began_goes_on(tuned, tmp_path, monkeypatch):
    def train(self, name):
        raise KeyboardInterrupt

    monkeypatch.setattr(Search, "train", train)
    with pytest.raises(KeyboardInterrupt):
        tuned(tmp_path, grid=GRID, steps=2)
    record = json.loads((tmp_path / "search.json").read_text())
    for trial in record["trials"]:
        # The weights alone, and a setting that is gone.
        trial["weights"] = trial["weights"].partition("-")[0]
        trial["track_error"] = False
    (tmp_path / "search.json").write_text(json.dumps(record))
    with pytest.raises(KeyboardInterrupt):
        tuned(tmp_path, grid=GRID, steps=2, resume=True)
    record["trials"][1]["weights"] = "0" * 16
    (tmp_path / "search.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match="holds a search of other values, settings or data"):
        tuned(tmp_path, grid=GRID, steps=2, resume=True)


@pytest.mark.slow
def test_a_killed_search_ends_as_an_unbroken_one(tuned, tmp_path, monkeypatch):
    whole = tuned(tmp_path / "whole", grid=GRID, steps=2, evaluate_every=1)
    rows = table(whole)
    assert [(row["batch_size"], row["learning_rate"]) for row in rows] == [("4", "0.001"), ("8", "0.001")]
    (best,) = (row for row in rows if row["best"])
    scores = [float(row["validation accuracy"]) for row in rows]
    assert float(best["validation accuracy"]) == max(scores)
    assert best["trial"] == str(scores.index(max(scores)))
    results = read_rows(whole / "rows.csv")
    assert [row.value for row in results if row.quantity.endswith("of a trial")] == pytest.approx(scores, abs=1e-4)
    (scored,) = (row for row in results if row.quantity == "validation accuracy")
    assert f"batch_size={best['batch_size']} learning_rate={best['learning_rate']}" in scored.words
    assert (whole / "best" / "model.safetensors").is_file()
    # Checkpoints of the best alone are kept.
    assert len({path.parent for path in whole.glob("trials/*/checkpoint-*")}) == 1

    inner, steps = RunTrainer.training_step, []

    def training_step(self, *given):
        steps.append(self.settings.batch_size)
        if len(steps) == 2:
            raise KeyboardInterrupt
        return inner(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(RunTrainer, "training_step", training_step)
        with pytest.raises(KeyboardInterrupt):
            tuned(tmp_path / "run", grid=GRID, steps=2, evaluate_every=1)
    with pytest.raises(ValueError, match="continue it with --resume"):
        tuned(tmp_path / "run", grid=GRID, steps=2, evaluate_every=1)
    with pytest.raises(ValueError, match="of other values"):
        tuned(tmp_path / "run", grid=SearchGrid(batch_size=(4,)), steps=2, evaluate_every=1, resume=True)
    run = tuned(tmp_path / "run", grid=GRID, steps=2, evaluate_every=1, resume=True)
    again = table(run)
    names = ("batch_size", "learning_rate", "validation accuracy", "best step", "best")
    assert [[row[name] for name in names] for row in again] == [[row[name] for name in names] for row in rows]
