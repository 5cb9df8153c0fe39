"""Rows of the layers of a model, merged to one over all of its heads."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from statistics import fmean

import pandas as pd

from nystrom_lab.measure.rows import Row
from nystrom_papers.studies.reproduce.declared import frame_of


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


def framed_over_layers(*quantities: str) -> Callable[[Sequence[Row]], pd.DataFrame]:
    """Makes a frame of rows, those of these quantities merged where they differ only in their layer."""

    def framed(rows: Sequence[Row]) -> pd.DataFrame:
        merged = over_layers(row for row in rows if row.quantity in quantities)
        return frame_of([*merged, *(row for row in rows if row.quantity not in quantities)])

    return framed
