import json
import signal
import subprocess
import sys
import time

import pytest

from nystrom_lab.measure.rows import Row, append_rows, read_rows
from nystrom_lab.training.run_folder import RunFolder
from nystrom_papers.studies.training import runs
from nystrom_papers.studies.training.runs import CHILD, Training, train

ROWS = [(f"{'good' if i % 2 else 'bad'} {'the ' * (i % 12)}", i % 2) for i in range(24)]


@pytest.fixture
def training(tiny_bert, tmp_path):
    """Eight steps of fine-tuning on 24 texts."""
    folder = tmp_path / "sst2"
    folder.mkdir()
    for name, noun in {"train": "film", "dev": "book"}.items():
        lines = "".join(f"{text}{noun}\t{label}\n" for text, label in ROWS)
        (folder / f"{name}.tsv").write_text(f"sentence\tlabel\n{lines}")
    arguments = {
        "task": "sst2", "model": str(tiny_bert), "data": [str(folder)], "attention": "nystrom",
        "options": {"num_landmarks": 4}, "steps": 8, "batch_size": 8, "evaluate_every": 1, "seed": 1,
    }  # fmt: skip
    return Training("a-run", "finetune", arguments)


@pytest.mark.slow
def test_a_training_that_was_killed_goes_on_and_one_that_is_finished_is_not_begun_again(training, tmp_path):
    run = RunFolder(tmp_path / "runs" / training.name)
    words = json.dumps([training.engine, {**training.arguments, "to": str(run.path)}])
    with subprocess.Popen([*CHILD, words], stdin=subprocess.PIPE) as process:
        while process.poll() is None and not (run.is_started and run.last_step()):
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    assert not run.is_finished
    assert train(training, tmp_path / "runs").path == run.path
    assert {row.quantity: row.value for row in read_rows(run.rows)}["steps"] == 8
    written = run.rows.stat().st_mtime_ns
    train(training, tmp_path / "runs")
    assert run.rows.stat().st_mtime_ns == written


@pytest.mark.slow
def test_a_training_that_fails_ends_the_study_with_its_name(training, tmp_path):
    impossible = training._replace(arguments={**training.arguments, "batch_size": 0})
    with pytest.raises(ChildProcessError, match="a-run ended with exit code 2"):
        train(impossible, tmp_path / "runs")


def row_of(command):
    known = {"study": "", "quantity": "steps", "unit": "", "device": "a CPU"}
    return Row(method="nystrom-4", value=8, command=command, **known)


@pytest.mark.parametrize(("name", "value"), [("seed", 2), ("options", {"num_landmarks": 8}), ("steps", 9)])
def test_a_run_with_other_settings_is_left_alone(training, tmp_path, name, value):
    folder = tmp_path / "runs" / training.name
    folder.mkdir(parents=True)
    settings = {"seed": 1, "steps": 8, "options": {"num_landmarks": 4, "iterations": 6}}
    (folder / "run.json").write_text(json.dumps({"settings": settings, "data": {"folder": "data", "fingerprint": "a"}}))
    append_rows(folder / "rows.csv", [row_of("nystrom finetune")])
    assert train(training, tmp_path / "runs").is_finished
    other = training._replace(arguments={**training.arguments, name: value})
    with pytest.raises(ValueError, match=f"holds a run with {name} = "):
        train(other, tmp_path / "runs")


def test_a_finished_run_of_other_epochs_and_a_search_of_another_method_are_left_alone(training, tmp_path, monkeypatch):
    folder = tmp_path / "runs" / training.name
    folder.mkdir(parents=True)
    append_rows(folder / "rows.csv", [row_of("nystrom finetune sst2 --epochs 2 --to runs")])
    of = {"settings": {"seed": 1}, "data": {"folder": "data", "fingerprint": "a"}}
    (folder / "run.json").write_text(json.dumps(of))
    assert train(training._replace(arguments={"epochs": 2, "seed": 1}), tmp_path / "runs").is_finished
    with pytest.raises(ValueError, match=r"epochs = 2\.0, but the study needs 4"):
        train(training._replace(arguments={"epochs": 4, "seed": 1}), tmp_path / "runs")
    (folder / "run.json").unlink()
    trials = [{"attention": "nystrom", "batch_size": size} for size in (8, 16)]
    (folder / "search.json").write_text(json.dumps({"data": "", "trials": trials}))
    searched = training._replace(arguments={"attention": "nystrom", "search": True})
    assert train(searched, tmp_path / "runs").is_finished
    with pytest.raises(ValueError, match="attention = 'nystrom'"):
        train(training._replace(arguments={"attention": "softmax", "search": True}), tmp_path / "runs")
    # One that was cut goes on.
    (folder / "rows.csv").unlink()
    resumed = "import json, sys; sys.exit(0 if json.loads(sys.argv[1])[1]['resume'] else 3)"
    monkeypatch.setattr(runs, "CHILD", (sys.executable, "-c", resumed))
    train(searched, tmp_path / "runs")
