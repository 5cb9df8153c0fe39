"""The table of engines that run an encoder on a CPU, from rows of `nystrom bench engines`; measures nothing.

A line is an engine; for each length there are its time, and how many times faster it is than the fastest exact engine.
The error of the hidden states and the peak memory are those of the longest input.
"""

import math
from collections.abc import Sequence

from nystrom_lab.measure.rows import Row
from nystrom_lab.report.table import Table, markdown_table, print_table

STUDY = "engines"
TIME, ERROR = "time", "relative error of the hidden states"
BESIDE_TORCH, BESIDE_BEST = "time / torch", "time / fastest exact engine"
MEMORY, WHOLE_MEMORY = "peak memory of a call", "peak memory of the process"


def engines_table(rows: Sequence[Row]) -> Table:
    """The table of one run's rows.

    Raises:
        ValueError: No rows, rows of another study, or an engine that was measured twice at a length.
    """
    if not rows or {row.study for row in rows} != {STUDY}:
        studies = ", ".join(sorted({repr(row.study) for row in rows})) or "no study"
        raise ValueError(f"rows are of {studies}; expected rows of 'engines', written by nystrom bench engines.")
    row_of: dict[tuple[str, str, int | None], Row] = {}
    for row in rows:
        if row_of.setdefault((row.quantity, row.method, row.n), row) is not row:
            raise ValueError(f"{row.quantity} of {row.method} at {row.n} tokens is measured twice: keep one of them.")
    lengths = sorted({row.n for row in rows if row.n is not None})
    last = lengths[-1]
    heads = ["engine", *(f"{n:,} tokens, s" for n in lengths), f"error, {last:,}", f"MB, {last:,}"]
    lines = []
    for name in dict.fromkeys(row.method for row in rows):
        times = [_time(row_of.get((TIME, name, n)), row_of.get((BESIDE_BEST, name, n))) for n in lengths]
        error, memory = (row_of.get((quantity, name, last)) for quantity in (ERROR, MEMORY))
        lines.append([name, *times, _error(error), "–" if memory is None else f"{memory.value:,.0f}"])
    return Table("", heads, lines, notes="\n".join(_notes(rows)))


def print_engines(rows: Sequence[Row], *, markdown: bool = False) -> None:
    """Print `engines_table`, for the terminal or as Markdown."""
    table = engines_table(rows)
    if not markdown:
        print_table(table)
        return
    print(markdown_table(table))
    print("\n".join(f"- {note}" for note in table.notes.splitlines()))


def _time(time: Row | None, beside: Row | None) -> str:
    if time is None or math.isnan(time.value):
        return "–"
    faster = "" if beside is None else f" ({1 / beside.value:.2g}×)"
    return f"{time.value:.3g}{faster}"


def _error(row: Row | None) -> str:
    if row is None:
        return "–"
    return f"{row.value:.2f}" if row.value >= 0.01 else f"{row.value:.0e}" if row.value else "0"


def _notes(rows: Sequence[Row]) -> list[str]:
    first, timed = rows[0], [row for row in rows if row.quantity == TIME]
    versions = dict.fromkeys(row.fact("engine") for row in rows if row.fact("engine"))
    turns = sorted({row.repeats for row in timed if row.repeats})
    took = " to ".join(map(str, turns[:: len(turns) - 1 or 1]))
    notes = [
        f"{first.fact('model')}, {first.fact('threads')} threads for each engine, {first.device}, {first.date}, commit "
        f"{first.commit}; {', '.join([f'torch {first.torch}', *versions])}.",
        f"Medians of interleaved turns ({took}); in brackets how many times faster than the fastest exact engine.",
    ]
    missing: dict[tuple[str, str], list[str]] = {}
    for row in timed:
        if row.note:
            missing.setdefault((row.method, row.note), []).append(f"{row.n:,}")
    return notes + [f"{name} at {', '.join(at)} tokens: {note}." for (name, note), at in missing.items()]
