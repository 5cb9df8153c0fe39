"""Interleaved measurements and their quartiles: a load that slows the machine down then slows all that are compared.

In each turn, each candidate is measured once. Ratios are taken within a turn; the median and the quartiles are
reported.

The order of two candidates is open if the one with the longer median time was faster by more than a tenth in a quarter
of the turns. If two differ by less than a tenth, their order does not matter and is not open. Needs only the standard
library.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

Key = TypeVar("Key")

# Ratio of times up to which choosing the slower of two does not matter.
_MATTERS = 1.1


class Quartiles(NamedTuple):
    """The quartiles of some values; `middle` is their median."""

    low: float
    middle: float
    high: float

    @property
    def spread(self) -> tuple[float, float]:
        """The lower and the upper quartile."""
        return self.low, self.high


def quartiles(values: Sequence[float]) -> Quartiles:
    """The quartiles of one or more values, by the inclusive method."""
    if len(values) == 1:
        return Quartiles(*values, *values, *values)
    return Quartiles(*statistics.quantiles(values, n=4, method="inclusive"))


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> Quartiles:
    """The quartiles of the ratio of two measurements within each turn."""
    return quartiles([one / other for one, other in zip(ours, theirs, strict=True)])


def in_turns(
    clocks: Mapping[Key, Callable[[], float]],
    turns: int,
    *,
    warm_up: bool = True,
    tick: Callable[[], object] = lambda: None,
) -> dict[Key, list[float]]:
    """Take each measurement once per turn; the seconds of each, in the order of the turns.

    Args:
        clocks: Functions that make one call and return its seconds, such as a partial of `nystrom.clock.seconds`.
        warm_up: Whether an extra first turn is discarded: a first call may allocate and compile.
        tick: Called after each measurement.
    """
    taken: dict[Key, list[float]] = {key: [] for key in clocks}
    for turn in range(-warm_up, turns):
        for key, clock in clocks.items():
            seconds = clock()
            if turn >= 0:
                taken[key].append(seconds)
            tick()
    return taken


def is_open(ratio: Quartiles) -> bool:
    """Whether the quartiles of the ratio of two times, from `ratios`, leave open which of them is faster."""
    return ratio.low < 1 / _MATTERS if ratio.middle >= 1 else ratio.high > _MATTERS


def too_busy(ratios: Mapping[tuple[str, str], Quartiles], turns: int) -> str:
    """The sentence that reports which orders are open, from the quartiles of ratios by the names of two candidates."""
    pairs = ", ".join(
        f"{one} or {other} ({low:.2f} to {high:.2f} times its time)" for (one, other), (low, _, high) in ratios.items()
    )
    return (
        f"The machine was too busy to tell which is faster: {pairs}; quartiles of {turns} turns. Measure again while "
        "it does nothing else."
    )
