"""Every method over ranks, against one process: each check of the files beside this one is a test."""

import functools
import json
import sys
from collections import defaultdict
from importlib import import_module
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from torch.testing import assert_close

from nystrom import build_attention, nystrom_attention
from nystrom.attention import group_runner
from nystrom.landmarks import group_sums
from nystrom.parallel.positions_over_ranks import _equal_segments

HERE = Path(__file__).parent
# Ranks, and the mark of each check of a file.
FILES = {
    ("check_faults", 2): (),
    ("check_methods", 2): pytest.mark.long,
    ("check_models", 2): pytest.mark.long,
    ("check_transformers", 2): pytest.mark.long,
    ("check_methods", 4): pytest.mark.slow,
    ("check_sharding", 4): pytest.mark.slow,
}


def names_of(checks: str) -> list[str]:
    # A file of checks may use another beside it.
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(HERE)
        module = import_module(checks)
        sys.modules.pop(checks)
    return [name for name, _ in module.checks()]


CHECKS = [
    pytest.param(checks, size, name, id=f"{size} ranks {name}", marks=[*mark] if mark == () else mark)
    for (checks, size), mark in FILES.items()
    for name in names_of(checks)
]


@pytest.fixture(scope="session")
def errors_of(request, run_on_ranks, tmp_path_factory, worker_id):
    """The errors of each check of a file: all that are selected run in one group, for all workers."""
    chosen = defaultdict(list)
    for item in request.session.items:
        given = getattr(getattr(item, "callspec", None), "params", {})
        if {"checks", "size", "check"} <= given.keys():
            chosen[given["checks"], given["size"]].append(given["check"])

    @functools.cache
    def errors(checks: str, size: int) -> dict[str, list[str]]:
        folder = tmp_path_factory.getbasetemp()
        kept = (folder if worker_id == "master" else folder.parent) / f"{checks}-{size}.json"
        with FileLock(f"{kept}.lock"):
            if not kept.is_file():
                kept.write_text(json.dumps(run_on_ranks(HERE / f"{checks}.py", size, chosen[checks, size])))
        return json.loads(kept.read_text())

    return errors


@pytest.mark.timeout(500)
@pytest.mark.parametrize(("checks", "size", "check"), CHECKS)
def test_ranks_do_what_one_process_does(errors_of, checks, size, check):
    errors = errors_of(checks, size)
    assert check in errors, "it did not run: an earlier check of its file ended the group"
    assert not errors[check], "\n".join(errors[check])


@pytest.mark.parametrize(("start", "n"), [(0, 12), (0, 1), (1, 11), (5, 2), (4, 4), (3, 1), (3, 6), (8, 4), (11, 1)])
def test_equal_segments_are_summed_as_by_their_numbers(start, n):
    x = torch.randn(2, 3, n, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    segment = (start + torch.arange(n)).div(4, rounding_mode="floor").expand(2, n)
    assert_close(_equal_segments(x, start, 4, 3), group_sums(x, segment, 3))


def test_a_group_without_the_package_that_runs_it_raises_by_name(monkeypatch):
    monkeypatch.setattr(group_runner, "_passed", [])
    q = torch.randn(1, 2, 9, 4)
    with pytest.raises(ValueError, match=r"group is given, and attention over ranks is in nystrom\.parallel: import"):
        nystrom_attention(q, q, q, num_landmarks=3, group="tokens")
    heads = build_attention("softmax", num_heads=2, head_dim=4)
    heads.group = "tokens"
    with pytest.raises(ValueError, match=r"import nystrom\.parallel"):
        heads(q, q, q, skip=torch.ones(2, 1, 3, 1))


def test_a_group_without_a_process_group_raises_by_name():
    q = torch.randn(1, 2, 9, 4)
    with pytest.raises(ValueError, match=r"group is given, but torch\.distributed has no process group: call"):
        nystrom_attention(q, q, q, num_landmarks=3, group="tokens")
