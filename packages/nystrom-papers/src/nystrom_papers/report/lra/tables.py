"""The tables of the Long Range Arena beside what the papers print: accuracies, and hours and gigabytes.

A table has a line for each method with its size and each preset; below the lines of a method is what the papers print
for it. A dash means not run, or not printed.

**Accuracies.** "37.4 ± 0.5 (3; 1.1)" is the mean and the standard deviation over seeds in percent, the number of seeds,
and the binomial standard error of one run. No preset has fewer than 500 steps: a cell from runs with fewer names them.
A method that has only such cells, or rows that say neither preset nor steps, gets no lines of the papers.

**Costs.** Means over the seeds, for whole trainings with their evaluations and checkpoints, beside Table 2 of
Skyformer, whose runs had 50,000 steps on one NVIDIA V100 in half precision; notes give the steps and devices of the
runs here.
"""

import shlex
import statistics
from collections.abc import Iterable, Sequence
from textwrap import fill

from nystrom_lab.measure.rows import Row
from nystrom_lab.report.table import Table, markdown_table, print_table
from nystrom_papers.report.lra.runs import (
    Accuracy,
    Line,
    Seeds,
    check_alike,
    line_of,
    lra_cells,
    lra_departures,
    lra_guesses,
    runs_by_cell,
)
from nystrom_papers.report.printed import LRA_TASKS, PAPERS, SKYFORMER_TABLE_1
from nystrom_papers.report.printed_ratios import SKYFORMER_TABLE_2

_DASH, _LABEL, _FEW = "–", 20, 500
_TIME, _MEMORY, _STEPS = "training time", "peak memory", "steps"
_CAPTION = (
    "mean ± standard deviation over seeds (number of seeds; binomial standard error of one run on the test samples)"
)

# The name of a line, with blanks before that of a paper, and its cells.
TableLine = tuple[str, list[str]]


def lra_lines(rows: Sequence[Row]) -> list[TableLine]:
    """The lines of the accuracies: a name, a cell per task, and one for the mean over all five.

    Raises:
        ValueError: The cases of `lra_cells`, or a task that is not in the Long Range Arena.
    """
    cells = lra_cells(rows)
    if strange := sorted({task for row in cells.values() for task in row} - set(LRA_TASKS)):
        raise ValueError(f"rows are of {', '.join(strange)}; expected tasks among {', '.join(LRA_TASKS)}.")
    lines = []
    order = [*SKYFORMER_TABLE_1, *(line.base for line in cells)]
    for method in sorted({line.base for line in cells}, key=order.index):
        lines_of = {line: row for line, row in cells.items() if line.base == method}
        for line, row in lines_of.items():
            whole = len(row) == len(LRA_TASKS)
            mean = f"{statistics.fmean(row[task].mean for task in LRA_TASKS):.1f}" if whole else _DASH
            name = f"{line.method}, {line.preset or 'unknown preset'}"
            lines.append((name, [*(_accuracy(row.get(task)) for task in LRA_TASKS), mean]))
        trained = any(line.preset and not _is_short(cell) for line, row in lines_of.items() for cell in row.values())
        for paper, table in PAPERS.items():
            if method in table and trained:
                printed = [f"{value:.2f}" for value in table[method]]
                lines.append((f"  {paper}", [*printed, f"{statistics.fmean(table[method]):.2f}"]))
    return lines


def cost_lines(rows: Sequence[Row], *, time: bool, memory: bool) -> list[TableLine]:
    """The lines of the costs: a name, and a cell per task, of hours and, behind them, gigabytes.

    Raises:
        ValueError: No training time among the rows, a number that is not finite, two different runs of one seed, or
            seeds that differ in steps, length, precision or device.
    """
    cells = runs_by_cell(rows, (_TIME, _MEMORY, _STEPS))
    for (line, task), cell in cells.items():
        costs = [row for what in (_TIME, _MEMORY) for row in cell.get(what, {}).values()]
        steps = [f"{row.value:g}" for row in cell.get(_STEPS, {}).values()]
        settings = {what: [getattr(row, what) for row in costs] for what in ("n", "dtype", "device")}
        check_alike(line, task, {"steps": steps, **settings})
    if not any(_TIME in cell for cell in cells.values()):
        raise ValueError("rows hold no training time; expected rows of `nystrom lra run` or `nystrom train`.")
    lines = []
    measured = dict.fromkeys(line for line, _ in cells)
    for base in dict.fromkeys(line.base for line in measured):
        for line in (line for line in measured if line.base == base):
            of_tasks = [cells.get((line, task), {}) for task in LRA_TASKS]
            row = [_cost(_mean(cell, _TIME), _mean(cell, _MEMORY), time, memory) for cell in of_tasks]
            lines.append((f"{line.method}, {line.preset}" if line.preset else line.method, row))
        for name in [name for name in SKYFORMER_TABLE_2 if name.split("-")[0] == base][:1]:
            there = SKYFORMER_TABLE_2[name]
            row = [_cost(3600 * there[task].time, 1e3 * there[task].memory, time, memory) for task in LRA_TASKS]
            lines.append((f"  Skyformer T2, {name}", row))
    return lines


