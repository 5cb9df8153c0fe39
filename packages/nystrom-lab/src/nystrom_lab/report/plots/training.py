"""Time and memory of a training step: a panel per task, with a line per method and a dot for each measurement."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nystrom_lab.measure.rows import Row
from nystrom_lab.report.plots.canvas import (
    PAGE,
    REFERENCE,
    figure_of,
    house_style,
    method_look,
    plain_numbers,
    save_figure,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NAMES = {"time": "time per step\n(ms)", "memory": "memory beyond\nthe model (MB)"}


def draw_training(rows: Sequence[Row], path: Path) -> None:
    """Write the figure of `training_figure`.

    Args:
        rows: Rows of the study "training".
        path: The file, .png or .svg.

    Raises:
        ValueError: No rows that were measured, or a file of another format.
    """
    with house_style():
        save_figure(training_figure(rows), path)


def training_figure(rows: Sequence[Row]) -> "Figure":
    """Time and memory of a training step as dots on a logarithmic axis: a column of panels per task.

    A dashed line marks fused exact attention, where it was measured. Missing measurements are marked.

    Args:
        rows: Rows of the study "training".

    Raises:
        ValueError: No rows that were measured.
    """
    measured = [row for row in rows if not math.isnan(row.value)]
    if not measured:
        raise ValueError("rows hold no measurement; expected at least one value that is not NaN.")
    tasks = list(dict.fromkeys(row.quantity.partition(" ")[0] for row in rows))
    methods = list(dict.fromkeys(row.method for row in rows))
    sizes = {row.quantity.partition(" ")[0]: f"n = {row.n}, b={row.facts['b']}" for row in rows}
    figure = figure_of(PAGE, 1.1 + 0.36 * len(methods))
    panels = figure.subplots(2, len(tasks), squeeze=False, sharex="row", sharey=True)
    for line, what in zip(panels, ("time", "memory"), strict=True):
        for axes, task in zip(line, tasks, strict=True):
            found = {row.method: row for row in measured if row.quantity == f"{task} step {what}"}
            _draw_panel(axes, methods, found)
        line[0].set_ylabel(_NAMES[what])
    for axes, task in zip(panels[0], tasks, strict=True):
        axes.set_title(f"{task}\n{sizes[task]}", fontsize=7.5)
    # The first method on top; all panels share the axis.
    panels[0][0].set_yticks(range(len(methods)), methods)
    panels[0][0].set_ylim(len(methods) - 0.4, -0.6)
    first = measured[0]
    where = f"a training step of the LRA model, {first.dtype}, {first.device}"
    figure.suptitle(f"{where}; dots: medians, bars: quartiles, dashed: softmax", fontsize=7.5)
    return figure


def _draw_panel(axes: "Axes", methods: Sequence[str], found: dict[str, Row]) -> None:
    axes.set_xscale("log")
    if "softmax" in found:
        axes.axvline(found["softmax"].value, color=REFERENCE, linestyle="--", linewidth=1)
    for place, method in enumerate(methods):
        if (row := found.get(method)) is None:
            axes.annotate(
                "not measured", (0.98, place), xycoords=("axes fraction", "data"), ha="right", va="center",
                fontsize=6.5, color=REFERENCE,
            )  # fmt: skip
            continue
        low, high = (row.value if end is None else end for end in (row.low, row.high))
        look = method_look(method)
        axes.plot([low, high], [place, place], color=look.colour, linewidth=2)
        axes.plot([row.value], [place], color=look.colour, marker=look.marker or "o", linestyle="", label=method)
    plain_numbers(axes, "x")
    axes.tick_params(axis="x", which="both", labelsize=6, rotation=60)
    axes.grid(True)
