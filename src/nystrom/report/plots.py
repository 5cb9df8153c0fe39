"""Plots of rows, as PNG files: colours that colour-blind readers tell apart, and a marker each for print in grey.

Drawn with matplotlib's Agg canvas; no window, and no state shared with a caller's own plots.
"""

import csv
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nystrom.measure.rows import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito (2008), without its yellow, which is too faint on white.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#7F7F7F", "#882255")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
DPI = 150
_CURVE_COLUMNS = ("step", "quantity", "value", "seconds")


def draw_study(rows: Sequence[Row], png: Path) -> None:
    """Draw the rows of a study: `draw_training` or `draw_efficiency`.

    Raises:
        ValueError: No rows that were measured.
    """
    training = bool(rows) and rows[0].study == "training"
    (draw_training if training else draw_efficiency)(rows, png)


def draw_training(rows: Sequence[Row], png: Path) -> None:
    """Draw time and memory of a training step, on a logarithmic axis: a group of bars per task, a bar per method.

    What was not measured has no bar.

    Args:
        rows: Rows of the study "training".
        png: Where to.

    Raises:
        ValueError: No rows that were measured.
    """
    measured = [row for row in rows if not math.isnan(row.value)]
    if not measured:
        raise ValueError("rows hold no measurement; expected at least one value that is not NaN.")
    tasks = list(dict.fromkeys(row.quantity.partition(" ")[0] for row in rows))
    methods = list(dict.fromkeys(row.method for row in rows))
    figure = figure_of(2.6 + 2.2 * len(tasks), 7.5)
    panels = figure.subplots(2, 1, sharex=True)
    for axes, what in zip(panels, ("time", "memory"), strict=True):
        values = {(row.method, row.quantity.partition(" ")[0]): row for row in measured if row.quantity.endswith(what)}
        width = 0.85 / len(methods)
        for i, method in enumerate(methods):
            places = [place + (i - (len(methods) - 1) / 2) * width for place in range(len(tasks))]
            found = [
                (x, values[method, task]) for x, task in zip(places, tasks, strict=True) if (method, task) in values
            ]
            axes.bar(
                [x for x, _ in found],
                [row.value for _, row in found],
                width,
                color=COLOURS[i % len(COLOURS)],
                # Colours come again after the last; hatches tell them apart.
                hatch="//" if i >= len(COLOURS) else "",
                edgecolor="white",
                label=method,
            )
        axes.set_yscale("log")
        _plain_numbers(axes)
        axes.set_ylabel("time per step (ms)" if what == "time" else "peak memory beyond the model (MB)")
        axes.grid(alpha=0.3, axis="y")
        axes.set_axisbelow(True)
    sizes = {row.quantity.partition(" ")[0]: f"n = {row.n}, {row.sizes.split()[0]}" for row in rows}
    panels[1].set_xticks(range(len(tasks)), [f"{task}\n{sizes[task]}" for task in tasks])
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    figure.suptitle(f"a training step of the LRA model, {measured[0].dtype}, {measured[0].device}", fontsize=10)
    figure.savefig(png, dpi=DPI)


def draw_efficiency(rows: Sequence[Row], png: Path) -> None:
    """Draw time and memory over the number of tokens, on logarithmic axes: a row of panels per pass.

    A method's line is the median, its band the spread; with its skip it is dashed, in the same colour. What was not
    measured is absent.

    Args:
        rows: Rows of the study "efficiency".
        png: Where to.

    Raises:
        ValueError: No rows that were measured.
    """
    measured = [row for row in rows if not math.isnan(row.value) and row.n is not None]
    if not measured:
        raise ValueError("rows hold no measurement; expected at least one value that is not NaN.")
    passes = [name for name in ("forward", "forward+backward") if any(_is(row, name) for row in measured)]
    looks = _looks(dict.fromkeys(row.method for row in measured))
    figure = figure_of(12.0, 4.2 * len(passes))
    panels = figure.subplots(len(passes), 2, squeeze=False)
    for line, name in zip(panels, passes, strict=True):
        for axes, what in zip(line, ("time", "memory"), strict=True):
            those = [row for row in measured if row.quantity == f"{name} {what}"]
            for method, look in looks.items():
                _draw_method(axes, [row for row in those if row.method == method], look)
            axes.set_title(name, fontsize=11)
            unit = those[0].unit if those else ""
            axes.set_ylabel(f"time per call ({unit})" if what == "time" else f"peak memory beyond the inputs ({unit})")
            _tokens_axis(axes, {row.n for row in measured if row.n is not None})
    figure.legend(
        *panels[0][0].get_legend_handles_labels(), loc="outside right center", frameon=False, handlelength=3.5
    )
    first = measured[0]
    figure.suptitle(f"{first.sizes}, {first.dtype}, {first.device}", fontsize=10)
    figure.savefig(png, dpi=DPI)


