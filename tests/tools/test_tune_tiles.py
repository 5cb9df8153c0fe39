"""Tiles are timed one combination after the other, and affect only the order of sums."""

import math

import pytest
import torch

pytest.importorskip("triton")

from nystrom.gpu.launch import Tiles, tiles
from nystrom_lab.measure.rows import read_rows
from tools.tune_tiles import (
    COMBINATIONS,
    Timing,
    fastest_lines,
    kernel_names,
    main,
    print_fastest,
    time_combinations,
    tune_tiles,
)

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


def test_the_fastest_combination_of_each_kernel_is_another_than_that_of_all():
    times = [{"means": 3.0, "combine": 1.0}, {"means": 2.0, "combine": 4.0}]
    timings = time_combinations(TWO, int, int, clock=lambda call: 1e3 * used(), profiled=lambda call: times.pop(0))
    assert [str(timing).partition(":")[0] for timing in timings] == [
        "block_n=16 block_m=16 warps=4 stages=1",
        "block_n=32 block_m=16 warps=4 stages=1",
    ]
    assert fastest_lines(timings, best=1) == [
        f"fastest forward: {timings[0]}",
        f"fastest forward+backward: {timings[0]}",
        "means: 2.0 us with (32, 16, 4, 1), slowest 3.0",
        "combine: 1.0 us with (16, 16, 4, 1), slowest 4.0",
    ]


def test_the_kernels_of_this_library_are_known_by_name():
    assert {"means", "left_forward", "near_far_keys", "inverse_whole"} <= kernel_names()


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
    assert all(timing.kernels["means"] > 0 for timing in timings if not timing.reason)
    assert len(timings) == len(COMBINATIONS)
    assert all(0 < timing.forward < timing.both for timing in timings if not timing.reason)
    assert not all(timing.reason for timing in timings)


@pytest.mark.gpu
def test_each_kernel_has_a_row_for_each_combination(tmp_path, capsys):
    print_fastest(to=tmp_path, tokens=2048, batch=1, heads=2)
    assert "left_forward: " in capsys.readouterr().out
    assert len({(row.method, row.words) for row in read_rows(tmp_path / "tiles.csv")}) > len(COMBINATIONS)
