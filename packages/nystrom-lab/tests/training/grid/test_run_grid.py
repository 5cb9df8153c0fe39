"""The grid trains the missing runs, loses nothing when it is killed, and leaves no process running."""

import inspect
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import psutil
import pytest
from filelock import FileLock
from safetensors.torch import load_file
from torch.testing import assert_close

from nystrom_lab.cli.main import main
from nystrom_lab.config import Arena, Slurm, TrainOptions
from nystrom_lab.data.lra.listops.task import prepare_listops
from nystrom_lab.measure.rows import read_rows
from nystrom_lab.training.grid.run_grid import GridOptions, run_grid, status_lines, training_arguments
from nystrom_lab.training.run_settings import Settings, train_options
from nystrom_lab.training.train import train
from nystrom_papers.report.lra.tables import lra_lines

SMALL = {"tasks": ["listops"], "methods": ["softmax"], "seeds": [0], "preset": "demo", "steps": 60, "threads": 1}
NAME = "listops-softmax-demo-seed0"


def options_of(**changes):
    """The options of a small grid by name, those of its presets in `changes`."""
    named = SMALL | ({} if "model" in changes else {"evaluate_every": 5}) | {"device": "cpu"} | changes
    of_preset = {name: named.pop(name) for name in {*named} & {entry.name for entry in fields(Arena)}}
    return {**named, "changes": of_preset}


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """A folder of data sets, with a small version of the demo's ListOps."""
    folder = tmp_path_factory.mktemp("data")
    sizes = {"train": 64, "val": 20, "test": 30, "min_length": 5, "max_length": 41}
    prepare_listops(folder / "listops-demo", **sizes)
    return folder


@pytest.fixture(scope="module")
def grid(root) -> Callable[..., list]:
    def run(to: Path, **changes) -> list:
        return run_grid(GridOptions(to=to, **options_of(**{"data": root} | changes)))

    return run


@pytest.fixture(scope="module")
def whole(tmp_path_factory, grid) -> Path:
    """An uninterrupted grid of two runs at a time, where there are two cores."""
    to = tmp_path_factory.mktemp("whole")
    assert grid(to, methods=["softmax", "linear"], jobs=min(2, len(os.sched_getaffinity(0)))) == []
    return to


def assert_same(to: Path, whole: Path) -> None:
    """The best model and all results are those of the uninterrupted run."""
    for name in ("best/model.safetensors", "checkpoint-60/model.safetensors"):
        assert_close(load_file(to / NAME / name), load_file(whole / NAME / name), rtol=0, atol=0)
    reached = [
        {row.quantity: row.value for row in read_rows(of / NAME / "rows.csv") if row.unit == ""} for of in (to, whole)
    ]
    assert reached[0] == reached[1]


