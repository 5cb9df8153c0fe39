"""A search in jobs of a cluster ends as one that stays here, and is checked before any job."""

import csv
import pickle
import time
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch.testing import assert_close

from nystrom_lab.config import SearchGrid, Slurm
from nystrom_lab.measure.rows import read_rows
from nystrom_lab.training.finetune import search as jobs
from nystrom_lab.training.grid.run_grid import status_lines
from nystrom_lab.training.grid.scheduler import Failure
from nystrom_lab.training.grid.slurm import PRIVATE, Jobs, _prefix, alive_jobs
from nystrom_lab.training.run_trainer import NotFinite, RunTrainer

pytest.importorskip("submitit")
GRID = SearchGrid(batch_size=(4, 8), learning_rate=(1e-3,))
# With the last, the weights are too large for float32 after one step.
DIVERGES = SearchGrid(learning_rate=(1e-3, 2e-3, 1e30))
TWO_STEPS = {"steps": 2, "evaluate_every": 1, "threads": 1}


def table(folder):
    with (folder / "trials.tsv").open(newline="") as file:
        return [{**row, "seconds": ""} for row in csv.DictReader(file, delimiter="\t")]


def rows(folder):
    found = [row for row in read_rows(folder / "rows.csv") if row.unit not in ("s", "MB")]
    return [replace(row, command="") for row in found]


def checkpoints(folder):
    return {path.parent.name for path in folder.glob("trials/*/checkpoint-*")}


def assert_equal_searches(here, there):
    """The same table, rows and model, except time and memory; the best alone is scored, and its checkpoints kept."""
    assert table(there) == table(here)
    assert rows(there) == rows(here)
    weights = [load_file(folder / "best" / "model.safetensors") for folder in (there, here)]
    assert_close(*weights, rtol=0, atol=0)
    assert checkpoints(there) == checkpoints(here)
    assert len(checkpoints(there)) == 1
    assert checkpoints(there) == {path.parent.name for path in there.glob("trials/*/rows.csv")}


class JobsHere(Jobs):
    """Does the work of jobs in this process, with what a job would be given."""

    def __init__(self, to, slurm, *, cpus, at_once):
        self.to, self.submitted = to.resolve(), []

    def run(self, works):
        failures = []
        for work in works:
            if work.result():
                continue
            self.submitted.append(work.name)
            try:
                work.function(*pickle.loads(pickle.dumps(work.arguments)))
            except (ValueError, NotFinite) as error:
                failures.append(Failure(work.name, str(error), self.to / f"{work.name}.log"))
            else:
                assert work.result()
        return failures


@pytest.fixture
def submitted(monkeypatch):
    """Jobs are done here; the names of those that were submitted."""
    names: list[str] = []

    def make(*given, **options):
        jobs = JobsHere(*given, **options)
        jobs.submitted = names
        return jobs

    monkeypatch.setattr("nystrom_lab.training.finetune.finetune.Jobs", make)
    monkeypatch.setattr(jobs, "alive_jobs", lambda folder: [])
    return names


