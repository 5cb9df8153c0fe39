"""One harness for all that is timed side by side: contenders take turns, so that a slowdown of the machine affects all.

Each contender is called once to warm up; then all are called one after the other, `repeats` times over, and each once
more for its peak memory beyond what was there before. A contender has two rows: its time, the median in ms with the
quartiles as `low` and `high`, and its memory, in MB of 10^6 bytes (`nystrom.clock` says what it includes).

A call that would need more than half of the free memory, or more time than the limit, is not made: its rows hold NaN
and a note with the estimate. Results are written one at a time (a length or a task), and an interrupted
measurement goes on with those that are left.
"""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch

from nystrom.attention.backend import kernel_errors
from nystrom.interleaved_timing import in_turns, quartiles
from nystrom.progress import Progress
from nystrom_lab.measure.memory import free_bytes
from nystrom_lab.measure.rows import Row, append_rows, rows_so_far

Key = TypeVar("Key")
Column = TypeVar("Column")

_MEMORY_SHARE = 0.5


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How contenders are measured, and what every row records of it.

    Attributes:
        blank: A row with what all rows have in common.
        device: The device that everything runs on.
        repeats: Timed calls of each.
        threads: Threads on the CPU.
        limit_seconds: Skip calls that would take longer.
        free_bytes: Function that returns the free memory of a device.
    """

    blank: Row
    device: torch.device
    repeats: int
    threads: int
    limit_seconds: float
    free_bytes: Callable[[torch.device], int] = free_bytes

    def too_much(self, *, need: float = 0.0, seconds: float = 0.0, call: str = "call") -> str:
        """Why a call that needs so many bytes or seconds should not be made; empty if it should be."""
        free = _MEMORY_SHARE * self.free_bytes(self.device)
        if need > free:
            return f"needs about {need / 1e9:.3g} GB, {_MEMORY_SHARE:.0%} of the free memory is {free / 1e9:.3g} GB"
        if seconds > self.limit_seconds:
            return f"would take about {seconds:.0f} s a {call}, the limit is {self.limit_seconds:g} s"
        return ""


def take_turns(
    clocks: Mapping[Key, Callable[[], float]],
    peaks: Mapping[Key, Callable[[], int]],
    repeats: int,
    bar: Progress,
    *,
    warm_up: bool,
) -> dict[Key, tuple[list[float], int]]:
    """Seconds in each turn and peak bytes of each contender.

    Both name the same contenders; with `warm_up` an extra first turn is discarded.
    """
    times = in_turns(clocks, repeats, warm_up=warm_up, tick=bar.update)
    results = {}
    for key, peak in peaks.items():
        results[key] = times[key], peak()
        bar.update()
    return results


def time_and_memory(like: Row, what: str, taken: tuple[Sequence[float], int] | None, note: str) -> list[Row]:
    """The two rows of a contender.

    `taken` is None if it was not measured, and `note` says why.
    """
    times, peak = taken or ([], math.nan)
    low, middle, high = quartiles([1e3 * time for time in times]) if times else (None, math.nan, None)
    like = replace(like, note=note)
    return [
        replace(like, quantity=f"{what} time", value=middle, unit="ms", low=low, high=high, repeats=len(times)),
        replace(like, quantity=f"{what} memory", value=peak / 1e6, unit="MB", repeats=int(taken is not None)),
    ]


def reason(error: Exception) -> str:
    """The first line of an error, for a note."""
    return str(error).partition("\n")[0].rstrip(".") or type(error).__name__


# Errors of a call that the machine cannot make.
UNABLE = (RuntimeError, ValueError, *kernel_errors())


def sweep(
    columns: Mapping[str, Column],
    setup: Setup,
    path: Path,
    *,
    plural: str,
    column_of: Callable[[Row], str],
    measure: Callable[[Column, list[Row]], list[Row]],
) -> list[Row]:
    """Measure the columns that have no rows in the file yet, and write each when it is done.

    Args:
        columns: Lengths or tasks, by name.
        setup: How.
        path: The file.
        plural: The option that names the columns.
        column_of: The name of a row's column.
        measure: Function from a column and all earlier rows to its rows.

    Returns:
        The rows of these columns, in their order.

    Raises:
        ValueError: The file holds rows of another setting.
    """
    rows = rows_so_far(path, setup.blank, plural)
    threads_before = torch.get_num_threads()
    torch.set_num_threads(setup.threads)
    try:
        for name, column in columns.items():
            if all(column_of(row) != name for row in rows):
                new = measure(column, rows)
                append_rows(path, new)
                rows += new
                print(f"{name}: {sum(not row.note for row in new)} of {len(new)} rows, in {path}.", file=sys.stderr)
    except KeyboardInterrupt:
        print(f"\nStopped. {path} keeps the {plural} that are done; the same command continues.", file=sys.stderr)
        raise
    finally:
        torch.set_num_threads(threads_before)
    order = list(columns)
    return sorted((row for row in rows if column_of(row) in columns), key=lambda row: order.index(column_of(row)))
