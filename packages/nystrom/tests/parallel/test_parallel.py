"""Every method over ranks, against one process: see the files of checks, which the ranks run."""

from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from nystrom import build_attention, nystrom_attention
from nystrom.attention import group_runner
from nystrom.landmarks import group_sums
from nystrom.parallel.positions_over_ranks import _equal_segments

HERE = Path(__file__).parent
LONG = [pytest.param(name, marks=pytest.mark.long) for name in ("check_methods", "check_models", "check_transformers")]


@pytest.mark.long
@pytest.mark.timeout(500)
@pytest.mark.parametrize("checks", ["check_faults", *LONG])
def test_two_ranks_do_what_one_process_does(run_on_ranks, checks):
    failed = run_on_ranks(HERE / f"{checks}.py", 2)
    assert not failed, "\n".join(f"{name}:\n{error}" for name, error in failed.items())


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_four_ranks_do_what_one_process_does(run_on_ranks):
    failed = run_on_ranks(HERE / "check_methods.py", 4)
    assert not failed, "\n".join(f"{name}:\n{error}" for name, error in failed.items())


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_two_groups_of_two_ranks_share_and_shard_a_model(run_on_ranks):
    failed = run_on_ranks(HERE / "check_sharding.py", 4)
    assert not failed, "\n".join(f"{name}:\n{error}" for name, error in failed.items())


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
