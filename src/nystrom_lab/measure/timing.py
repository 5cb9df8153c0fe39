"""Interleaved measurements and their quartiles: a temporary slowdown of the machine then affects all that are compared.

A turn measures each of them once. Ratios are taken within a turn, and medians with quartiles are reported.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from nystrom_lab.measure.rows import Row, new_row

Key = TypeVar("Key")


class Quartiles(NamedTuple):
    """The quartiles of some values; `middle` is their median."""

    low: float
    middle: float
    high: float

    @property
    def spread(self) -> tuple[float, float]:
        """The lower and the upper."""
        return self.low, self.high


def quartiles(values: Sequence[float]) -> Quartiles:
    """The quartiles (inclusive method) of one or more values."""
    if len(values) == 1:
        return Quartiles(*values, *values, *values)
    return Quartiles(*statistics.quantiles(values, n=4, method="inclusive"))


def in_turns(
    clocks: Mapping[Key, Callable[[], float]],
    turns: int,
    *,
    warm_up: bool = True,
    tick: Callable[[], object] = lambda: None,
) -> dict[Key, list[float]]:
    """Take each measurement once per turn.

    Args:
        clocks: Functions that make one call and return its seconds, such as a partial of `nystrom.clock.seconds`.
        turns: Turns.
        warm_up: Whether to discard a first turn, in which a call may allocate and compile.
        tick: Called after each measurement.

    Returns:
        The seconds of each, in the order of the turns.
    """
    taken: dict[Key, list[float]] = {key: [] for key in clocks}
    for turn in range(-warm_up, turns):
        for key, clock in clocks.items():
            seconds = clock()
            if turn >= 0:
                taken[key].append(seconds)
            tick()
    return taken


def timed_rows(
    method: str, taken: Sequence[float], exact: Sequence[float], quantities: tuple[str, str], **shared: Any
) -> Iterable[Row]:
    """The rows of a method's time in ms, and of its ratio to that of exact attention within each turn.

    Args:
        method: The method.
        taken: Its seconds in each turn.
        exact: Those of exact attention.
        quantities: Names of the time and the ratio in the rows.
        **shared: The other fields of both, as for `new_row`.
    """
    ratios = [ours / theirs for ours, theirs in zip(taken, exact, strict=True)]
    for quantity, values, unit in zip(quantities, ([1e3 * each for each in taken], ratios), ("ms", ""), strict=True):
        low, middle, high = quartiles(values)
        yield new_row(
            study="", quantity=quantity, method=method, value=middle, low=low, high=high, unit=unit,
            repeats=len(values), **shared,
        )  # fmt: skip
