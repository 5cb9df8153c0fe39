"""Tables of rows, for the terminal and as Markdown.

The table of a study has one part per quantity ("forward time", "forward memory", ...), with a line per method and a
column per number of tokens (efficiency, model) or per task (training). Each value is followed by how many times
less it is than that of the first method, as in Table 1 of the Nyströmformer paper (arXiv:2102.03902): "12.3 (12.7×)". A
dash marks what was not measured; the notes below say why. If there is a memory floor, parts derived from it follow:
see `nystrom_papers.report.floor`.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nystrom.checks import check_names
from nystrom_lab.measure.rows import Row
from nystrom_lab.report.table import Table, markdown_table, print_table
from nystrom_papers.report.floor import FLOOR, UNITS, bandwidths, with_derived

if TYPE_CHECKING:
    from rich.console import Console

STUDIES = ("efficiency", "model", "training")


def study_table(rows: Sequence[Row]) -> Table:
    """Time and memory of methods, by number of tokens or by task; ratios refer to the first method in the rows.

    Raises:
        ValueError: No rows, or rows of another study.
    """
    lines: list[Sequence[str]] = []
    for quantity, unit, methods in _parts(rows):
        lines += [[f"{quantity} ({unit})"], *([method, *cells] for method, cells in methods)]
    return Table(_title(rows), ["", *_columns(rows)], lines, notes="\n".join(_footnotes(rows)))


def print_study(rows: Sequence[Row], console: "Console | None" = None) -> None:
    """Print `study_table`."""
    print_table(study_table(rows), console)


def study_markdown(rows: Sequence[Row]) -> str:
    """The table as Markdown, one per quantity, with the command that measured it. Raises as `study_table`."""
    text = [
        markdown_table(Table("", [f"{quantity} ({unit})", *_columns(rows)], [[name, *cells] for name, cells in lines]))
        for quantity, unit, lines in _parts(rows)
    ]
    commands = dict.fromkeys(row.command for row in rows)
    text += ["Measured by", "", *(f"    {command}" for command in commands), "", f"on {_title(rows)}.", ""]
    text += [f"- {note}" for note in _footnotes(rows)]
    return "\n".join(text).rstrip() + "\n"


def only_quantities(rows: Sequence[Row], wanted: Sequence[str]) -> list[Row]:
    """The rows of some quantities, each of which a row must have; a study of tasks has these for each task."""
    check_names("quantity", wanted, dict.fromkeys(_quantity(row) for row in rows))
    return [row for row in rows if _quantity(row) in wanted]


def only_methods(rows: Sequence[Row], wanted: Sequence[str]) -> list[Row]:
    """The rows of some methods, each of which a row must have, as they are called in the table."""
    check_names("method", wanted, dict.fromkeys(row.method for row in rows))
    return [row for row in rows if row.method in wanted]


def of_device(rows: Sequence[Row], part: str) -> list[Row]:
    """The rows of devices with this in their name, or ValueError."""
    matching = [row for row in rows if part in row.device]
    if not matching:
        devices = ", ".join(dict.fromkeys(repr(row.device) for row in rows))
        raise ValueError(f"device is {part!r}; expected a part of one of {devices}.")
    return matching


def once_each(rows: Sequence[Row]) -> dict[tuple[str, str, str], Row]:
    """The rows by quantity, method and column.

    Raises:
        ValueError: Two rows are of one of these, such as of two devices.
    """
    first: dict[tuple[str, str, str], Row] = {}
    for row in rows:
        other = first.setdefault((_quantity(row), row.method, _column(row)), row)
        if other is not row:
            raise ValueError(
                f"the rows measure {_quantity(row)} of {row.method} at {_column(row)} twice, on {other.device} at "
                f"{other.date} and on {row.device} at {row.date}: show each "
                "measurement alone, by its device or from a file of its own."
            )
    return first


def _parts(rows: Sequence[Row]) -> list[tuple[str, str, list[tuple[str, list[str]]]]]:
    """Per quantity: its name, its unit, and per method the cells of its line."""
    rows = with_derived(rows)
    columns, methods = _columns(rows), dict.fromkeys(row.method for row in rows)
    cells = once_each(rows)
    parts = []
    for quantity, unit in sorted({(_quantity(row), row.unit) for row in rows}, key=_place):
        first = next(iter(methods))
        lines = [
            (method, [_cell(cells.get((quantity, method, at)), cells.get((quantity, first, at))) for at in columns])
            for method in methods
        ]
        parts.append((quantity, unit, lines))
    return parts


def _place(part: tuple[str, str]) -> tuple[bool, bool, bool, str]:
    """Forward before backward, time before memory, measured before derived."""
    return "backward" in part[0], "memory" in part[0], part[1] in UNITS, part[0]


def _cell(row: Row | None, first: Row | None) -> str:
    if row is None or not math.isfinite(row.value):
        return "–"
    if first is None or not first.value or not math.isfinite(first.value) or not row.value or row.unit in UNITS:
        return _short(row.value)
    ratio = first.value / row.value
    return f"{_short(row.value)} ({f'{ratio:.1f}' if 1 <= ratio < 100 else _short(ratio)}×)"


def _short(value: float) -> str:
    """Two significant digits below one and three above, without an exponent: 0.021, 0.15, 1.53, 15.3, 153, 1530."""
    if value <= 0:
        return f"{value:g}"
    figures = 3 if value >= 1 else 2
    # Round first: 99.96 has as many decimal places as 100.
    size = math.floor(math.log10(float(f"{value:.{figures - 1}e}")))
    return f"{value:.{max(0, figures - 1 - size)}f}"


def _column(row: Row) -> str:
    """The column of a row: the task in the study "training", else the number of tokens."""
    return row.quantity.partition(" ")[0] if row.study == "training" else f"n = {row.n}"


def _quantity(row: Row) -> str:
    """The quantity, without the task."""
    return row.quantity.partition(" ")[2] if row.study == "training" else row.quantity


def _columns(rows: Sequence[Row]) -> list[str]:
    """The columns: lengths in ascending order, tasks in the order of the rows."""
    studies = {row.study for row in rows}
    if len(studies) != 1 or not studies <= set(STUDIES):
        raise ValueError(
            f"rows are of {', '.join(map(repr, sorted(studies))) or 'no study'}; expected rows of one study of "
            f"{', '.join(map(repr, STUDIES))}."
        )
    ordered = sorted(rows, key=lambda row: row.n or 0) if studies != {"training"} else rows
    return list(dict.fromkeys(_column(row) for row in ordered))


def _title(rows: Sequence[Row]) -> str:
    """The shared facts of all rows, their dtype, device, torch, commit, date."""
    common = [f"{name}={value}" for name, value in rows[0].facts.items() if {row.fact(name) for row in rows} == {value}]
    shared = [
        (row.dtype, row.device, f"torch {row.torch}", f"commit {row.commit or 'unknown'}", row.date) for row in rows
    ]
    return ", ".join([" ".join(common), *("/".join(dict.fromkeys(values)) for values in zip(*shared, strict=True))])


def _spread(rows: Sequence[Row]) -> str:
    """Half the distance between the quartiles of times, in percent of the medians: the middle one and the largest."""
    far = sorted(50 * (row.high - row.low) / row.value for row in rows if row.low and row.high)
    return f", quartiles ±{far[len(far) // 2]:.0f} % (at most ±{far[-1]:.0f} %)" if far else ""


def _footnotes(rows: Sequence[Row]) -> list[str]:
    """Notes on what the numbers are, and why some are missing."""
    timed = max((row.repeats for row in rows if "time" in row.quantity and row.method != FLOOR), default=0)
    calls = "steps" if rows[0].study == "training" else "calls"
    what = f"Median of {timed} interleaved {calls}{_spread(rows)}" if timed else f"Peak of one of the {calls}"
    notes = [f"{what}; in brackets how many times less than {rows[0].method}.", *bandwidths(rows)]
    missing = {
        (row.method, _quantity(row).partition(" ")[0], _column(row)): row.note
        for row in rows
        if not math.isfinite(row.value)
    }
    return notes + [f"{method}, {what}, {column}: {note}." for (method, what, column), note in missing.items()]
