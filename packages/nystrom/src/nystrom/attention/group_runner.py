"""The function that runs a call whose tokens are split across the ranks of a process group.

`nystrom.parallel` stands on this package: it passes its functions in when it is imported.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class GroupRunner(NamedTuple):
    """Functions over the ranks of a group."""

    # The counterpart of `nystrom.attention.entry.attend`, see `nystrom.parallel.entry_over_ranks`
    attend: Callable[..., Tensor]
    # The counterpart of `nystrom.attention.heads.add_skip`, see `nystrom.parallel.skip_over_ranks`
    add_skip: Callable[..., Tensor]


_passed: list[GroupRunner] = []


def pass_group_runner(runner: GroupRunner) -> None:
    """Let calls with a group be run by these functions."""
    _passed[:] = [runner]


def group_runner() -> GroupRunner:
    """The functions for a call with a group.

    Raises:
        ValueError: `nystrom.parallel` was not imported.
    """
    if not _passed:
        raise ValueError("group is given, and attention over ranks is in nystrom.parallel: import nystrom.parallel.")
    return _passed[0]
