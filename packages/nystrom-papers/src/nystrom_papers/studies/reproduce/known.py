r"""How precisely the rows determine a number, and what a rule may conclude from it.

A rule says True or False if all values that a number may have lie on one side of its limit. It says None, "cannot
tell", if the limit lies among them. These values are:

- for a mean over many heads, texts or draws, two standard errors to either side. The standard deviation $\sigma$ is
  taken as the distance to the farther quartile over 0.6745, as for a normal distribution, so that a long tail widens
  it;
- for a share of them, Wilson's score interval of two standard errors;
- for a median of times, the range between its quartiles;
- for one measurement without a spread, the number plus or minus a part of itself that the rule names.

Rows are those of `nystrom_lab.measure.rows`, or the lines of a frame of `nystrom_papers.studies.reproduce.declared`.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

# In standard errors.
_WIDTH = 2.0
# When a score that is below another is still competitive with it: two points of accuracy, as a share. The widest gap in
# Nyströmformer's Table 2 is 1.6 points.
MARGIN = 0.02
# Distance from the mean of a normal distribution to its quartiles, in standard deviations.
_QUARTILE = 0.6745


class Known(NamedTuple):
    """The ends of the interval that is known to hold a number; NaN if it was not measured."""

    low: float
    high: float

    def within(self, least: float = -math.inf, most: float = math.inf) -> bool | None:
        """Whether the number is at least one limit and at most another; None if a limit lies inside the interval."""
        if least <= self.low and self.high <= most:
            return True
        return False if self.high < least or self.low > most else None

    def above(self, limit: float = 1.0) -> bool | None:
        """Whether the number is above a limit; None if the limit lies inside the interval or at one of its ends."""
        return True if self.low > limit else False if self.high < limit else None

    def over(self, other: "Known") -> "Known":
        """The interval of the ratio of two positive numbers."""
        return Known(max(self.low, 0.0) / other.high, self.high / other.low if other.low > 0 else math.inf)


UNKNOWN = Known(math.nan, math.nan)


def mean_of(row: Any) -> Known:
    """The interval of a mean; a row without quartiles is taken as exact."""
    farther = max(abs(end - row.value) for end in quartiles_of(row))
    error = _WIDTH * farther / _QUARTILE / math.sqrt(row.repeats)
    return Known(row.value - error, row.value + error)


def estimate(value: float, error: float) -> Known:
    """The interval of a number with this standard error."""
    return Known(value - _WIDTH * error, value + _WIDTH * error)


def is_competitive(gap: float, error: float, margin: float = MARGIN) -> bool | None:
    """Whether a score is at most a margin below another; None if that is within two standard errors of the gap."""
    return estimate(gap, error).within(least=-margin)


def mean_over(values: Sequence[float]) -> Known:
    """The interval of a mean over seeds, of which one alone decides nothing."""
    return Known(-math.inf, math.inf) if len(values) < 2 else estimate(statistics.fmean(values), error_over(values))


def error_over(values: Sequence[float]) -> float:
    """The standard error of a mean over several seeds."""
    return statistics.stdev(values) / math.sqrt(len(values))


def share_of(share: float, count: int) -> Known:
    """The interval of a share of a number of cases, which may be 0."""
    if not count:
        return Known(0.0, 1.0)
    square = _WIDTH**2 / count
    middle = share + square / 2
    half = math.sqrt(share * (1 - share) * square + square**2 / 4)
    return Known((middle - half) / (1 + square), (middle + half) / (1 + square))


def share_in(row: Any) -> Known:
    """The interval of the share that a row holds, over its repeats."""
    return share_of(row.value, row.repeats)


def quartiles_of(row: Any) -> Known:
    """The quartiles of a row, or its value if it has none."""
    return Known(row.value if row.low is None else row.low, row.value if row.high is None else row.high)


def roughly(value: float, part: float = 0.1) -> Known:
    """The interval of a positive number that is known to a part of itself."""
    return Known(value * (1 - part), value * (1 + part))


def holds_for_share(answers: Iterable[bool | None], share: float = 1.0) -> bool | None:
    """Whether at least a share of the answers is True; None if answers of None decide that, or there are no answers."""
    known = list(answers)
    yes, wanted = known.count(True), share * len(known)
    if not known:
        return None
    return True if yes >= wanted else False if yes + known.count(None) < wanted else None


def unanimous(answers: Iterable[bool | None]) -> bool | None:
    """The answer that several measures of one thing share; None if they disagree, or there are none."""
    distinct = set(answers)
    return distinct.pop() if len(distinct) == 1 else None
