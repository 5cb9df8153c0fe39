"""What a grid does with a process that ended, and what the process does with its end."""

import json
import subprocess
import sys

import pytest
import torch

from nystrom.train.grid import child, processes
from nystrom.train.grid.child import OUT_OF_MEMORY, train_words
from nystrom.train.grid.processes import Grid, Run


@pytest.fixture
def ends_with(monkeypatch):
    """Processes that end with these codes, one after the other."""
    start = subprocess.Popen

    def ends(*codes):
        left = list(codes)
        monkeypatch.setattr(
            subprocess,
            "Popen",
            lambda _, **named: start(
                [sys.executable, "-c", f"print('word'); raise SystemExit({left.pop(0)})"], **named
            ),
        )
        return left

    return ends


def test_a_run_without_memory_is_tried_again_once_when_it_is_alone(ends_with, tmp_path, capsys):
    left = ends_with(OUT_OF_MEMORY, 1, OUT_OF_MEMORY)
    failures = Grid(tmp_path, jobs=1, on_cpu=True).train([Run("large", {}), Run("other", {})])
    assert left == []
    assert [(failure.name, failure.reason) for failure in failures] == [
        ("other", "exit code 1: word"),
        ("large", "no memory was left: word"),
    ]
    assert "large: no memory was left; goes on later, by itself" in capsys.readouterr().out


def test_a_run_waits_while_the_others_leave_too_little_memory(tmp_path, monkeypatch):
    grid = Grid(tmp_path, jobs=2, on_cpu=True)
    grid.peak = 500.0
    monkeypatch.setattr(processes, "free_bytes", lambda device: 400_000_000)
    # Alone it may always try.
    assert grid._is_room()
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        grid.running[process] = Run("one", {})
        assert not grid._is_room()
        monkeypatch.setattr(processes, "free_bytes", lambda device: 600_000_000)
        assert grid._is_room()


@pytest.mark.parametrize(
    ("error", "code"),
    [(MemoryError(), OUT_OF_MEMORY), (torch.OutOfMemoryError("full"), OUT_OF_MEMORY), (ValueError("no"), 2)],
)
def test_a_process_says_by_its_code_why_it_ended(error, code, tmp_path, monkeypatch):
    def train(*_, **__):
        raise error

    monkeypatch.setattr("nystrom.train.engine.train", train)
    monkeypatch.setattr(child, "_end_with_parent", lambda: None)
    monkeypatch.setattr(sys, "argv", ["child", json.dumps({"task": "text", "data": "d", "to": str(tmp_path / "run")})])
    assert child.main() == code


def test_the_words_of_a_run_are_those_of_nystrom_train():
    words = train_words({"task": "text", "attention": "nystrom", "seed": 0, "steps": None, "warmup_steps": 3})
    assert words == ["train", "text", "--attention", "nystrom", "--seed", "0", "--warmup-steps", "3"]