def wait_for(path: Path, alive: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 600
    while not path.exists():
        assert alive()
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.long
def test_a_grid_leaves_rows_of_each_run_in_one_table(whole):
    rows = read_rows(whole / "lra.csv")
    assert {row.method for row in rows} == {"softmax", "linear"}
    for method in ("softmax", "linear"):
        of = {row.quantity: row for row in rows if row.method == method}
        assert of.keys() >= {"test accuracy", "validation accuracy", "steps", "training time", "peak memory"}
        test = of["test accuracy"]
        assert (test.study, test.seed, test.repeats, of["steps"].value) == ("train listops", 0, 30, 60)
        assert "preset=demo" in test.words
        assert test.torch
        assert 50 < of["peak memory"].value < 5000
        assert test.command.startswith(f"nystrom train listops --attention {method} --preset demo --seed 0 --steps 60")


def test_a_run_is_given_all_that_a_training_takes(tmp_path):
    options = {"accumulation": 2, "seed": 3, "steps": 60, "batch_size": 8, "compile": True}
    settings = Settings.resolve(train_options("listops", device="cpu", attention="softmax", preset="demo", **options))
    arguments = training_arguments(tmp_path / "one", settings, Path("data"), threads=1)
    # The child resumes a run if there is one; a grid takes prepared data, and its rows are accuracies of a test.
    left_out = {"resume", "text_field", "label_field", "pair_field", "mask_share", "context_parallel", "timeout"}
    assert arguments.keys() == inspect.signature(TrainOptions).parameters.keys() - left_out
    assert options.items() <= arguments.items()


@pytest.mark.slow
def test_a_grid_of_another_length_starts_from_an_encoder(grid, root, whole, tmp_path):
    sizes = {"train": 32, "val": 8, "test": 8, "min_length": 5, "max_length": 600}
    prepare_listops(tmp_path / "listops-600", **sizes)
    train(
        train_options(
            "listops", data=root / "listops-demo", preset="demo", position_kind="rotary", steps=2, to=tmp_path / "first"
        )
    )
    best = tmp_path / "first" / "best"
    options = {"methods": ["nystrom"], "preset": None, "model": best, "max_length": 600, "steps": 2, "batch_size": 4}
    assert grid(tmp_path / "runs", data=tmp_path, **options) == []
    [run] = (path.parent for path in (tmp_path / "runs").glob("*/rows.csv"))
    assert run.name == "listops-nystrom-demo-pretrained-600-seed0"
    settings = json.loads((run / "run.json").read_text())["settings"]
    assert (settings["positions"], settings["position_kind"], settings["model"]) == (600, "rotary", str(best))
    command = read_rows(run / "rows.csv")[0].command
    assert "--max-length 600" in command
    assert "--model best" in command
    # It continues as the same run.
    assert grid(tmp_path / "runs", data=tmp_path, **options) == []


def test_what_is_finished_is_skipped(whole, grid, capsys):
    before = (whole / "lra.csv").read_bytes()
    assert grid(whole, methods=["softmax", "linear"]) == []
    printed = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in printed] == [NAME, "listops-linear-demo-seed0"]
    assert all("finished before: test " in line for line in printed)
    assert (whole / "lra.csv").read_bytes() == before


def test_rows_that_lost_their_end_are_named(whole, grid, tmp_path):
    shutil.copytree(whole, tmp_path / "grid")
    rows = tmp_path / "grid" / NAME / "rows.csv"
    rows.write_text("".join(rows.read_text().splitlines(keepends=True)[:2]))
    with pytest.raises(ValueError, match=r"rows\.csv has no row of steps and training time: move it away"):
        status_lines(tmp_path / "grid")
    with pytest.raises(ValueError, match=r"rows\.csv has no row of steps"):
        grid(tmp_path / "grid")


