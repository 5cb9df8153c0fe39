"""Tiles are timed one combination after the other, and affect only the order of sums."""

import math

import pytest
import torch

pytest.importorskip("triton")

from nystrom.gpu.launch import Tiles, tiles
from tools.tune_tiles import COMBINATIONS, Timing, main, time_combinations, tune_tiles

TWO = [Tiles(16, 16, 16, 16, 4, 1), Tiles(32, 16, 16, 16, 4, 1)]


def used() -> int:
    """Tokens of a block, as the kernels request them."""
    return tiles(4, 4, 4, torch.float32, torch.device("cpu")).block_n


def test_both_passes_of_a_combination_run_with_its_tiles():
    own, seen = used(), []
    timings = time_combinations(
        TWO,
        lambda: seen.append(("forward", used())),
        lambda: seen.append(("both", used())),
        clock=lambda call: call() or 1e3 * used(),
    )
    assert seen == [("forward", 16), ("both", 16), ("forward", 32), ("both", 32)]
    assert timings == [Timing(TWO[0], 16e3, 16e3), Timing(TWO[1], 32e3, 32e3)]
    assert used() == own


def test_tiles_that_do_not_fit_are_noted_and_the_others_are_timed():
    def forward():
        if used() == 16:
            raise RuntimeError("out of resource: shared memory\nmore")

    first, second = time_combinations(TWO, forward, forward, clock=lambda call: call() or 1.0)
    assert math.isinf(first.forward)
    assert first.reason == "out of resource: shared memory"
    assert second == Timing(TWO[1], 1.0, 1.0)


def test_combinations_differ():
    assert len(set(COMBINATIONS)) == len(COMBINATIONS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kernel_size": 4}, "kernel_size is 4"),
        ({"method": "skyformer", "kernel_size": 3}, "kernel_size is 3"),
        ({"method": "near_far", "width": 129}, "q has head width 129; expected at most 128"),
        ({"landmarks": 300}, "num_landmarks is 300"),
    ],
)
def test_what_cannot_be_tried_raises(change, message):
    small = {"tokens": 601, "width": 4, "batch": 1, "heads": 1, "dtype": "float32"}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with pytest.raises(ValueError, match=message):
        tune_tiles(**small | {"device": device} | change)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_command_ends_in_one_line(monkeypatch):
    monkeypatch.setattr("sys.argv", ["tune_tiles.py"])
    with pytest.raises(SystemExit, match=r"^tune_tiles.py: device is 'cuda', but torch finds none here: .*GPU\.$"):
        main()


@pytest.mark.gpu
def test_every_combination_is_timed_on_a_gpu():
    timings = tune_tiles(tokens=2048, batch=1, heads=2, kernel_size=3)
    assert len(timings) == len(COMBINATIONS)
    assert all(0 < timing.forward < timing.both for timing in timings if not timing.reason)
    assert not all(timing.reason for timing in timings)
