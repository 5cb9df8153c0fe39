"""Choosing rows by what their sizes say, such as "weights=pretrained layer=3"."""

from collections.abc import Iterable
from dataclasses import replace
from statistics import fmean

from nystrom_lab.measure.rows import Row


def rows_of(rows: Iterable[Row], quantity: str, **words: str) -> list[Row]:
    """Rows of a quantity whose sizes say the words."""
    return [row for row in rows if row.quantity == quantity and all(word_of(row, k) == v for k, v in words.items())]


def word_of(row: Row, name: str) -> str:
    """What the sizes of a row say by a name, such as "pretrained" of weights; "" where they say nothing."""
    return next((part[len(name) + 1 :] for part in row.sizes.split() if part.startswith(f"{name}=")), "")


def step_of(row: Row) -> int | None:
    """The step of an iteration that the sizes of a row say, as in "k=3"."""
    return int(step) if (step := word_of(row, "k")) else None


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
        sizes = " ".join(part for part in row.sizes.split() if not part.startswith("layer="))
        groups.setdefault((row.quantity, row.method, row.n, row.m, row.dtype, sizes), []).append(row)
    return [
        replace(
            group[0],
            value=fmean(row.value for row in group),
            low=fmean(row.value if row.low is None else row.low for row in group),
            high=fmean(row.value if row.high is None else row.high for row in group),
            repeats=sum(row.repeats for row in group),
            sizes=str(key[-1]),
        )
        for key, group in groups.items()
    ]
