"""How a grid handles the end of a process, and how the process ends."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from nystrom_lab.training.grid.child import OUT_OF_MEMORY, exit_code
from nystrom_lab.training.grid.processes import LocalJob, Processes
from nystrom_lab.training.grid.scheduler import Work
from nystrom_lab.training.hardware import visible_gpus

# Writes its GPUs to a file, and exits with the next code that it is given.
CHILD = """
import json, os, sys
codes = json.loads(sys.argv[-1])[0]
with open("seen", "a") as file:
    file.write(f"{sys.argv[-1]} {os.environ.get('CUDA_VISIBLE_DEVICES')}\\n")
print("word")
raise SystemExit(codes[open("seen").read().count(sys.argv[-1]) - 1])
"""


def run(name, *codes):
    """A run that never has a result."""
    return Work(name, print, [codes, name], str)


@pytest.fixture
def grid(tmp_path, monkeypatch):
    """Makes a grid whose processes exit with the codes in the arguments of their run, one after the other."""
    monkeypatch.chdir(tmp_path)
    return lambda **given: Processes(tmp_path, command=[sys.executable, "-c", CHILD], **given)


def test_a_run_without_memory_is_tried_again_once_when_it_is_alone(grid, tmp_path, capsys):
    failures = grid(jobs=1).run([run("large", OUT_OF_MEMORY, OUT_OF_MEMORY), run("other", 1)])
    assert [(failure.name, failure.reason) for failure in failures] == [
        ("other", "exit code 1: word"),
        ("large", "no memory was left: word"),
    ]
    assert "large: no memory was left; goes on later, alone" in capsys.readouterr().out
    assert len((tmp_path / "seen").read_text().splitlines()) == 3


def test_an_interruption_says_that_the_same_command_continues_and_ends_the_processes(tmp_path, monkeypatch, capsys):
    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("nystrom_lab.training.grid.scheduler.time", SimpleNamespace(sleep=interrupt))
    grid = Processes(tmp_path, jobs=1, command=[sys.executable, "-c", "import sys; sys.stdin.read()"])
    with pytest.raises(KeyboardInterrupt):
        grid.run([run("one"), run("two")])
    assert "\nStopped with 0 of 2 runs finished; the same command continues.\n" in capsys.readouterr().out
    assert [job.process.poll() is not None for job in grid.running.values()] == [True]


def test_a_run_waits_while_the_others_leave_too_little_memory(tmp_path):
    grid = Processes(tmp_path, jobs=2)
    grid.peak = 500.0
    # Alone it may always start.
    assert grid._is_room(400_000_000)
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        grid.running["one"] = LocalJob(process, None)
        assert not grid._is_room(400_000_000)
        assert grid._is_room(600_000_000)


@pytest.mark.parametrize(
    ("error", "code"),
    [(MemoryError(), OUT_OF_MEMORY), (torch.OutOfMemoryError("full"), OUT_OF_MEMORY), (ValueError("no"), 2)],
)
def test_a_process_says_by_its_code_why_it_ended(error, code):
    def fail():
        raise error

    assert exit_code(fail) == code
    assert exit_code(lambda: None) == 0


def test_each_run_has_a_gpu_of_its_own_where_there_are_several(grid, tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def given(gpus):
        (tmp_path / "seen").unlink(missing_ok=True)
        grid(jobs=3, gpus=gpus).run([run(name, 1) for name in ("a", "b", "c")])
        return sorted(line.rpartition(" ")[2] for line in (tmp_path / "seen").read_text().splitlines())

    assert given(["0", "3"]) == ["0", "0", "3"]
    # A single GPU is shared by all.
    assert given(["0"]) == ["None"] * 3


@pytest.mark.parametrize(
    ("words", "gpus"), [(None, ["0", "1"]), ("2,5", ["2", "5"]), ("GPU-a,GPU-b", ["GPU-a", "GPU-b"])]
)
def test_a_grid_keeps_to_the_gpus_that_it_was_given(words, gpus, monkeypatch):
    if words is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", words)
    assert visible_gpus(2) == gpus
