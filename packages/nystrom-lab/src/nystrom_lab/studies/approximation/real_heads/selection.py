"""Selection of rows by their facts, such as weights="pretrained", layer="3"."""

from collections.abc import Iterable
from dataclasses import replace
from statistics import fmean

from nystrom_lab.measure.rows import Row


def rows_of(rows: Iterable[Row], quantity: str, **facts: str) -> list[Row]:
    """Rows of a quantity that have these facts."""
    return [row for row in rows if row.quantity == quantity and row.facts.items() >= facts.items()]


def step_of(row: Row) -> int | None:
    """The step of the iteration that a row belongs to: its fact `k`."""
    return int(step) if (step := row.fact("k")) else None


def only_row(rows: Iterable[Row], what: str) -> Row:
    """The only row among some, which `what` describes.

    Raises:
        ValueError: There is none, or there are several.
    """
    found = list(rows)
    if len(found) != 1:
        raise ValueError(
            f"there are {len(found)} rows of {what}; expected one, as in a finished study: `nystrom reproduce` "
            "continues it."
        )
    return found[0]


def over_layers(rows: Iterable[Row]) -> list[Row]:
    """Merge rows that differ only in their layer: the means of their values and quartiles.

    Every layer has the same number of heads, so this is the mean over all heads.
    """
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        row = row.with_facts(layer=None)
        groups.setdefault((row.quantity, row.method, row.n, row.m, row.dtype, row.words), []).append(row)
    return [
        replace(
            group[0],
            value=fmean(row.value for row in group),
            low=fmean(row.value if row.low is None else row.low for row in group),
            high=fmean(row.value if row.high is None else row.high for row in group),
            repeats=sum(row.repeats for row in group),
        )
        for group in groups.values()
    ]
