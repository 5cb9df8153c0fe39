"""A small data set, and runs of a few steps on it."""

import csv
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file
from torch import Tensor
from torch.testing import assert_close

from nystrom_lab.measure.rows import read_rows
from nystrom_lab.training.run_settings import train_options
from nystrom_lab.training.run_trainer import RunTrainer
from nystrom_lab.training.train import train

_RANK = Path(__file__).with_name("rank.py")
_GRID = Path(__file__).with_name("grid")


@pytest.fixture(scope="session")
def small_run(data) -> Callable[..., Path]:
    """A run of twelve steps of eight samples, a checkpoint every three."""

    def run(to: Path, task: str = "listops", **changes) -> Path:
        settings = {"attention": "nystrom", "options": {"num_landmarks": 8}, "preset": "demo", "data": data, "to": to}
        settings |= {"steps": 12, "warmup_steps": 2, "batch_size": 8, "evaluate_every": 3, "log_every": 1}
        settings |= {"device": "cpu"}
        return train(train_options(task, **(settings | changes)))

    return run


@pytest.fixture(scope="session")
def demo_words() -> list[str]:
    """The words of a small run without dropout, except its data and its folder."""
    words = "--preset demo --options.num-landmarks 8 --steps 12 --warmup-steps 2 --batch-size 8 --evaluate-every 3"
    return f"{words} --log-every 1 --dropout 0 --device cpu --threads 1".split()


@pytest.fixture(scope="session")
def whole(tmp_path_factory, small_run) -> Path:
    """An uninterrupted run, with dropout; tests read it and change nothing."""
    return small_run(tmp_path_factory.mktemp("whole") / "run")


@pytest.fixture(scope="session")
def weights() -> Callable[..., dict[str, Tensor]]:
    """Read the weights of a run after a step."""

    def read(run: Path, step: int = 12) -> dict[str, Tensor]:
        return load_file(run / f"checkpoint-{step}" / "model.safetensors")

    return read


@pytest.fixture(scope="session")
def curves() -> Callable[[Path], list[tuple[int, str, float]]]:
    """Read the curves of a run."""

    def read(run: Path) -> list[tuple[int, str, float]]:
        with (run / "curves.csv").open(newline="") as file:
            return [(int(row["step"]), row["quantity"], float(row["value"])) for row in csv.DictReader(file)]

    return read


@pytest.fixture(scope="session")
def same_run(weights, curves) -> Callable[..., None]:
    """Compare a run with one whose sums are taken in another order."""

    def compare(run: Path, wanted: Path, step: int = 12) -> None:
        read = (weights(each, step) for each in (run, wanted))
        # No result depends on the bias of the keys, whose gradient is rounding alone, and Adam makes steps of it.
        found, expected = ({name: x for name, x in each.items() if not name.endswith("key.bias")} for each in read)
        # float32, over the steps of Adam.
        assert_close(found, expected, rtol=1e-3, atol=1e-4)
        for (step, quantity, value), (other_step, other, expected) in zip(curves(run), curves(wanted), strict=True):
            assert (step, quantity) == (other_step, other)
            assert value == pytest.approx(expected, rel=1e-3, abs=1e-6), (step, quantity)
        kept = [[row for row in read_rows(each / "rows.csv") if not row.unit] for each in (run, wanted)]
        found, expected = ([(row.quantity, row.repeats, row.value) for row in rows] for rows in kept)
        assert [row[:2] for row in found] == [row[:2] for row in expected]
        assert [row[2] for row in found] == pytest.approx([row[2] for row in expected], rel=1e-3)

    return compare


@pytest.fixture
def torchrun(tmp_path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run `nystrom` with some words in several processes."""

    def run(
        processes: int, *words: object, launcher: Sequence[str] = (), script: Path = _RANK
    ) -> subprocess.CompletedProcess[str]:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        command = [*launch, *launcher, str(script), *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True, timeout=800, cwd=tmp_path)

    return run


@pytest.fixture(scope="session")
def interrupted() -> Callable[..., None]:
    """Start a run, and interrupt it in a step, as Ctrl-C does."""
    inner = RunTrainer.training_step

    def interrupt(step: int, run: Callable[..., Path], *given, **changes) -> None:
        def training_step(self, *inputs):
            if self.state.global_step + 1 == step:
                raise KeyboardInterrupt
            return inner(self, *inputs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RunTrainer, "training_step", training_step)
            with pytest.raises(KeyboardInterrupt):
                run(*given, **changes)

    return interrupt


@pytest.fixture
def cluster(tmp_path, monkeypatch) -> Iterator[Path]:
    """The programs of SLURM come first on the path; the folder of their jobs' states."""
    programs, states = tmp_path / "bin", tmp_path / "states"
    programs.mkdir()
    states.mkdir()
    for name in ("sbatch", "squeue", "srun"):
        fake = _GRID / "fake_slurm.py"
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" "{fake}" {name} "$@"\n')
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_SLURM", str(states))
    # Jobs import the work of tests by its name.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(_GRID), os.environ.get("PYTHONPATH", "")]))
    yield states
    for state in states.glob("*.state"):
        for process in psutil.process_iter(["cmdline"]):
            if str(states.parent) in " ".join(process.info["cmdline"] or []) and state.read_text() == "RUNNING":
                process.kill()
