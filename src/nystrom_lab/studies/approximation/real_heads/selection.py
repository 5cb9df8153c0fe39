"""Choosing rows by their facts, such as weights="pretrained", layer="3"."""

from collections.abc import Iterable
from dataclasses import replace
from statistics import fmean

from nystrom_lab.measure.rows import Row


def rows_of(rows: Iterable[Row], quantity: str, **facts: str) -> list[Row]:
    """Rows of a quantity that have these facts."""
    return [row for row in rows if row.quantity == quantity and row.facts.items() >= facts.items()]


def step_of(row: Row) -> int | None:
    """The step of an iteration that a row is of, its fact `k`."""
    return int(step) if (step := row.fact("k")) else None


def only_row(rows: Iterable[Row], what: str) -> Row:
    """The one row of what a study says.

    Raises:
        ValueError: There is none, or there are several.
    """
    found = list(rows)
    if len(found) != 1:
        raise ValueError(
            f"the rows have {len(found)} of {what}; expected one, as of a study that is finished: "
            "`nystrom reproduce` goes on with it."
        )
    return found[0]


def over_layers(rows: Iterable[Row]) -> list[Row]:
    """Rows that differ in their layer alone as one: the means of their values and quartiles.

    Every layer has as many heads, so that this is the mean over all heads.
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
