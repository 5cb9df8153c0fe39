"""Times of attention functions, forward and with the backward pass, in turns, and their ratios to one of them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nystrom.clock import seconds
from nystrom.turns import in_turns
from nystrom_lab.measure.rows import Row, cpu_name
from nystrom_lab.measure.timing import timed_rows

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
PASSES = {"forward": "forward time", "both": "training time"}


def time_passes(
    calls: Mapping[str, Attention], given: Sequence[Tensor], rounds: int, *, beside: str, what: str, **shared: Any
) -> Iterable[Row]:
    """Rows of the times of both passes, and of their ratios to one of the functions within each turn.

    Args:
        calls: The functions by name.
        given: Queries, keys and values, which require gradients.
        rounds: Turns.
        beside: The name of the function that ratios are taken to.
        what: What rows call that function: their quantities are "forward time / exact" and the like.
        **shared: Other fields of the rows.
    """

    def forward(call: Attention) -> None:
        with torch.no_grad():
            call(*given)

    def both(call: Attention) -> None:
        call(*given).sum().backward()

    for run, time in zip((forward, both), PASSES.values(), strict=True):
        clocks = {name: partial(seconds, partial(run, call), torch.device("cpu")) for name, call in calls.items()}
        taken = in_turns(clocks, rounds)
        for name, each in taken.items():
            yield from timed_rows(name, each, taken[beside], (time, f"{time} / {what}"), device=cpu_name(), **shared)


def is_at_most(row: Row, bound: float) -> bool | None:
    """Whether both quartiles of a ratio are at most a bound; None where the bound is between them."""
    low, high = (row.value if each is None else each for each in (row.low, row.high))
    return True if high <= bound else False if low > bound else None


def all_hold(decided: Sequence[bool | None]) -> bool | None:
    """Whether all parts of a claim hold; None where none fails but one cannot tell, or there are none."""
    return False if False in decided else None if None in decided or not decided else True
