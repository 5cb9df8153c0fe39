"""A small data set, and runs of a few steps on it."""

import csv
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

from nystrom.train.engine import train
from nystrom.train.run.trainer import EncoderTrainer


@pytest.fixture(scope="session")
def small_run(data) -> Callable[..., Path]:
    """A run of twelve steps of eight samples, a checkpoint every three."""

    def run(to: Path, task: str = "listops", **changes) -> Path:
        settings = {"attention": "nystrom", "options": {"num_landmarks": 8}, "preset": "demo", "data": data, "to": to}
        settings |= {
            "steps": 12,
            "warmup_steps": 2,
            "batch_size": 8,
            "evaluate_every": 3,
            "log_every": 1,
            "device": "cpu",
        }
        return train(task, **(settings | changes))

    return run


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
def interrupt_at() -> Callable[[pytest.MonkeyPatch, int], None]:
    """Interrupt a run in a step, as Ctrl-C does."""
    inner = EncoderTrainer.training_step

    def interrupt(patch: pytest.MonkeyPatch, step: int) -> None:
        def training_step(self, *given):
            if self.state.global_step + 1 == step:
                raise KeyboardInterrupt
            return inner(self, *given)

        patch.setattr(EncoderTrainer, "training_step", training_step)

    return interrupt