@pytest.mark.long
def test_a_killed_grid_ends_its_runs_and_continues_to_the_same_result(whole, grid, root, tmp_path, capsys):
    code = f"""
from pathlib import Path
from nystrom_lab.training.grid.run_grid import GridOptions, run_grid
run_grid(GridOptions(to=Path({str(tmp_path)!r}), data=Path({str(root)!r}), **{options_of()!r}))
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL) as parent:
        try:
            wait_for(tmp_path / NAME / "checkpoint-5" / "complete.json", lambda: parent.poll() is None)
            children = psutil.Process(parent.pid).children(recursive=True)
            assert children
        finally:
            parent.send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs(children, timeout=300)
    assert not alive
    assert not (tmp_path / NAME / "rows.csv").exists()
    assert grid(tmp_path) == []
    assert "goes on after step" in capsys.readouterr().out
    assert_same(tmp_path, whole)


@pytest.mark.slow
def test_a_killed_run_is_taken_up_again_by_its_grid(whole, grid, tmp_path, capsys):
    def kill() -> None:
        wait_for(tmp_path / NAME / "checkpoint-5" / "complete.json", lambda: True)
        for child in psutil.Process().children():
            if "nystrom_lab.training.grid.child" in child.cmdline():
                child.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    assert grid(tmp_path) == []
    killer.join()
    printed = capsys.readouterr().out
    assert f"{NAME}: killed by signal 9; goes on later, alone" in printed
    assert "goes on after step" in printed
    assert_same(tmp_path, whole)


@pytest.mark.slow
def test_a_failed_run_is_named_with_its_log_and_the_others_finish(root, tmp_path, capsys):
    # The run does not touch a folder with other contents.
    (tmp_path / "listops-linear-demo-seed0").mkdir()
    (tmp_path / "listops-linear-demo-seed0" / "thesis.tex").touch()
    words = ["--tasks", "listops", "--methods", "linear", "softmax", "--seeds", "0", "--preset", "demo", "--steps", "2"]
    words += ["--jobs", str(min(2, len(os.sched_getaffinity(0)))), "--device", "cpu"]
    with pytest.raises(SystemExit) as stop:
        main(["lra", "run", *words, "--to", str(tmp_path), "--data", str(root)])
    assert stop.value.code == 1
    printed = capsys.readouterr()
    assert "listops-linear-demo-seed0 failed, exit code 2: nystrom:" in printed.err
    assert "is not empty and holds no run" in printed.err
    assert str(tmp_path / "listops-linear-demo-seed0.log") in printed.err
    assert {row.method for row in read_rows(tmp_path / "lra.csv")} == {"softmax"}


@pytest.mark.slow
def test_sizes_and_settings_of_a_grid_reach_its_runs(grid, tmp_path):
    options = {"methods": ["nystrom-4", "nystrom-8", "linformer-16"], "batch_size": 8, "learning_rate": 1e-2}
    assert grid(tmp_path, steps=2, accumulation=2, dropout=0.0, conv_kernel_size=0, **options) == []
    rows = [row for row in read_rows(tmp_path / "lra.csv") if row.quantity == "test accuracy"]
    assert {row.method for row in rows} == {"nystrom-4", "nystrom-8", "linformer-16"}
    for row in rows:
        assert row.words.endswith("preset=demo batch_size=8 learning_rate=0.01 dropout=0.0") or "conv" in row.words
        assert row.m == int(row.method.rpartition("-")[2])
    settings = json.loads((tmp_path / "listops-nystrom-4-demo-seed0" / "run.json").read_text())["settings"]
    assert (settings["batch_size"], settings["accumulation"], settings["options"]) == (8, 2, {"num_landmarks": 4})
    table = dict(lra_lines(rows))
    assert sum("nystrom-4, demo" in name or "nystrom-8, demo" in name for name in table) == 2
    # The command of a row makes the same run from any folder.
    words = shlex.split(rows[0].command)
    assert words[:2] == ["nystrom", "train"]
    assert {"--options.num-landmarks", "--conv-kernel-size", "--accumulation"} <= {
        word for row in rows if row.method == "nystrom-4" for word in shlex.split(row.command)
    }


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"tasks": ["listop"]}, "task 'listop' is unknown"),
        ({"methods": ["softmax", "nystorm"]}, "method 'nystorm' is unknown"),
        ({"seeds": [0, 0]}, "seeds is 0 0"),
        ({"methods": []}, "methods is empty"),
        ({"jobs": 0}, "jobs is 0"),
        ({"on": "cluster"}, "on .*cluster"),
        ({"slurm": Slurm(partition="gpu")}, "slurm.partition is .gpu. but on is .local.: add --on slurm"),
        ({"jobs": 10_000}, "jobs is 10000 but there are"),
        ({"threads": 0}, "threads is 0"),
        ({"steps": 0}, "steps is 0"),
        ({"steps": 7}, f"{NAME} holds a run with other settings: .*steps is 7 but was 60"),
        ({"model": Path("none")}, "model is none, which is not a folder"),
        ({"tasks": ["listops", "image"], "max_length": 600}, "max_length is 600, but image has images"),
        ({"tasks": ["listops", "text"]}, "prepare text --from FILES --to .*text-demo"),
    ],
)
def test_what_cannot_be_run_raises_before_any_training(whole, grid, capsys, wrong, says):
    with pytest.raises(ValueError, match=says):
        grid(whole, **wrong)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("last", ["lisops", "text"])
def test_nothing_is_drawn_for_a_grid_that_cannot_run(grid, tmp_path, last):
    with pytest.raises(ValueError, match=r"'lisops' is unknown|prepare text --from FILES"):
        grid(tmp_path / "runs", tasks=["listops", last], data=tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_two_grids_do_not_share_a_folder(whole, grid):
    with FileLock(whole / ".lock"), pytest.raises(ValueError, match="is in use by another `nystrom lra run`"):
        grid(whole)


def test_a_grid_under_torchrun_raises(whole, grid, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="start it without torchrun"):
        grid(whole)
