"""What a grid does with a process that ended, and what the process does with its end."""

import json
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest
import torch

from nystrom.train.grid import child
from nystrom.train.grid.child import OUT_OF_MEMORY
from nystrom.train.grid.processes import Grid, Run
from nystrom.train.hardware import visible_gpus


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
    failures = Grid(tmp_path, jobs=1).train([Run("large", {}), Run("other", {})])
    assert left == []
    assert [(failure.name, failure.reason) for failure in failures] == [
        ("other", "exit code 1: word"),
        ("large", "no memory was left: word"),
    ]
    assert "large: no memory was left; goes on later, alone" in capsys.readouterr().out


def test_a_run_waits_while_the_others_leave_too_little_memory(tmp_path, monkeypatch):
    grid = Grid(tmp_path, jobs=2)
    grid.peak = 500.0
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=400_000_000))
    # Alone it may always try.
    assert grid._is_room()
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        grid.running[process] = Run("one", {})
        assert not grid._is_room()
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=600_000_000))
        assert grid._is_room()


@pytest.mark.parametrize(
    ("error", "code"),
    [(MemoryError(), OUT_OF_MEMORY), (torch.OutOfMemoryError("full"), OUT_OF_MEMORY), (ValueError("no"), 2)],
)
def test_a_process_says_by_its_code_why_it_ended(error, code, tmp_path, monkeypatch):
    def train(*_, **__):
        raise error

    monkeypatch.setattr("nystrom.train.engine.train", train)
    monkeypatch.setattr(child, "end_with_parent", lambda: None)
    monkeypatch.setattr(sys, "argv", ["child", json.dumps({"task": "text", "data": "d", "to": str(tmp_path / "run")})])
    assert child.main() == code


@pytest.fixture
def devices(monkeypatch):
    """The device that each started process was given, in their order; the processes end at once."""
    start, given = subprocess.Popen, []

    def popen(_, env, **named):
        given.append(env.get("CUDA_VISIBLE_DEVICES"))
        return start([sys.executable, "-c", "raise SystemExit(1)"], env=env, **named)

    monkeypatch.setattr(subprocess, "Popen", popen)
    return given


def test_each_run_has_a_gpu_of_its_own_where_there_are_several(devices, tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    runs = [Run(name, {}) for name in ("a", "b", "c")]
    Grid(tmp_path, jobs=3, gpus=["0", "3"]).train(runs)
    assert sorted(devices[:2]) == ["0", "3"]
    assert devices[2] in ("0", "3")
    devices.clear()
    # A single one is everybody's.
    Grid(tmp_path, jobs=3, gpus=["0"]).train(runs)
    assert devices == [None] * 3


@pytest.mark.parametrize(
    ("words", "gpus"), [(None, ["0", "1"]), ("2,5", ["2", "5"]), ("GPU-a,GPU-b", ["GPU-a", "GPU-b"])]
)
def test_a_grid_keeps_to_the_gpus_that_it_was_given(words, gpus, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    if words is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", words)
    assert visible_gpus() == gpus
