"""A search tries each combination once, continues where it was killed, and scores the best on validation."""

import csv
import re
import signal
import subprocess
import sys

import pytest

from nystrom_lab.config import PAPER_GRID, SearchGrid
from nystrom_lab.measure.rows import read_rows
from nystrom_lab.training import study
from nystrom_lab.training.finetune.search import Search
from nystrom_lab.training.grid.run_grid import status_lines
from nystrom_lab.training.run_trainer import RunTrainer

optuna = pytest.importorskip("optuna")
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


def test_what_holds_no_search_of_this_version_is_refused_and_stays(tuned, tmp_path, monkeypatch):
    torn = '{"op_code":0,"worker_id":"a","study_name":"search","directions":[2]}\n{"op_code"'
    whole = torn.partition("\n")[0]
    for name, content, says in (
        ("study.log", "mine\n", r"study\.log is damaged in line 1, or not of a search: choose another folder"),
        ("study.log", torn, "study.log is damaged in line 2"),
        # Lines of another study, without what Optuna looks for, and of an operation that it does not know.
        ("study.log", whole.replace("search", "mine"), r"study\.log is damaged, or not of a search .*: choose another"),
        ("study.log", whole + '\n{"op_code":2,"worker_id":"a"}\n', r"study\.log is damaged, or not of a search"),
        ("study.log", whole.replace(":0", ":99"), r"study\.log is damaged, or not of a search"),
        ("search.json", "{}", "holds search.json and a search of version 0.3, which only that continues: choose"),
    ):
        folder = tmp_path / str(len(content))
        folder.mkdir()
        (folder / name).write_text(content)
        with pytest.raises(ValueError, match=says):
            tuned(folder, grid=GRID, steps=2, resume=True)
        assert (folder / name).read_text() == content
    monkeypatch.setattr(study, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs Optuna, which is not installed: pip install 'nystrom-lab\[search\]'"):
        tuned(tmp_path / "new", grid=GRID, steps=2)


def test_trials_that_end_at_once_are_all_kept(tmp_path):
    """Whichever process writes, and although one was killed while it held the lock."""
    code = f"""
import os, signal, sys
from pathlib import Path
from filelock import FileLock
from optuna.trial import create_trial
from nystrom_lab.training.study import open_study
found = open_study(Path({str(tmp_path)!r}))
for number in range(10):
    found.add_trial(create_trial(value=0.5, user_attrs={{"name": f"{{sys.argv[1]}}-{{number}}"}}))
FileLock({str(tmp_path / ".study.log.lock")!r}).acquire()
os.kill(os.getpid(), signal.SIGKILL)
"""
    processes = [subprocess.Popen([sys.executable, "-W", "error", "-c", code, name]) for name in "ab"]
    assert {process.wait() for process in processes} == {-signal.SIGKILL}
    assert study.ended_trials(study.open_study(tmp_path)).keys() == {f"{name}-{n}" for name in "ab" for n in range(10)}
    # Optuna's own tools read the file.
    backend = optuna.storages.journal.JournalFileBackend(str(tmp_path / "study.log"))
    assert len(optuna.load_study(study_name="search", storage=optuna.storages.JournalStorage(backend)).trials) == 20


def test_a_study_that_is_looked_at_is_not_written(tmp_path):
    failed, attributes = optuna.trial.TrialState.FAIL, {"name": "seed-1", "error": "NaN"}
    study.open_study(tmp_path).add_trial(optuna.trial.create_trial(state=failed, user_attrs=attributes))
    before = (tmp_path / "study.log").read_bytes()
    assert status_lines(tmp_path) == ["trials/seed-1: NaN", "1 of 1 finished"]
    assert (tmp_path / "study.log").read_bytes() == before


def test_a_search_of_a_version_that_recorded_the_weights_alone_goes_on(tuned, tmp_path, monkeypatch):
    def train(self, name):
        raise KeyboardInterrupt

    monkeypatch.setattr(Search, "train", train)
    with pytest.raises(KeyboardInterrupt):
        tuned(tmp_path, grid=GRID, steps=2)
    log = tmp_path / "study.log"
    before, count = re.subn(r'("weights": "\w+)-[^"]*', r"\1", log.read_text())
    assert count
    log.write_text(before)
    with pytest.raises(KeyboardInterrupt):
        tuned(tmp_path, grid=GRID, steps=2, resume=True)
    log.write_text(before.replace('"weights": "', '"weights": "0'))
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
