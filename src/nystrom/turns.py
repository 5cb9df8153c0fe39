"""Measurements in turns and their quartiles: what slows the machine down for a while then slows all that are compared.

A turn takes each of them once. Ratios are taken within a turn, and what is reported is a median with its quartiles.

The order of two is open where the one that is slower by the median was faster by more than a tenth in a quarter of the
turns. Two that are as fast as each other to within a tenth have no order that matters. Needs the standard library only.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

Key = TypeVar("Key")

# What the choice of the slower of two may cost.
_MATTERS = 1.1


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
    """The quartiles of one value or more, these included."""
    if len(values) == 1:
        return Quartiles(*values, *values, *values)
    return Quartiles(*statistics.quantiles(values, n=4, method="inclusive"))


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> Quartiles:
    """The quartiles of the ratio of two measurements within each turn.

    Args:
        ours: What stands above the line, a value for each turn.
        theirs: What stands below it.
    """
    return quartiles([one / other for one, other in zip(ours, theirs, strict=True)])


def in_turns(
    clocks: Mapping[Key, Callable[[], float]],
    turns: int,
    *,
    warm_up: bool = True,
    tick: Callable[[], object] = lambda: None,
) -> dict[Key, list[float]]:
    """Take each measurement once a turn.

    Args:
        clocks: What makes one call and gives its seconds, such as a partial of `nystrom.clock.seconds`.
        turns: Turns.
        warm_up: Whether a turn that is not kept comes first: a first call may allocate and compile.
        tick: Is called after each measurement.

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


def is_open(ratio: Quartiles) -> bool:
    """Whether turns leave open which of two is faster.

    Args:
        ratio: The quartiles of the ratio of their times, `ratios`.
    """
    return ratio.low < 1 / _MATTERS if ratio.middle >= 1 else ratio.high > _MATTERS


def too_busy(ratios: Mapping[tuple[str, str], Quartiles], turns: int) -> str:
    """The sentence for orders that are open.

    Args:
        ratios: By the names of the two the quartiles of the ratio of their times.
        turns: How many there were.
    """
    pairs = ", ".join(
        f"{one} or {other} ({low:.2f} to {high:.2f} times its time)" for (one, other), (low, _, high) in ratios.items()
    )
    return (
        f"The machine was too busy to tell which is faster: {pairs}; quartiles of {turns} turns. Measure again while "
        "it does nothing else."
    )
