import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from nystrom_lab.measure.rows import read_rows
from tools.kernel_accounting.counting import count_kernels

SMALL = ["--landmarks", "16", "--width", "16", "--batch", "1", "--heads", "2", "--tokens", "1024"]
ROOT = Path(__file__).resolve().parents[3]


def count(folder, *words):
    """The command, in a process where kernels are compiled."""
    return subprocess.run(
        [sys.executable, "-m", "tools.kernel_accounting", "count", *SMALL, *words, "--to", str(folder)],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kernels")
    done = count(folder)
    assert done.returncode == 0, done.stderr
    assert "left_forward" in done.stdout
    assert "not run" in done.stdout
    return folder


@pytest.fixture
def rows(folder):
    return read_rows(folder / "kernels.csv")


def values(rows, method="nystrom-triton-16+skip"):
    return {row.quantity: row.value for row in rows if row.method == method}


@pytest.mark.long
def test_rows_say_what_was_compiled_for_and_that_nothing_ran(rows):
    for row in rows:
        assert (row.study, row.n, row.m, row.dtype, row.seed, row.note) == ("kernels", 1024, 16, "bfloat16", None, "")
        assert row.device == "compiled for compute capability 9.0 with 132 multiprocessors, not run"
        assert row.words.startswith("b=1 h=2 d=16 kernel=33 masks=without layout=tokens shared_memory_at_most=232448 ")
        assert (
            row.command
            == "python -m tools.kernel_accounting count --landmarks 16 --width 16 --batch 1 --heads 2 --tokens 1024"
        )


def test_a_pass_is_the_sum_of_its_kernels_and_of_the_operators_between(rows):
    found = values(rows)
    for timed in ("forward", "backward"):
        for what in ("launches", "bytes"):
            parts = [x for name, x in found.items() if name.startswith(timed) and name.endswith(what)]
            assert found[f"{timed} all {what}"] == sum(parts) / 2 > 0
    # Means, right, all that is between the passes, and left.
    assert found["forward all launches"] == 4
    assert found["backward all launches"] == 10
    assert not [name for name in found if "torch" in name]
    assert found["forward means registers"] > 0


def test_extra_memory_is_beyond_inputs_output_and_gradients(rows):
    found, tokens = values(rows), 1024 * 2 * 16 * 2
    # At least two tables of 2 x 16 landmarks, in float32; nothing of the size of the tokens.
    assert 2 * 2 * 16 * 16 * 4 <= found["forward all memory"] <= tokens
    assert found["forward all memory"] <= found["backward all memory"] <= 2 * tokens


def test_the_floor_is_six_passes_forward_and_eleven_backward(rows):
    one = 1024 * 2 * 16 * 2
    assert values(rows, "floor") == {"forward all bytes": 6 * one, "backward all bytes": 11 * one}
    found = values(rows)
    # With a skip there is one more pass over the values; backward one over the gradient, and both once for the taps.
    assert found["forward left_forward passes"] == 3
    assert sum(x for name, x in found.items() if name.endswith(" passes")) == (6 + 1) + (11 + 1 + 2)


def test_the_torch_path_is_counted_too_and_has_more_launches(rows):
    others = values(rows, "nystrom-16+skip")
    assert set(others) == {"forward all launches", "backward all launches"}
    assert others["forward all launches"] > values(rows)["forward all launches"]


@pytest.mark.slow
def test_the_same_command_writes_anew_and_another_raises(folder):
    before = read_rows(folder / "kernels.csv")
    assert count(folder).returncode == 0
    after = read_rows(folder / "kernels.csv")
    assert [(row.quantity, row.value) for row in after] == [(row.quantity, row.value) for row in before]
    done = count(folder, "--masks", "with")
    assert done.returncode == 2
    assert "kernels.csv holds rows of another command" in done.stderr
    assert read_rows(folder / "kernels.csv") == after


@pytest.mark.slow
def test_drawn_landmarks_have_a_lower_floor(tmp_path):
    done = count(tmp_path, "--method", "skyformer")
    assert done.returncode == 0, done.stderr
    rows, one = read_rows(tmp_path / "kernels.csv"), 1024 * 2 * 16 * 2
    assert values(rows, "floor") == {"forward all bytes": 4 * one, "backward all bytes": 7 * one}
    assert {row.method for row in rows} == {"skyformer-triton-16", "skyformer-16", "floor"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"landmarks": 0}, "landmarks is 0|landmarks must be at least 1"),
        ({"multiprocessors": 0}, "multiprocessors"),
        ({}, "TRITON_INTERPRET is set"),
    ],
)
def test_what_cannot_be_compiled_raises_and_leaves_no_rows(tmp_path, change, message):
    if not change and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("kernels are compiled here")
    with pytest.raises(ValueError, match=message):
        count_kernels(**change, to=tmp_path)
    assert not (tmp_path / "kernels.csv").exists()
