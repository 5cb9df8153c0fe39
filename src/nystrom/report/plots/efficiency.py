"""Time and memory of attention over the number of tokens, in panels of methods that belong together."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nystrom.measure.rows import Row
from nystrom.report.plots.canvas import REFERENCE, figure_of, look, plain_numbers, save_figure
from nystrom.report.plots.families import REFERENCES, families

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PASSES = ("forward", "forward+backward")
_REFERENCE_LINES = ("--", "-", ":")


def draw_efficiency(rows: Sequence[Row], path: Path) -> None:
    """Draw time and memory over the number of tokens, on logarithmic axes.

    A column of panels holds the methods of one family, a row one quantity of one pass. Exact attention is in every
    panel, in grey. A line is the median, its band the quartiles; a method with its skip has the colour of the one
    without, and dashes. What was not measured is absent.

    Args:
        rows: Rows of the study "efficiency".
        path: The file, .png or .svg.

    Raises:
        ValueError: No rows that were measured, or a file of another format.
    """
    measured = [row for row in rows if not math.isnan(row.value) and row.n is not None]
    if not measured:
        raise ValueError("rows hold no measurement; expected at least one value that is not NaN.")
    lines = [(timed, what) for timed in _PASSES for what in ("time", "memory") if _those(measured, f"{timed} {what}")]
    columns = families(row.method for row in measured)
    references = [name for name in REFERENCES if any(row.method == name for row in measured)]
    figure = figure_of(1.2 + 4.2 * len(columns), 1.4 + 2.9 * len(lines))
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
        panels[0][column].set_title(family, fontsize=11)
        panels[-1][column].set_xlabel("tokens n")
        panels[-1][column].legend(
            loc="upper center", bbox_to_anchor=(0.5, -0.28), frameon=False, ncols=2, fontsize=8, handlelength=3
        )
    first = measured[0]
    figure.suptitle(f"{first.sizes}, {first.dtype}, {first.device}; bands: quartiles", fontsize=9)
    save_figure(figure, path)


_NAMES = {"time": "time per call", "memory": "peak memory beyond the inputs"}


def _those(rows: Iterable[Row], quantity: str) -> list[Row]:
    return [row for row in rows if row.quantity == quantity]


def _looks(references: Sequence[str], methods: Sequence[str]) -> dict[str, dict[str, Any]]:
    """How each line of a panel is drawn: references in grey, a method and the same with its skip in one colour."""
    looks: dict[str, dict[str, Any]] = {
        name: {"color": REFERENCE, "linestyle": style, "marker": "", "label": name}
        for name, style in zip(references, _REFERENCE_LINES, strict=False)
    }
    plain = list(dict.fromkeys(method.removesuffix("+skip") for method in methods))
    for method in methods:
        colour, marker = look(plain.index(method.removesuffix("+skip")))
        dashed = method.endswith("+skip") and method.removesuffix("+skip") in methods
        looks[method] = {
            "color": colour,
            "marker": marker,
            "linestyle": "--" if dashed else "-",
            "markerfacecolor": "white" if dashed else colour,
            "label": method,
        }
    return looks


def _draw_method(axes: "Axes", rows: Sequence[Row], style: Mapping[str, Any]) -> None:
    """One line with its band; a method without a point keeps its place in the legend."""
    rows = sorted(rows, key=lambda row: row.n or 0)
    ns = [row.n or 0 for row in rows]
    axes.plot(ns, [row.value for row in rows], markersize=4.5, linewidth=1.3, **style)
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
    axes.grid(alpha=0.3)
