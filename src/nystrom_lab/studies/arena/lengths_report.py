"""What the rows of the study of lengths beyond the arena say: a table, verdicts and a figure."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nystrom_lab.measure.rows import Row
from nystrom_lab.report.plots.canvas import PAGE, figure_of, method_look, plain_numbers
from nystrom_lab.report.summary import Verdict
from nystrom_lab.report.table import Table
from nystrom_lab.studies.arena.settled_steps import MEMORY, TIME

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

EXACT = "softmax"
METHODS = (EXACT, "nystrom-32", "near_far")
LOSS, ESTIMATE = "train loss", "estimated training time"
# How many times the limit exact attention has to need, and the limit in minutes, for rows without the fact "over".
_CLEARLY, _LIMIT = 1.5, 20.0


def _cases(rows: Sequence[Row]) -> dict[str, int]:
    """Tokens of the cases that have rows, by name, the shortest first."""
    found = {row.fact("task"): row.n or 0 for row in rows}
    return dict(sorted(found.items(), key=lambda item: item[1]))


def _row(rows: Sequence[Row], case: str, method: str, quantity: str) -> Row | None:
    """The last row of a quantity for a case and method: the only one, or that of the last step."""
    return next((row for row in reversed(_of(rows, case, method, quantity))), None)


def _of(rows: Sequence[Row], case: str, method: str, quantity: str) -> list[Row]:
    return [row for row in rows if (row.fact("task"), row.method, row.quantity) == (case, method, quantity)]


def _ran(rows: Sequence[Row], case: str, method: str) -> str:
    """How long a training took, or why it was not begun; "" if neither is known."""
    time, estimate = (_row(rows, case, method, quantity) for quantity in ("training time", ESTIMATE))
    if time is not None:
        return f"{time.value / 60:.1f} min"
    return "" if estimate is None else f"not begun, {estimate.note}"


def tables(rows: Sequence[Row]) -> Sequence[Table]:
    """Costs of a step, and what became of the training, for each case and method."""
    lines = []
    for case, n in _cases(rows).items():
        for method in METHODS:
            costs = [_row(rows, case, method, quantity) for quantity in (TIME, MEMORY)]
            losses = [row.value for row in _of(rows, case, method, LOSS)]
            if any(row is not None for row in costs) or losses or _ran(rows, case, method):
                shown = ["" if row is None else _number(row.value) for row in costs]
                fell = f"{losses[0]:.3f} to {losses[-1]:.3f}" if losses else ""
                lines.append([case, method, _ran(rows, case, method), str(n), *shown, fell])
    heads = ["task", "attention", "training", "tokens", "ms", "MB", "loss"]
    title = "a training step of about 32,768 tokens: time, memory; what became of the training; its first and last loss"
    return [Table(title, heads, lines, left=3)]


def _number(value: float) -> str:
    """Three digits, or all before the decimal point; "" for what was not run."""
    return "" if math.isnan(value) else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def verdicts(rows: Sequence[Row]) -> Sequence[Verdict]:
    """A verdict for each length."""
    return [_verdict(rows, case, n) for case, n in _cases(rows).items()]


def _verdict(rows: Sequence[Row], case: str, n: int) -> Verdict:
    trained = {method: _row(rows, case, method, "training time") is not None for method in METHODS}
    known = {method: bool(_ran(rows, case, method)) for method in METHODS}
    linear = any(trained[method] for method in METHODS if method != EXACT)
    agrees = None
    if trained[EXACT] or all(known.values()):
        agrees = linear and not trained[EXACT]
    elif known[EXACT] and linear:
        agrees = True
    if agrees and _over(rows, case) < _CLEARLY:
        agrees = None
    said = [f"{method} {_ran(rows, case, method) or 'not trained yet'}" for method in METHODS]
    return Verdict(f"At {n:,} tokens ({case}) only a linear method trains here.", agrees, f"{'; '.join(said)}.")


def _over(rows: Sequence[Row], case: str) -> float:
    """How many times the limit exact attention, which was not begun, would need."""
    row = _row(rows, case, EXACT, ESTIMATE)
    assert row is not None, "what was not begun has its estimate"
    return float(row.fact("over") or row.value / _LIMIT)


def figures(rows: Sequence[Row], folder: Path) -> "Mapping[str, Figure]":
    """Time and memory of a step over the tokens, and below them the loss of each case over the minutes of training."""
    cases = _cases(rows)
    figure = figure_of(PAGE, 4.6)
    grid = figure.add_gridspec(2, 2 * max(1, len(cases)))
    half = max(1, len(cases))
    for place, (quantity, unit) in enumerate(((TIME, "ms"), (MEMORY, "MB"))):
        axes = figure.add_subplot(grid[0, place * half : (place + 1) * half])
        _draw_costs(axes, rows, cases, quantity)
        axes.set(title=f"{quantity}, {unit}", xlabel="tokens of a sample")
    for place, case in enumerate(cases):
        axes = figure.add_subplot(grid[1, 2 * place : 2 * place + 2])
        for method in METHODS:
            points = [(float(row.fact("seconds")) / 60, row.value) for row in _of(rows, case, method, LOSS)]
            if points:
                _draw_line(axes, method, points, marked=False)
        axes.set(title=case, xlabel="minutes", ylabel="" if place else "training loss")
        axes.grid(True)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(METHODS))
    return {"": figure}


def _draw_costs(axes: "Axes", rows: Sequence[Row], cases: Mapping[str, int], quantity: str) -> None:
    axes.set(xscale="log")
    for method in METHODS:
        found = [(n, _row(rows, case, method, quantity)) for case, n in cases.items()]
        points = [(float(n), row.value) for n, row in found if row is not None and not math.isnan(row.value)]
        if points:
            _draw_line(axes, method, points, marked=True)
    axes.set_xticks(list(cases.values()), [str(n) for n in cases.values()])
    axes.minorticks_off()
    if quantity == TIME:
        axes.set(yscale="log")
        plain_numbers(axes, "y")
    else:
        axes.set_ylim(0, 1.1 * axes.get_ylim()[1])
    axes.grid(True)


def _draw_line(axes: "Axes", method: str, points: Sequence[tuple[float, float]], *, marked: bool) -> None:
    look = method_look(method)
    marker = (look.marker or ".") if marked else ""
    axes.plot(*zip(*points, strict=True), color=look.colour, linestyle=look.line, marker=marker, label=method)