@pytest.mark.slow
def test_a_search_in_jobs_ends_as_one_that_stays_here(tuned, cluster, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(Jobs.__init__.__kwdefaults__, "seconds", 0.5)
    here = tuned(tmp_path / "here", grid=GRID, **TWO_STEPS)
    there = tuned(tmp_path / "there", grid=GRID, on="slurm", **TWO_STEPS)
    assert_equal_searches(here, there)
    # A result may be seen before the end of the job that wrote it.
    while alive_jobs(there):
        time.sleep(0.1)
    lines = status_lines(there)
    assert lines[0].startswith("trials/batch_size-4_learning_rate-0.001: validation accuracy 0.")
    assert lines[2:] == ["search: job 3 COMPLETED", "2 of 2 finished"]
    capsys.readouterr()
    # The same command has nothing to do, on the cluster and here.
    states = len([*cluster.glob("*.state")])
    tuned(there, grid=GRID, on="slurm", **TWO_STEPS)
    assert "search: finished before: the best trial is scored" in capsys.readouterr().out
    assert len([*cluster.glob("*.state")]) == states == 3
    assert_equal_searches(here, tuned(there, grid=GRID, resume=True, **TWO_STEPS))


@pytest.mark.long
def test_numbers_that_are_not_finite_hold_up_nothing(tuned, submitted, tmp_path, monkeypatch, capsys):
    here = tuned(tmp_path / "here", grid=DIVERGES, **TWO_STEPS)
    assert "\nnot in the table: learning_rate-1e+30, the outputs of the model are not finite" in capsys.readouterr().out
    there = tuned(tmp_path / "there", grid=DIVERGES, on="slurm", **TWO_STEPS)
    assert len(table(there)) == 2
    assert_equal_searches(here, there)
    assert submitted == [*(f"trials/learning_rate-{rate}" for rate in (0.001, 0.002, 1e30)), "search"]
    lines = status_lines(there)
    assert "learning_rate-1e+30: the outputs of the model are not finite (nan" in lines[2]
    assert lines[-1] == "3 of 3 finished"
    # While jobs are in the queue the same command waits for what was begun; then it tries that one again, and no other.
    submitted.clear()
    with monkeypatch.context() as patch:
        patch.setattr(jobs, "alive_jobs", lambda folder: ["7"])
        tuned(there, grid=DIVERGES, on="slurm", **TWO_STEPS)
    assert submitted == []
    tuned(there, grid=DIVERGES, on="slurm", **TWO_STEPS)
    assert submitted == ["trials/learning_rate-1e+30"]


@pytest.mark.long
def test_a_trial_that_fails_is_named_and_tried_again(tuned, submitted, tmp_path, monkeypatch):
    inner = RunTrainer.training_step

    def training_step(self, *given):
        if self.settings.batch_size == 8 and self.state.global_step == 1:
            raise ValueError("a broken wire")
        return inner(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(RunTrainer, "training_step", training_step)
        with pytest.raises(ValueError, match=r"^trials/batch_size-8_.* failed, a broken wire, log: .*\.log\. The same"):
            tuned(tmp_path / "run", grid=GRID, on="slurm", **TWO_STEPS)
    assert not (tmp_path / "run" / "trials.tsv").exists()
    assert any(" step 1 of 2" in line for line in status_lines(tmp_path / "run"))
    submitted.clear()
    run = tuned(tmp_path / "run", grid=GRID, on="slurm", **TWO_STEPS)
    assert submitted == ["trials/batch_size-8_learning_rate-0.001", "search"]
    assert len(table(run)) == 2


def test_a_search_without_any_finite_numbers_says_so(tuned, submitted, tmp_path):
    with pytest.raises(NotFinite, match=r"no trial in .* ended with finite numbers"):
        tuned(tmp_path / "run", grid=SearchGrid(learning_rate=(1e30,)), on="slurm", **TWO_STEPS)
    assert submitted == ["trials/learning_rate-1e+30"]


def test_a_job_that_finds_another_model_stops(tuned, submitted, tmp_path, monkeypatch):
    find = jobs.find_classifier
    monkeypatch.setattr(
        jobs, "find_classifier", lambda *given, **named: replace(find(*given, **named), fingerprint="x")
    )
    with pytest.raises(ValueError, match="holds a search of other values, settings or data"):
        tuned(tmp_path / "run", grid=GRID, on="slurm", **TWO_STEPS)
    assert not [*tmp_path.glob("run/trials/*/run.json")]


@pytest.mark.long
def test_another_search_and_one_with_jobs_in_the_queue_are_refused(tuned, submitted, cluster, tmp_path):
    grid = SearchGrid(batch_size=(8,))
    run = tuned(tmp_path / "run", grid=grid, on="slurm", **TWO_STEPS)
    submitted.clear()
    with pytest.raises(ValueError, match="of other values"):
        tuned(run, grid=GRID, on="slurm", **TWO_STEPS)
    with pytest.raises(ValueError, match="holds no search to resume"):
        tuned(tmp_path / "other", grid=GRID, on="slurm", resume=True, **TWO_STEPS)
    assert submitted == []
    (run / PRIVATE).mkdir()
    (cluster / "7.name").write_text(_prefix(run) + "trials/batch_size-8")
    (cluster / "7.state").write_text("PENDING")
    with pytest.raises(ValueError, match=r"in use by jobs of SLURM \(7\): add --on slurm, or scancel them"):
        tuned(run, grid=grid, resume=True, **TWO_STEPS)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"grid": SearchGrid()}, "on is 'slurm' but nothing is searched: add --search, or .* with sbatch"),
        ({"on": "cluster"}, "on .*cluster"),
        ({"on": "local", "jobs": 2}, "jobs is 2 but on is 'local', where trials run one at a time: add --on slurm"),
        ({"on": "local", "slurm": Slurm(time=5)}, "slurm.time is 5 but on is 'local'"),
        ({"jobs": 0}, "jobs is 0"),
        ({"threads": 0}, "threads is 0"),
        ({"slurm": Slurm(gpus=1)}, "device is 'cpu' but slurm.gpus is 1"),
        ({"slurm": Slurm(partition="none")}, "SLURM refuses a job with .*--partition=none"),
        ({"task": "sst3"}, "'sst3' is unknown"),
        ({"data": (Path("nowhere"),)}, "nowhere"),
        ({"grid": SearchGrid(batch_size=(64,))}, "48 training texts"),
    ],
)
def test_what_cannot_be_searched_raises_before_any_job(tuned, cluster, tmp_path, wrong, says):
    with pytest.raises(ValueError, match=says):
        tuned(tmp_path / "run", **{"grid": GRID, "on": "slurm", **wrong})
    assert not [*cluster.iterdir()]
    assert not (tmp_path / "run").exists()


def test_a_search_in_jobs_is_started_without_torchrun(tuned, cluster, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="2 processes share the run: start it without torchrun"):
        tuned(tmp_path / "run", grid=GRID, on="slurm")
