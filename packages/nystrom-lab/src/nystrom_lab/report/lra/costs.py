"""The hours and gigabytes that runs of the Long Range Arena took, beside those that Table 2 of Skyformer prints.

A cell is the mean over the seeds, for the whole training with its evaluations and checkpoints. The paper's runs had
50,000 steps on one NVIDIA V100 in half precision; notes below the table give the steps and devices of the runs here.
"""

import statistics
from collections.abc import Sequence

from nystrom_lab.measure.rows import Row
from nystrom_lab.report.lra.runs import Line, check_measured, line_of
from nystrom_lab.report.lra.tables import in_short
from nystrom_lab.report.printed import LRA_TASKS
from nystrom_lab.report.printed_ratios import SKYFORMER_TABLE_2
from nystrom_lab.report.table import Table, markdown_table, print_table

_DASH, _TIME, _MEMORY, _STEPS = "–", "training time", "peak memory", "steps"
_PRINTED = "  Skyformer T2"


def cost_lines(rows: Sequence[Row], *, time: bool, memory: bool) -> list[tuple[str, list[str]]]:
    """The lines of the table: a name, and a cell per task.

    Args:
        rows: Of `nystrom lra run` or `nystrom train`; training time, peak memory and steps are read.
        time: Show hours.
        memory: Show gigabytes; behind the hours if both are shown.

    Raises:
        ValueError: No training time among the rows, a number that is not finite, two different runs of one seed, or
            seeds that differ in steps, length, precision or device.
    """
    cells = _cells(rows)
    lines = []
    measured = [*dict.fromkeys(line for line, _ in cells)]
    for base in dict.fromkeys(line.base for line in measured):
        for line in (line for line in measured if line.base == base):
            row = [
                _text(cells.get((line, task), {}).get(_TIME), cells.get((line, task), {}).get(_MEMORY), time, memory)
                for task in LRA_TASKS
            ]
            lines.append((f"{line.method}, {line.preset}" if line.preset else line.method, row))
        printed = [name for name in SKYFORMER_TABLE_2 if name.split("-")[0] == base]
        if printed:
            there = SKYFORMER_TABLE_2[printed[0]]
            row = [_text(3600 * there[task][0], 1e3 * there[task][1], time, memory) for task in LRA_TASKS]
            lines.append((f"{_PRINTED}, {printed[0]}", row))
    return lines


def print_costs(rows: Sequence[Row], *, time: bool, memory: bool) -> None:
    """Print the table.

    Raises:
        ValueError: As `cost_lines`.
    """
    lines = cost_lines(rows, time=time, memory=memory)
    notes = "\n".join(_notes(rows))
    print_table(Table(_title(time, memory), ["", *LRA_TASKS], in_short(lines), notes=notes))


def cost_markdown(rows: Sequence[Row], *, time: bool, memory: bool) -> str:
    """The table as Markdown.

    Raises:
        ValueError: As `cost_lines`.
    """
    lines = [
        [f"*{name.strip()}*" if name.startswith(" ") else f"**{name}**", *cells]
        for name, cells in cost_lines(rows, time=time, memory=memory)
    ]
    return (
        markdown_table((_title(time, memory), *LRA_TASKS), lines)
        + "\n"
        + "\n".join(f"- {note}" for note in _notes(rows))
        + "\n"
    )


def _cells(rows: Sequence[Row]) -> dict[tuple[Line, str], dict[str, float]]:
    """Means over the seeds, by line and task, of seconds and megabytes."""
    found: dict[tuple[Line, str], dict[str, dict[int | None, float]]] = {}
    places: dict[tuple[Line, str], dict[str, dict[object, None]]] = {}
    for row in rows:
        if not row.study.startswith("train ") or row.quantity not in (_TIME, _MEMORY, _STEPS):
            continue
        check_measured(row)
        line, task = place = (line_of(row), row.study.removeprefix("train "))
        seeds = found.setdefault(place, {}).setdefault(row.quantity, {})
        if row.quantity == _STEPS:
            places.setdefault(place, {}).setdefault("steps", {})[f"{row.value:g}"] = None
        else:
            for what in ("n", "dtype", "device"):
                places.setdefault(place, {}).setdefault(what, {})[getattr(row, what)] = None
        if seeds.setdefault(row.seed, row.value) != row.value:
            raise ValueError(
                f"rows hold two runs of {line.method} ({line.preset}) on {task} with seed {row.seed}, one with "
                f"{row.quantity} {seeds[row.seed]:g} and one with {row.value:g}: tabulate them separately."
            )
    for (line, task), wanted in places.items():
        for what, different in wanted.items():
            if len(different) > 1:
                raise ValueError(
                    f"runs of {line.method} ({line.preset}) on {task} differ in {what}: "
                    f"{', '.join(map(str, different))}; a mean over seeds needs the same settings: "
                    "tabulate them separately."
                )
    if not any(_TIME in values for values in found.values()):
        raise ValueError("rows hold no training time; expected rows of `nystrom lra run` or `nystrom train`.")
    return {
        place: {name: statistics.fmean(each.values()) for name, each in values.items()}
        for place, values in found.items()
    }


def _text(seconds: float | None, megabytes: float | None, time: bool, memory: bool) -> str:
    shown = []
    if time:
        shown.append(_DASH if seconds is None else f"{seconds / 3600:.2f}")
    if memory:
        shown.append(_DASH if megabytes is None else f"{megabytes / 1e3:.2f}")
    return _DASH if set(shown) == {_DASH} else " / ".join(shown)


def _title(time: bool, memory: bool) -> str:
    return " / ".join([*(["hours"] if time else []), *(["GB"] if memory else [])])


def _notes(rows: Sequence[Row]) -> list[str]:
    """Notes on the steps of the runs, one for all methods that share them, and on where the runs were made."""
    shared: dict[str, dict[str, None]] = {}
    for row in rows:
        if row.study.startswith("train ") and row.quantity == _STEPS:
            line = line_of(row)
            preset = f" ({line.preset})" if line.preset else ""
            what = f"{row.study.removeprefix('train ')}{preset}: {row.value:,.0f} steps"
            shared.setdefault(what, {})[line.method] = None
    steps = [f"{what}; {', '.join(methods)}" for what, methods in shared.items()]
    places = dict.fromkeys(f"{row.device}, {row.dtype}, {row.date}" for row in rows if row.quantity == _TIME)
    return ["mean over the seeds, evaluations and checkpoints included", *steps, *places]