def draw_curves(csv_path: Path, png: Path) -> None:
    """Draw training curves: a panel for each last word of a quantity's name (loss, accuracy, ...).

    Args:
        csv_path: A file with the columns step, quantity, value and, if any, seconds, such as
            `100,train loss,2.31,12.5`.
        png: Where to.

    Raises:
        ValueError: The file is missing, has other columns, a cell that is no number, or no rows.
    """
    curves = {name: [(step, value) for step, value, _ in points] for name, points in read_curves(csv_path).items()}
    kinds = list(dict.fromkeys(name.split()[-1] for name in curves))
    parts = list(dict.fromkeys(_part(name) for name in curves))
    figure = figure_of(5.5 * len(kinds), 4.0)
    panels = figure.subplots(1, len(kinds), squeeze=False, sharex=True)[0]
    for axes, kind in zip(panels, kinds, strict=True):
        for name in (name for name in curves if name.split()[-1] == kind):
            # "validation" looks the same in every panel.
            i = parts.index(_part(name)) + 1
            steps, values = zip(*sorted(curves[name]), strict=True)
            marker = MARKERS[i % len(MARKERS)] if len(steps) <= 50 else ""
            color = COLOURS[i % len(COLOURS)]
            axes.plot(steps, values, color=color, marker=marker, markersize=5, linewidth=1.3, label=_part(name))
        axes.set_ylabel(kind)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)
    figure.savefig(png, dpi=DPI)


def _part(name: str) -> str:
    """What a quantity is of: "train" in "train loss"."""
    return name.rpartition(" ")[0] or name


def _is(row: Row, name: str) -> bool:
    return row.quantity in (f"{name} time", f"{name} memory")


def figure_of(width: float, height: float) -> "Figure":
    """A figure of its own, on the Agg canvas."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _looks(methods: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Colour, marker and line of each method; one with its skip differs from the one without by its dashes."""
    methods = list(methods)
    plain = list(dict.fromkeys(method.removesuffix("+skip") for method in methods))
    looks = {}
    for method in methods:
        i = plain.index(method.removesuffix("+skip"))
        dashed = method.endswith("+skip") and method.removesuffix("+skip") in methods
        looks[method] = {
            "color": COLOURS[i % len(COLOURS)],
            # Colours come again after the last, with other markers.
            "marker": MARKERS[(i + 4 * (i // len(COLOURS))) % len(MARKERS)],
            "linestyle": "--" if dashed else "-",
            "markerfacecolor": "white" if dashed else COLOURS[i % len(COLOURS)],
            "label": method,
        }
    return looks


def _draw_method(axes: "Axes", rows: Sequence[Row], look: dict[str, Any]) -> None:
    """One line with its band; a method without a point keeps its place in the legend."""
    rows = sorted(rows, key=lambda row: row.n or 0)
    ns = [row.n or 0 for row in rows]
    axes.plot(ns, [row.value for row in rows], markersize=5, linewidth=1.3, **look)
    low = [row.value if row.low is None else row.low for row in rows]
    high = [row.value if row.high is None else row.high for row in rows]
    axes.fill_between(ns, low, high, color=look["color"], alpha=0.15, linewidth=0)


def _tokens_axis(axes: "Axes", lengths: Iterable[int]) -> None:
    from matplotlib.ticker import NullLocator

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sorted(lengths), [str(n) for n in sorted(lengths)], rotation=30)
    axes.xaxis.set_minor_locator(NullLocator())
    _plain_numbers(axes)
    axes.set_xlabel("tokens n")
    axes.grid(alpha=0.3)


def read_curves(csv_path: Path) -> dict[str, list[tuple[float, float, float]]]:
    """Steps, values and seconds of training of each quantity; NaN for the seconds where the file has none.

    Raises:
        ValueError: The file is missing, has other columns, a cell that is no number, or no rows.
    """
    columns = f"{','.join(_CURVE_COLUMNS[:3])}, and {_CURVE_COLUMNS[3]} if any"
    if not Path(csv_path).is_file():
        raise ValueError(f"{csv_path} is not a file; expected a CSV file with the columns {columns}.")
    curves: dict[str, list[tuple[float, float, float]]] = {}
    with Path(csv_path).open(encoding="utf-8", errors="replace", newline="") as file:
        reader = csv.reader(file)
        header = tuple(next(reader, []))
        if header not in (_CURVE_COLUMNS, _CURVE_COLUMNS[:3]):
            raise ValueError(f"{csv_path}, line 1 is {','.join(header)!r}; expected {columns}.")
        for cells in reader:
            try:
                step, quantity, value, seconds = cells if len(header) == 4 else (*cells, "nan")
                quantity = quantity.strip() or "value"
                curves.setdefault(quantity, []).append((float(step), float(value), float(seconds)))
            except ValueError:
                raise ValueError(
                    f"{csv_path}, line {reader.line_num} is {','.join(cells)!r}; expected a step, a quantity, a value"
                    f"{', seconds' if len(header) == 4 else ''}."
                ) from None
    if not curves:
        raise ValueError(f"{csv_path} holds no rows below its header; expected at least one.")
    return curves


def _plain_numbers(axes: "Axes") -> None:
    """Write 2000 rather than 2 x 10^3 along a logarithmic axis, between powers of ten where there is room."""
    from matplotlib.ticker import FuncFormatter, LogFormatterSciNotation

    between = LogFormatterSciNotation()
    between.set_axis(axes.yaxis)

    def write(x: float, place: int | None) -> str:
        between.set_locs(axes.yaxis.get_minorticklocs())
        return f"{x:g}" if between(x, place) else ""

    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(FuncFormatter(write))
