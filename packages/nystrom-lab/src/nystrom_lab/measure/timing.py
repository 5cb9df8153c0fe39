"""Rows of times that were measured in turns (`nystrom.interleaved_timing`)."""

from collections.abc import Iterable, Sequence
from typing import Any

from nystrom.interleaved_timing import quartiles, ratios
from nystrom_lab.measure.rows import Row, new_row


def timed_rows(
    method: str, taken: Sequence[float], exact: Sequence[float], quantities: tuple[str, str], **shared: Any
) -> Iterable[Row]:
    """The rows of a method's time in ms, and of its ratio to another time within each turn: medians and quartiles.

    Args:
        method: The method.
        taken: Its seconds in each turn.
        exact: The seconds that ratios are taken to, in most studies those of exact attention.
        quantities: Names of the time and the ratio in the rows.
        **shared: The other fields of both rows, as for `new_row`.
    """
    milliseconds = quartiles([1e3 * each for each in taken])
    for quantity, values, unit in zip(quantities, (milliseconds, ratios(taken, exact)), ("ms", ""), strict=True):
        yield new_row(
            study="", quantity=quantity, method=method, value=values.middle, low=values.low, high=values.high,
            unit=unit, repeats=len(taken), **shared,
        )  # fmt: skip
