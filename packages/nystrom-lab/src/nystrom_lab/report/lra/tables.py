"""The table of the Long Range Arena: measured accuracies next to those printed in the two papers.

The table has a line for each method with its size and each preset; below the lines of a method is what the papers print
for it. "37.4 ± 0.5 (3; 1.1)" is the mean and the standard deviation over seeds in percent, the number of seeds, and the
binomial standard error of one run. A dash means not run, or not printed. No preset has fewer than 500 steps: a cell
from runs with fewer names them. A method that has only such cells, or rows that say neither preset nor steps, gets no
lines of the papers.
"""

import shlex
import statistics
from collections.abc import Iterable, Sequence
from textwrap import fill
from typing import Any

from nystrom_lab.measure.rows import Row
from nystrom_lab.report.lra.runs import Accuracy, Line, lra_cells, lra_departures, lra_guesses
from nystrom_lab.report.printed import LRA_TASKS, PAPERS, SKYFORMER_TABLE_1
from nystrom_lab.report.table import Table, markdown_table, print_table

_DASH, _LABEL, _FEW = "–", 20, 500
_TITLE = "accuracy in %"
_CAPTION = (
    "mean ± standard deviation over seeds (number of seeds; binomial standard error of one run on the test samples)"
)


def lra_lines(rows: Sequence[Row]) -> list[tuple[str, list[str]]]:
    """The lines of the table: a name, a cell per task, and one for the mean over all five.

    Args:
        rows: Rows as for `nystrom_lab.report.lra.runs.lra_cells`.

    Raises:
        ValueError: As for `lra_cells`, or a task that is not in the Long Range Arena.
    """
    cells = _known(lra_cells(rows))
    lines = []
    order = [*SKYFORMER_TABLE_1, *(line.base for line in cells)]
    for method in sorted({line.base for line in cells}, key=order.index):
        lines_of = [line for line in cells if line.base == method]
        for line in lines_of:
            row = [cells[line].get(task) for task in LRA_TASKS]
            found = [cell.mean for cell in row if cell is not None]
            mean = f"{statistics.fmean(found):.1f}" if len(found) == len(LRA_TASKS) else _DASH
            name = f"{line.method}, {line.preset or 'unknown preset'}"
            lines.append((name, [*(_text(cell) for cell in row), mean]))
        trained = any(line.preset and not _is_short(cell) for line in lines_of for cell in cells[line].values())
        for paper, table in PAPERS.items():
            if method in table and trained:
                printed = [f"{value:.2f}" for value in table[method]]
                lines.append((f"  {paper}", [*printed, f"{statistics.fmean(table[method]):.2f}"]))
    return lines


def in_short(lines: Iterable[tuple[str, Sequence[str]]]) -> list[list[str]]:
    """Lines of a table whose first column is narrow: long names are broken between words, to leave room for numbers."""
    wrap: dict[str, Any] = {"subsequent_indent": "  ", "break_long_words": False, "break_on_hyphens": False}
    return [[fill(name, _LABEL, **wrap), *cells] for name, cells in lines]


def print_lra(rows: Sequence[Row]) -> None:
    """Print the table.

    Raises:
        ValueError: As `lra_lines`.
    """
    notes = "\n".join([_CAPTION, *_notes(rows)])
    print_table(Table(_TITLE, ["", *LRA_TASKS, "mean"], in_short(lra_lines(rows)), notes=notes))


def lra_markdown(rows: Sequence[Row]) -> str:
    """The table as Markdown, with the commands that measured it.

    Raises:
        ValueError: As `lra_lines`.
    """
    lines = (
        [f"*{name.strip()}*" if name.startswith(" ") else f"**{name}**", *cells] for name, cells in lra_lines(rows)
    )
    tested = [row for row in rows if row.quantity == "test accuracy"]
    text = [markdown_table((_TITLE, *LRA_TASKS, "mean"), lines)]
    text += [f"{_CAPTION[0].upper()}{_CAPTION[1:]}.", "", *(f"- {note}" for note in _notes(rows)), ""]
    text += ["Measured by", "", *(f"    {command}" for command in dict.fromkeys(_any_seed(row) for row in tested))]
    return "\n".join(text) + "\n"


def _any_seed(row: Row) -> str:
    """The command of a run without its seed and its folder, so that it is the same for all seeds."""
    kept: list[str] = []
    words = iter(shlex.split(row.command))
    for word in words:
        name, equals, _ = word.partition("=")
        if name not in ("--to", "--seed"):
            kept.append(word)
            continue
        if not equals:
            next(words, None)
        kept += ["--seed", "SEED"] if name == "--seed" else []
    return shlex.join(kept)


def _text(cell: Accuracy | None) -> str:
    if cell is None:
        return _DASH
    deviation = "" if cell.deviation is None else f" ± {cell.deviation:.1f}"
    steps = f", {'unknown' if cell.steps is None else cell.steps} steps" if _is_short(cell) else ""
    return f"{cell.mean:.1f}{deviation} ({cell.seeds}; {cell.error:.1f}){steps}"


def _is_short(cell: Accuracy) -> bool:
    """Whether runs were too short to be compared with the papers, or do not say their steps."""
    return cell.steps is None or cell.steps < _FEW


def _known(cells: dict[Line, dict[str, Accuracy]]) -> dict[Line, dict[str, Accuracy]]:
    if strange := sorted({task for row in cells.values() for task in row} - set(LRA_TASKS)):
        raise ValueError(f"rows are of {', '.join(strange)}; expected tasks among {', '.join(LRA_TASKS)}.")
    return cells


def _notes(rows: Sequence[Row]) -> list[str]:
    """Notes on steps, test samples, positions, departures, guesses, and where it ran; one for all that share it."""
    shared: dict[tuple[str, str], list[str]] = {}
    for line, row in lra_cells(rows).items():
        for task, cell in row.items():
            steps = "unknown" if cell.steps is None else f"{cell.steps:,}"
            positions = "" if cell.positions is None else f", {cell.positions:,} positions"
            what = f"{steps} steps, {cell.samples:,} test samples{positions}"
            preset = f" ({line.preset})" if line.preset else ""
            shared.setdefault((f"{task}{preset}", what), []).append(line.method)
    notes = [f"{task}: {what}; {', '.join(dict.fromkeys(methods))}." for (task, what), methods in shared.items()]
    tested = [row for row in rows if row.quantity == "test accuracy"]
    notes += lra_departures(tested) + lra_guesses(rows)
    places = dict.fromkeys(
        f"{row.device}, {row.dtype}, torch {row.torch}, commit {row.commit or 'unknown'}, {row.date}." for row in tested
    )
    return [*notes, *places]