def print_lra(rows: Sequence[Row], *, time: bool = False, memory: bool = False) -> None:
    """Print the accuracies, or the costs. Raises as `lra_lines` and `cost_lines`."""
    title, columns, lines, notes = _parts(rows, time, memory)
    # The first column is narrow: long names are broken between words, to leave room for numbers.
    narrow = [
        [fill(name, _LABEL, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False), *cells]
        for name, cells in lines
    ]
    caption = [] if time or memory else [_CAPTION]
    print_table(Table(title, ["", *columns], narrow, notes="\n".join([*caption, *notes])))


def lra_markdown(rows: Sequence[Row], *, time: bool = False, memory: bool = False) -> str:
    """The same as Markdown, the accuracies with the commands that measured them. Raises as `print_lra`."""
    title, columns, lines, notes = _parts(rows, time, memory)
    marked = [[f"*{name.strip()}*" if name.startswith(" ") else f"**{name}**", *cells] for name, cells in lines]
    text = [markdown_table(Table("", (title, *columns), marked))]
    if time or memory:
        return "\n".join([*text, *(f"- {note}" for note in notes)]) + "\n"
    commands = dict.fromkeys(_any_seed(row) for row in rows if row.quantity == "test accuracy")
    text += [f"{_CAPTION[0].upper()}{_CAPTION[1:]}.", "", *(f"- {note}" for note in notes), ""]
    return "\n".join([*text, "Measured by", "", *(f"    {command}" for command in commands)]) + "\n"


def _parts(rows: Sequence[Row], time: bool, memory: bool) -> tuple[str, Sequence[str], list[TableLine], list[str]]:
    """The title, the columns, the lines and the notes of a table."""
    if not (time or memory):
        return "accuracy in %", (*LRA_TASKS, "mean"), lra_lines(rows), _notes(rows)
    units = " / ".join(["hours"] * time + ["GB"] * memory)
    return units, LRA_TASKS, cost_lines(rows, time=time, memory=memory), _cost_notes(rows)


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


def _accuracy(cell: Accuracy | None) -> str:
    if cell is None:
        return _DASH
    deviation = "" if cell.deviation is None else f" ± {cell.deviation:.1f}"
    steps = f", {'unknown' if cell.steps is None else cell.steps} steps" if _is_short(cell) else ""
    return f"{cell.mean:.1f}{deviation} ({cell.seeds}; {cell.error:.1f}){steps}"


def _is_short(cell: Accuracy) -> bool:
    """Whether runs were too short to be compared with the papers, or do not say their steps."""
    return cell.steps is None or cell.steps < _FEW


def _mean(cell: Seeds, quantity: str) -> float | None:
    return statistics.fmean(row.value for row in cell[quantity].values()) if quantity in cell else None


def _cost(seconds: float | None, megabytes: float | None, time: bool, memory: bool) -> str:
    shown = [(seconds, 3600)] * time + [(megabytes, 1e3)] * memory
    texts = [_DASH if value is None else f"{value / unit:.2f}" for value, unit in shown]
    return _DASH if set(texts) == {_DASH} else " / ".join(texts)


def _shared(said: Iterable[tuple[Line, str, str]]) -> list[str]:
    """The notes on the line and task of each cell, once for all methods that share them."""
    by_text: dict[str, dict[str, None]] = {}
    for line, task, what in said:
        place = f"{task} ({line.preset})" if line.preset else task
        by_text.setdefault(f"{place}: {what}", {})[line.method] = None
    return [f"{what}; {', '.join(methods)}" for what, methods in by_text.items()]


def _notes(rows: Sequence[Row]) -> list[str]:
    """Notes on steps, test samples, positions, departures, guesses, and where it ran; one for all that share it."""

    def said(cell: Accuracy) -> str:
        steps = "unknown" if cell.steps is None else f"{cell.steps:,}"
        positions = "" if cell.positions is None else f", {cell.positions:,} positions"
        return f"{steps} steps, {cell.samples:,} test samples{positions}"

    cells = ((line, task, said(cell)) for line, row in lra_cells(rows).items() for task, cell in row.items())
    notes = [f"{note}." for note in _shared(cells)]
    tested = [row for row in rows if row.quantity == "test accuracy"]
    notes += lra_departures(tested) + lra_guesses(rows)
    places = dict.fromkeys(
        f"{row.device}, {row.dtype}, torch {row.torch}, commit {row.commit or 'unknown'}, {row.date}." for row in tested
    )
    return [*notes, *places]


def _cost_notes(rows: Sequence[Row]) -> list[str]:
    """Notes on the steps of the runs, one for all methods that share them, and on where the runs were made."""
    trained = (row for row in rows if row.study.startswith("train ") and row.quantity == _STEPS)
    steps = ((line_of(row), row.study.removeprefix("train "), f"{row.value:,.0f} steps") for row in trained)
    places = dict.fromkeys(f"{row.device}, {row.dtype}, {row.date}" for row in rows if row.quantity == _TIME)
    return ["mean over the seeds, evaluations and checkpoints included", *_shared(steps), *places]
