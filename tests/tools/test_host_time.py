"""Host times are printed for each method and pass, on a machine without a GPU."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]
METHODS, PASSES = (
    ("nystrom", "nystrom-skip", "skyformer", "near_far"),
    ("forward", "forward-with-gradients", "training"),
)


def run(*words):
    # Another process: the one of the tests interprets kernels.
    command = [sys.executable, str(ROOT / "tools/host_time.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


@pytest.mark.long
def test_a_line_for_each_method_and_pass():
    done = run("--repeats", "1")
    assert done.returncode == 0, done.stderr
    lines = [re.fullmatch(r"(\S+) (\S+) [1-9]\d* us", line) for line in done.stdout.splitlines()]
    assert [line and line.groups() for line in lines] == [(name, way) for name in METHODS for way in PASSES]


@pytest.mark.long
def test_fewer_repeats_than_one_raise():
    done = run("--repeats", "0")
    assert done.returncode == 1
    assert done.stderr == "--repeats is 0; expected at least 1.\n"
