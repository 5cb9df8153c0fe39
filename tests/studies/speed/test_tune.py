import inspect
import math

import pytest
import torch

from nystrom.gpu import launch
from nystrom.measure.rows import read_rows
from nystrom.studies.speed import tune
from nystrom.studies.speed.tune import fastest, run_tune

SMALL = {"method": "nystrom-triton-4", "tokens": 40, "width": 4, "batch": 1, "heads": 1, "repeats": 1}
SMALL |= {"dtype": "float32", "device": "cuda" if torch.cuda.is_available() else "cpu"}
RANGES = {"block_n": (16, 32), "block_m": (16,), "warps": (4,), "stages": (1,)}


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(launch, "RANGES", RANGES)


@pytest.fixture
def used(monkeypatch):
    """Tokens of a block, as the kernels asked for them: forward, then twice forward and backward."""
    sizes, own = [], launch.tiles

    def tiles(*arguments):
        sizes.append(own(*arguments).block_n)
        return own(*arguments)

    monkeypatch.setattr("nystrom.gpu.inputs.tiles", tiles)
    return sizes


def test_every_combination_is_timed_in_both_passes_with_its_own_tiles(tmp_path, used):
    rows = run_tune(**SMALL, to=tmp_path)
    assert [(row.quantity, row.sizes) for row in rows] == [
        (f"{timed} time", f"b=1 h=1 d=4 kernel=0 block_n={n} block_m=16 warps=4 stages=1")
        for n in (16, 32)
        for timed in ("forward", "forward+backward")
    ]
    assert read_rows(tmp_path / "tune.csv") == rows
    assert all(row.value > 0 and (row.unit, row.note, row.m, row.n) == ("ms", "", 4, 40) for row in rows)
    # As often one as the other, and the backward pass too.
    assert used[: len(used) // 2] == [16] * (len(used) // 2)
    assert used[len(used) // 2 :] == [32] * (len(used) // 2)


def test_a_run_goes_on_where_it_was_interrupted(tmp_path, monkeypatch):
    own, timed = tune._timed, []

    def once(plain, *rest):
        timed.append(plain.sizes)
        if len(timed) == 3:
            raise KeyboardInterrupt
        return own(plain, *rest)

    monkeypatch.setattr(tune, "_timed", once)
    with pytest.raises(KeyboardInterrupt):
        run_tune(**SMALL, to=tmp_path)
    kept = read_rows(tmp_path / "tune.csv")
    assert {row.sizes.split()[4] for row in kept} == {"block_n=16"}
    rows = run_tune(**SMALL, to=tmp_path)
    assert rows[:2] == kept
    assert len(rows) == 4
    assert len(timed) == 5


def test_tiles_that_do_not_fit_are_noted_and_the_others_go_on(tmp_path, monkeypatch):
    own = tune.seconds

    def seconds(call, device):
        if launch.tiles(4, 4, 4, torch.float32).block_n == 16:
            raise RuntimeError("out of resource: shared memory\nmore")
        return own(call, device)

    monkeypatch.setattr(tune, "seconds", seconds)
    rows = run_tune(**SMALL, to=tmp_path)
    assert [row.note for row in rows] == ["out of resource: shared memory"] * 2 + ["", ""]
    assert [math.isnan(row.value) for row in rows] == [True, True, False, False]
    assert fastest(rows) == rows[2:]


def test_a_call_that_compiles_is_not_among_those_that_count(tmp_path, monkeypatch):
    times = iter([9.0, 1.0, 2.0, 4.0] * 4)
    monkeypatch.setattr(tune, "seconds", lambda call, device: next(times))
    rows = run_tune(**SMALL | {"repeats": 3}, to=tmp_path)
    assert [(row.value, row.repeats) for row in rows] == [(2000.0, 3)] * 4


def test_the_fastest_of_each_pass_is_named(tmp_path):
    rows = run_tune(**SMALL, to=tmp_path)
    best = fastest(rows)
    assert [row.quantity for row in best] == ["forward time", "forward+backward time"]
    assert [row.value for row in best] == [min(rows[i].value, rows[i + 2].value) for i in (0, 1)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "nystrom-64"}, "method is 'nystrom-64' .* expected nystrom-triton-64"),
        ({"method": "skyformer-triton-64", "kernel_size": 3}, "method is 'skyformer-triton-64' with kernel_size=3"),
        ({"method": "nystrom-triton"}, "lacks its number of landmarks"),
        ({"device": "cuda:99"}, "device is 'cuda:99', but torch finds"),
        ({"tokens": 0}, "tokens is 0"),
        ({"kernel_size": -1}, "kernel_size is -1"),
    ],
)
def test_what_cannot_be_tried_is_refused(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        run_tune(**SMALL | change, to=tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_another_setting_in_the_same_folder_is_refused(tmp_path):
    run_tune(**SMALL, to=tmp_path)
    for change in ({"tokens": 41}, {"seed": 1}):
        with pytest.raises(ValueError, match=r"tune\.csv holds rows of another setting"):
            run_tune(**SMALL | change, to=tmp_path)


def test_a_word_that_is_no_dtype_is_refused(tmp_path):
    with pytest.raises(ValueError, match="dtype is 'float8'; expected one of"):
        inspect.unwrap(run_tune)(**SMALL | {"dtype": "float8"}, to=tmp_path)
