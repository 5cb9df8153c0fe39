"""A small data set, and runs of a few steps on it."""

import csv
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file
from torch import Tensor

from nystrom.tasks.lra.listops.task import prepare_listops
from nystrom.tasks.lra.texts.retrieval import prepare_retrieval
from nystrom.train.engine import train
from nystrom.train.run.trainer import EncoderTrainer


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    """48 + 20 + 30 samples of up to 40 tokens: more than the landmarks of a small run, and no multiple of a batch."""
    folder = tmp_path_factory.mktemp("data") / "listops"
    return prepare_listops(folder, train=48, val=20, test=30, min_length=5, max_length=41, progress=False)


@pytest.fixture(scope="session")
def pairs(tmp_path_factory) -> Path:
    """48 + 20 + 30 pairs of texts of different lengths."""
    folder = tmp_path_factory.mktemp("pairs")
    rng = np.random.default_rng(0)
    for name, size in (("train", 48), ("val", 20), ("test", 30)):
        texts = [["ab"[i % 2] * int(n) for i, n in enumerate(rng.integers(3, 40, size=2))] for _ in range(size)]
        lines = [json.dumps({"text1": a, "text2": b, "label": i % 2}) for i, (a, b) in enumerate(texts)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return prepare_retrieval(folder, folder / "retrieval", progress=False)


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
    """An unbroken run, with dropout; tests look at it and change nothing."""
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
