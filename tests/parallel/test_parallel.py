"""Every method over ranks, against one process: see the files of checks, which the ranks run."""

import pytest
import torch

from nystrom import nystrom_attention


@pytest.mark.timeout(500)
@pytest.mark.parametrize("checks", ["check_methods", "check_faults", "check_models", "check_transformers"])
def test_two_ranks_do_what_one_process_does(run_on_ranks, checks):
    failed = run_on_ranks(checks, 2)
    assert not failed, "\n".join(f"{name}:\n{error}" for name, error in failed.items())


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_four_ranks_do_what_one_process_does(run_on_ranks):
    failed = run_on_ranks("check_methods", 4)
    assert not failed, "\n".join(f"{name}:\n{error}" for name, error in failed.items())


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_two_groups_of_two_ranks_share_and_shard_a_model(run_on_ranks):
    failed = run_on_ranks("check_sharding", 4)
    assert not failed, "\n".join(f"{name}:\n{error}" for name, error in failed.items())


def test_a_group_without_a_process_group_raises_by_name():
    q = torch.randn(1, 2, 9, 4)
    with pytest.raises(ValueError, match=r"group is given, but torch\.distributed has no process group: call"):
        nystrom_attention(q, q, q, num_landmarks=3, group="tokens")
