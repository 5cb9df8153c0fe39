"""Measured rows compared with the memory floor: derived rows, for tables of runs on a GPU.

- "forward time over the floor": the time divided by that of the row "floor" at the same length, from the same run.
- "forward extra memory": peak memory without the output (and, with a backward pass, the three gradients), in percent of
  queries, keys, values and output.
"""

import dataclasses
import math
from collections.abc import Sequence

from nystrom_lab.measure.rows import Row

FLOOR = "floor"
BANDWIDTH = "copy bandwidth"
UNITS = ("times", "% of q, k, v, out")
_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
# Tensors of n x d that memory holds as results: the output, and three gradients.
_RESULTS = {"forward": 1, "forward+backward": 4}


def with_derived(rows: Sequence[Row]) -> list[Row]:
    """The rows except those of the bandwidth, and the rows derived from them; without a floor, the rows as they are."""
    floors = {(row.quantity, row.n): row.value for row in rows if row.method == FLOOR}
    if not floors:
        return list(rows)
    measured = [row for row in rows if row.quantity != BANDWIDTH]
    derived = []
    for row in (row for row in measured if row.method != FLOOR):
        timed, _, what = row.quantity.partition(" ")
        if what == "time" and (row.quantity, row.n) in floors:
            floor = floors[row.quantity, row.n]
            derived.append(_derived(row, f"{timed} time over the floor", row.value / floor, UNITS[0]))
        elif what == "memory":
            derived.append(_derived(row, f"{timed} extra memory", _extra(row, _RESULTS[timed]), UNITS[1]))
    return measured + derived


def bandwidths(rows: Sequence[Row]) -> list[str]:
    """A note on the bandwidth that copies reached, if rows have it."""
    measured = [row.value for row in rows if row.quantity == BANDWIDTH]
    if not measured:
        return []
    reached = f"{min(measured):.0f}" if len(measured) == 1 else f"{min(measured):.0f} to {max(measured):.0f}"
    return [f"Floor: passes over n x d, six forward and eleven backward, at the {reached} GB/s that a copy reached."]


def _extra(row: Row, results: int) -> float:
    """Memory beyond the results, in percent of the inputs and the output, which are four tensors of n x d."""
    one = math.prod(int(row.facts[name]) for name in "bhd") * (row.n or 0) * _BYTES[row.dtype]
    return 100 * (1e6 * row.value - results * one) / (4 * one)


def _derived(row: Row, quantity: str, value: float, unit: str) -> Row:
    return dataclasses.replace(row, quantity=quantity, value=value, unit=unit, low=None, high=None)
