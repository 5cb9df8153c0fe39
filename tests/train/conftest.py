"""A small data set, and runs of a few steps on it."""

from pathlib import Path

import pytest

from nystrom.tasks.lra_listops import prepare_listops
from nystrom.train.engine import train


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    """48 + 20 + 30 samples of up to 40 tokens: more than the landmarks of `small_run`, and no multiple of a batch."""
    folder = tmp_path_factory.mktemp("data") / "listops"
    return prepare_listops(folder, train=48, val=20, test=30, min_length=5, max_length=41, progress=False)


@pytest.fixture
def small_run(data):
    """A run of twelve steps of eight samples, a checkpoint every three."""

    def run(to: Path, **changes) -> Path:
        settings = {"attention": "nystrom", "options": {"num_landmarks": 8}, "preset": "demo", "data": data, "to": to}
        settings |= {
            "steps": 12,
            "warmup_steps": 2,
            "batch_size": 8,
            "evaluate_every": 3,
            "log_every": 1,
            "device": "cpu",
        }
        return train("listops", **(settings | changes))

    return run
