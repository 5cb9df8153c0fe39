"""Time and memory of attention by number of tokens, in panels of related methods."""

import math
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
from nystrom_lab.report.plots.families import REFERENCES, families

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PASSES = ("forward", "forward+backward")
_REFERENCE_LINES = ("--", "-", ":")
# For methods that share a colour, such as nystrom-64 and nystrom-32; dashes are for skips.
_KIN_LINES: tuple[Any, ...] = ("-", ":", "-.", (0, (3, 1, 1, 1, 1, 1)))


def draw_efficiency(rows: Sequence[Row], path: Path) -> None:
    """Write the figure of `efficiency_figure`.

    Args:
        rows: Rows of the study "efficiency".
        path: The file, .png or .svg.

    Raises:
        ValueError: No rows that were measured, or a file of another format.
    """
    with house_style():
        save_figure(efficiency_figure(rows), path)


def efficiency_figure(rows: Sequence[Row]) -> "Figure":
    """Time and memory over the number of tokens, on logarithmic axes.

    A column of panels holds the methods of one family, a row of panels one quantity of one pass. Exact attention is in
    every panel, in grey. A line is the median, its band the quartiles. A method with its skip is dashed, in the colour
    of the method without. Missing measurements are omitted.

    Args:
        rows: Rows of the study "efficiency".

    Raises:
        ValueError: No rows that were measured.
    """
    measured = [row for row in rows if not math.isnan(row.value) and row.n is not None]
    if not measured:
        raise ValueError("rows hold no measurement; expected at least one value that is not NaN.")
    lines = [(timed, what) for timed in _PASSES for what in ("time", "memory") if _those(measured, f"{timed} {what}")]
    columns = families(row.method for row in measured)
    references = [name for name in REFERENCES if any(row.method == name for row in measured)]
    figure = figure_of(max(PAGE, 0.6 + 2.9 * len(columns)), 2.1 + 1.75 * len(lines))
    panels = figure.subplots(len(lines), len(columns), squeeze=False, sharex=True, sharey="row")
    for column, (family, methods) in enumerate(columns.items()):
        looks = _looks(references, methods)
        for line, (timed, what) in enumerate(lines):
            axes, those = panels[line][column], _those(measured, f"{timed} {what}")
            for method, style in looks.items():
                _draw_method(axes, [row for row in those if row.method == method], style)
            _tokens_axis(axes, {row.n for row in measured if row.n is not None})
            if column == 0:
                axes.set_ylabel(f"{timed}\n{_NAMES[what]} ({those[0].unit})")
        panels[0][column].set_title(family)
        panels[-1][column].set_xlabel("tokens n")
        panels[-1][column].legend(loc="upper center", bbox_to_anchor=(0.5, -0.32), handlelength=3)
    first = measured[0]
    figure.suptitle(f"{first.words}, {first.dtype}, {first.device}\nlines: medians; bands: quartiles", fontsize=7.5)
    return figure


_NAMES = {"time": "time per call", "memory": "peak memory"}


def _those(rows: Iterable[Row], quantity: str) -> list[Row]:
    return [row for row in rows if row.quantity == quantity]


def _looks(references: Sequence[str], methods: Sequence[str]) -> dict[str, dict[str, Any]]:
    """How each line of a panel is drawn: references in grey, a method with and without its skip in one colour."""
    looks: dict[str, dict[str, Any]] = {
        name: {"color": REFERENCE, "linestyle": style, "marker": "", "label": name}
        for name, style in zip(references, _REFERENCE_LINES, strict=False)
    }
    plain = dict.fromkeys(method.removesuffix("+skip") for method in methods)
    taken: list[tuple[str, str]] = []
    found: dict[str, tuple[str, str, Any]] = {}
    for method in plain:
        colour, marker, _ = method_look(method)
        kin = sum(colour == other for other, _ in taken)
        while (colour, marker) in taken:
            marker = MARKERS[(MARKERS.index(marker) + 1) % len(MARKERS)] if marker in MARKERS else MARKERS[0]
        taken.append((colour, marker))
        found[method] = (colour, marker, _KIN_LINES[kin % len(_KIN_LINES)])
    for method in methods:
        colour, marker, line = found[method.removesuffix("+skip")]
        dashed = method.endswith("+skip") and method.removesuffix("+skip") in methods
        looks[method] = {
            "color": colour,
            "marker": marker,
            "linestyle": "--" if dashed else line,
            "markerfacecolor": "white" if dashed else colour,
            "label": method,
        }
    return looks


def _draw_method(axes: "Axes", rows: Sequence[Row], style: Mapping[str, Any]) -> None:
    """One line with its band; a method without a point keeps its place in the legend."""
    rows = sorted(rows, key=lambda row: row.n or 0)
    ns = [row.n or 0 for row in rows]
    axes.plot(ns, [row.value for row in rows], **style)
    low = [row.value if row.low is None else row.low for row in rows]
    high = [row.value if row.high is None else row.high for row in rows]
    axes.fill_between(ns, low, high, color=style["color"], alpha=0.15, linewidth=0)


def _tokens_axis(axes: "Axes", lengths: Iterable[int]) -> None:
    from matplotlib.ticker import NullLocator

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sorted(lengths), [str(n) for n in sorted(lengths)], rotation=30)
    axes.xaxis.set_minor_locator(NullLocator())
    plain_numbers(axes, "y")
    axes.grid(True)
