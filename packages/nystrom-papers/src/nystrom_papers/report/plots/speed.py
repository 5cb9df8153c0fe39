"""Figures of the speed measurements: attention or models by number of tokens, and training steps by task."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nystrom_lab.measure.rows import Row
from nystrom_lab.report.plots.canvas import (
    MARKERS,
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

_PASSES = ("forward", "forward+backward")
# In every panel, for comparison; those that are there are drawn with these lines, in order.
REFERENCES, _REFERENCE_LINES = ("softmax-materialised", "softmax", "floor"), ("--", "-", ":")
# In the order of the panels. Names are those of the rows, without the number at the end.
_FAMILIES = {
    "landmarks, clusters and Gaussian kernels": (
        "nystrom", "nystrom-triton", "near_far", "near_far-triton", "skyformer", "skyformer-triton",
        "skyformer_softmax", "kernelized",
    ),
    "other methods": ("linear", "performer", "linformer", "informer", "reformer", "longformer", "bigbird"),
}  # fmt: skip
_OTHERS = "other implementations"
# For methods that share a colour, such as nystrom-64 and nystrom-32; dashes are for skips.
_KIN_LINES: tuple[Any, ...] = ("-", ":", "-.", (0, (3, 1, 1, 1, 1, 1)))


def draw_study(rows: Sequence[Row], path: Path) -> None:
    """Draw the rows of the study "efficiency", "model" or "training" into a file, .png or .svg.

    Raises:
        ValueError: No rows that were measured, or a file of another format.
    """
    with house_style():
        save_figure(speed_figure(rows), path)


def speed_figure(rows: Sequence[Row]) -> "Figure":
    """The figure of the study to which the rows belong; what was not measured is left out.

    Raises:
        ValueError: No rows that were measured.
    """
    measured = [row for row in rows if not math.isnan(row.value) and row.n is not None]
    if not measured:
        raise ValueError("rows hold no measurement; expected at least one value that is not NaN.")
    return _by_task(rows, measured) if rows[0].study == "training" else _by_length(measured)


def _by_length(measured: Sequence[Row]) -> "Figure":
    """Time and memory over the number of tokens, on logarithmic axes.

    A column of panels holds the methods of one family, a row of panels one quantity of one pass. Exact attention is in
    every panel, in grey. A line is the median, its band the quartiles. A method with its skip is dashed, in the colour
    of the method without.
    """
    those = {
        (timed, what): rows
        for timed in _PASSES
        for what in ("time", "memory")
        if (rows := [row for row in measured if row.quantity == f"{timed} {what}"])
    }
    columns = families(row.method for row in measured)
    references = [name for name in REFERENCES if any(row.method == name for row in measured)]
    figure = figure_of(max(PAGE, 0.6 + 2.9 * len(columns)), 2.1 + 1.75 * len(those))
    panels = figure.subplots(len(those), len(columns), squeeze=False, sharex=True, sharey="row")
    for column, (family, methods) in enumerate(columns.items()):
        looks = _looks(references, methods)
        for line, ((timed, what), rows) in enumerate(those.items()):
            axes = panels[line][column]
            for method, style in looks.items():
                _draw_method(axes, [row for row in rows if row.method == method], style)
            _tokens_axis(axes, {row.n for row in measured if row.n is not None})
            if column == 0:
                name = {"time": "time per call", "memory": "peak memory"}[what]
                axes.set_ylabel(f"{timed}\n{name} ({rows[0].unit})")
        panels[0][column].set_title(family)
        panels[-1][column].set_xlabel("tokens n")
        panels[-1][column].legend(loc="upper center", bbox_to_anchor=(0.5, -0.32), handlelength=3)
    first = measured[0]
    figure.suptitle(f"{first.words}, {first.dtype}, {first.device}\nlines: medians; bands: quartiles", fontsize=7.5)
    return figure


def families(methods: Iterable[str]) -> dict[str, list[str]]:
    """The methods of each panel, those of `REFERENCES` left out; a single panel holds all methods."""
    members: dict[str, list[str]] = {name: [] for name in (*_FAMILIES, _OTHERS)}
    for method in dict.fromkeys(methods):
        base = re.sub(r"(-\d+)?(\+skip)?(, .*)?$", "", method)
        if method not in REFERENCES:
            members[next((name for name, bases in _FAMILIES.items() if base in bases), _OTHERS)].append(method)
    return {name: inside for name, inside in members.items() if inside} or {"exact attention": []}


def _looks(references: Sequence[str], methods: Sequence[str]) -> dict[str, dict[str, Any]]:
    """How each line of a panel is drawn: references in grey, a method with and without its skip in one colour."""
    looks: dict[str, dict[str, Any]] = {
        name: {"color": REFERENCE, "linestyle": style, "marker": "", "label": name}
        for name, style in zip(references, _REFERENCE_LINES, strict=False)
    }
    taken: list[tuple[str, str]] = []
    drawn: dict[str, tuple[str, str, Any]] = {}
    for method in dict.fromkeys(method.removesuffix("+skip") for method in methods):
        colour, marker, _ = method_look(method)
        kin = sum(colour == other for other, _ in taken)
        while (colour, marker) in taken:
            marker = MARKERS[(MARKERS.index(marker) + 1) % len(MARKERS)] if marker in MARKERS else MARKERS[0]
        taken.append((colour, marker))
        drawn[method] = (colour, marker, _KIN_LINES[kin % len(_KIN_LINES)])
    for method in methods:
        colour, marker, line = drawn[method.removesuffix("+skip")]
        dashed = method.endswith("+skip") and method.removesuffix("+skip") in methods
        looks[method] = {
            "color": colour,
            "marker": marker,
            "linestyle": "--" if dashed else line,
            "markerfacecolor": "white" if dashed else colour,
            "label": method,
        }
    return looks


def _ends(row: Row) -> tuple[float, float]:
    """Both ends of the spread of a row; its value where it has none."""
    return (row.value if row.low is None else row.low), (row.value if row.high is None else row.high)


def _draw_method(axes: "Axes", rows: Sequence[Row], style: Mapping[str, Any]) -> None:
    """One line with its band; a method without a point keeps its place in the legend."""
    rows = sorted(rows, key=lambda row: row.n or 0)
    ns = [row.n or 0 for row in rows]
    axes.plot(ns, [row.value for row in rows], **style)
    low, high = ([_ends(row)[end] for row in rows] for end in (0, 1))
    axes.fill_between(ns, low, high, color=style["color"], alpha=0.15, linewidth=0)


def _tokens_axis(axes: "Axes", lengths: Iterable[int]) -> None:
    from matplotlib.ticker import NullLocator

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sorted(lengths), [str(n) for n in sorted(lengths)], rotation=30)
    axes.xaxis.set_minor_locator(NullLocator())
    plain_numbers(axes, "y")
    axes.grid(True)


def _by_task(rows: Sequence[Row], measured: Sequence[Row]) -> "Figure":
    """Time and memory of a training step as dots on a logarithmic axis: a column of panels per task, a line per method.

    A dashed line marks fused exact attention, where it was measured. Missing measurements are marked.
    """
    sizes = {row.quantity.partition(" ")[0]: f"n = {row.n}, b={row.facts['b']}" for row in rows}
    methods = list(dict.fromkeys(row.method for row in rows))
    figure = figure_of(PAGE, 1.1 + 0.36 * len(methods))
    panels = figure.subplots(2, len(sizes), squeeze=False, sharex="row", sharey=True)
    names = {"time": "time per step\n(ms)", "memory": "memory beyond\nthe model (MB)"}
    for line, (what, name) in zip(panels, names.items(), strict=True):
        for axes, task in zip(line, sizes, strict=True):
            by_method = {row.method: row for row in measured if row.quantity == f"{task} step {what}"}
            _draw_task(axes, methods, by_method)
        line[0].set_ylabel(name)
    for axes, (task, size) in zip(panels[0], sizes.items(), strict=True):
        axes.set_title(f"{task}\n{size}", fontsize=7.5)
    # The first method on top; all panels share the axis.
    panels[0][0].set_yticks(range(len(methods)), methods)
    panels[0][0].set_ylim(len(methods) - 0.4, -0.6)
    first = measured[0]
    where = f"a training step of the LRA model, {first.dtype}, {first.device}"
    figure.suptitle(f"{where}; dots: medians, bars: quartiles, dashed: softmax", fontsize=7.5)
    return figure


def _draw_task(axes: "Axes", methods: Sequence[str], by_method: Mapping[str, Row]) -> None:
    axes.set_xscale("log")
    if "softmax" in by_method:
        axes.axvline(by_method["softmax"].value, color=REFERENCE, linestyle="--", linewidth=1)
    for place, method in enumerate(methods):
        if (row := by_method.get(method)) is None:
            axes.annotate(
                "not measured", (0.98, place), xycoords=("axes fraction", "data"), ha="right", va="center",
                fontsize=6.5, color=REFERENCE,
            )  # fmt: skip
            continue
        look = method_look(method)
        axes.plot(_ends(row), [place, place], color=look.colour, linewidth=2)
        axes.plot([row.value], [place], color=look.colour, marker=look.marker or "o", linestyle="", label=method)
    plain_numbers(axes, "x")
    axes.tick_params(axis="x", which="both", labelsize=6, rotation=60)
    axes.grid(True)
