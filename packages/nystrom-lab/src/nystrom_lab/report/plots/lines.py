"""Lines of methods over a size, in panels, with bands; if there are many lines, they are named at their ends."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nystrom_lab.measure.rows import Row
from nystrom_lab.report.plots.canvas import PAGE, Look, figure_of, method_looks, plain_numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

# Characters of numbers that fit along the horizontal axes of panels side by side.
_CHARACTERS = 80
# Lines that a legend can still name; more are named beside their ends, if at most two panels are side by side.
_LEGEND = 7
# Sizes that have a number each.
_SIZES = 12
# Powers of ten that hold two numbers of 1, 2 and 5 times one.
_ROUND = 0.8
# Distance from one name to the next, as a share of the height of a panel.
_GAP = 0.06


def draw_lines(
    panels: Mapping[str, Sequence[Row]],
    *,
    over: Callable[[Row], float | None],
    x_label: str,
    y_label: str,
    band: str,
    line: str = "means",
    columns: int = 2,
    log_x: bool = True,
    log_y: bool = True,
    share_y: bool = True,
    limits: tuple[float, float] | None = None,
    looks: Mapping[str, Look] | None = None,
) -> "Figure":
    """Draw a panel for each group of rows, with a line for each method, named in a legend or at its end.

    Args:
        panels: Rows by the title of their panel.
        over: The place of a row on the horizontal axis; None for a method without such a size: it is a level line.
        y_label: Name of the vertical axis, with the unit.
        band: Meaning of `low` and `high`, for the legend, such as "quartiles over heads and texts"; "" for no bands.
        line: Meaning of `value`, if there are bands.
        log_x: Whether the horizontal axis is logarithmic; then it has a number for each size.
        share_y: Whether panels side by side share the vertical axis.
        limits: Ends of the vertical axes; None means those of the values.
        looks: How lines look that are not of methods, by name.
    """
    columns = min(columns, len(panels))
    lines = math.ceil(len(panels) / columns)
    figure = figure_of(PAGE, 0.9 + 2.2 * lines)
    grid = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey="row" if share_y else False)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    methods = dict.fromkeys(row.method for rows in panels.values() for row in rows if not math.isnan(row.value))
    looks = method_looks(methods) if looks is None else looks
    named = len(methods) > _LEGEND and columns <= 2
    handles: dict[str, Line2D] = {}
    for panel, (title, rows) in enumerate(panels.items()):
        axes: Axes = grid.flat[panel]
        if log_y:
            axes.set_yscale("log")
        if limits:
            axes.set_ylim(*limits)
        for method in dict.fromkeys(row.method for row in rows):
            those = [row for row in rows if row.method == method and not math.isnan(row.value)]
            if those:
                handles.setdefault(method, _line(axes, method, looks[method], those, over, bool(band)))
        if log_x:
            axes.set_xscale("log", base=2)
            # Names beside the ends take as much room as another panel.
            room = _CHARACTERS / (columns + (named and columns))
            sizes = sorted({x for row in rows if (x := over(row)) is not None})
            if len(sizes) <= _SIZES:
                _number_sizes(axes, sizes, room)
            else:
                plain_numbers(axes, "x")
        axes.minorticks_off()
        if log_y:
            plain_numbers(axes, "y")
        axes.grid(True)
        axes.set_title(title)
        if panel % columns == 0:
            axes.set_ylabel(y_label)
        if panel >= len(panels) - columns:
            axes.set_xlabel(x_label)
            axes.tick_params(labelbottom=True)
    for axes in figure.axes[: len(panels)] if log_y else ():
        _number_values(axes)
    if named:
        for axes in figure.axes[: len(panels)]:
            _name_ends(axes)
        if band:
            figure.supxlabel(f"lines: {line}; bands: {band}", fontsize=7.5)
        return figure
    title = f"lines: {line}; bands: {band}" if band else None
    for columns in range(min(5, len(handles)), 0, -1):
        legend = figure.legend(
            handles.values(), handles.keys(), loc="outside lower center", ncols=columns, title=title, title_fontsize=7.5
        )
        if columns == 1 or legend.get_window_extent().width <= figure.bbox.width:
            break
        legend.remove()
    return figure


def _number_sizes(axes: "Axes", sizes: Sequence[float], room: float) -> None:
    """A tick and a number for each size; a number for every second one, including the last, if all would touch."""
    # Nine digits: 1048576, not 1.04858e+06.
    texts = [f"{size:.9g}" for size in sizes]
    crowded = sum(map(len, texts)) > room
    shown = [text if not crowded or (len(texts) - place) % 2 else "" for place, text in enumerate(texts)]
    axes.set_xticks(sizes, shown)


def _number_values(axes: "Axes") -> None:
    """Numbers along a logarithmic axis: powers of ten or, where fewer than two are seen, round numbers between."""
    from matplotlib.ticker import AutoLocator, LogLocator

    low, high = map(math.log10, axes.get_ylim())
    if math.floor(high) - math.ceil(low) < 1:
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)) if high - low > _ROUND else AutoLocator())


def _line(
    axes: "Axes", method: str, look: Look, rows: Sequence[Row], over: Callable[[Row], float | None], banded: bool
) -> "Line2D":
    style: dict[str, Any] = {"color": look.colour, "linestyle": look.line, "marker": look.marker}
    style["label"] = method
    points = sorted(((x, row) for row in rows if (x := over(row)) is not None), key=lambda point: point[0])
    if not points:
        return axes.axhline(rows[0].value, color=look.colour, linestyle=look.line, linewidth=1.0, label=method)
    if len(points) == 1:
        # A line of one point is its marker alone.
        style["marker"] = look.marker or "x"
    xs = [x for x, _ in points]
    (line,) = axes.plot(xs, [row.value for _, row in points], **style)
    if banded:
        low = [row.value if row.low is None else row.low for _, row in points]
        high = [row.value if row.high is None else row.high for _, row in points]
        axes.fill_between(xs, low, high, color=look.colour, alpha=0.15, linewidth=0)
    return line


def _name_ends(axes: "Axes") -> None:
    """Write the name of each line beside its end; names that would overlap are moved apart."""
    lines = axes.get_lines()
    axes.set_ylim(axes.get_ylim())
    to_panel = axes.transData + axes.transAxes.inverted()
    ends = [(float(line.get_xdata()[-1]), float(line.get_ydata()[-1])) for line in lines]  # pyright: ignore
    heights = spread([float(to_panel.transform(end)[1]) for end in ends], _GAP)
    for line, end, height in zip(lines, ends, heights, strict=True):
        axes.annotate(
            str(line.get_label()),
            end,
            (1.13, height),
            textcoords="axes fraction",
            fontsize=6.5,
            va="center",
            color=line.get_color(),
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "linewidth": 0.4,
                "color": line.get_color(),
                "relpos": (0, 0.5),
                "shrinkA": 1,
                "shrinkB": 2,
            },
        )


def spread(heights: Sequence[float], gap: float) -> list[float]:
    """Heights in the same order, but at least a gap apart, and as near to the given ones as that allows.

    Neighbours that would overlap are pooled, which minimises the sum of the squared moves; then all are kept between 0
    and 1, if they fit.
    """
    order = sorted(range(len(heights)), key=lambda place: heights[place])
    # Less the gaps below them, heights only have to increase. A pool is a sum and a count; the means of pools increase.
    pools: list[tuple[float, int]] = []
    for number, place in enumerate(order):
        total, count = heights[place] - number * gap, 1
        while pools and pools[-1][0] / pools[-1][1] > total / count:
            before, more = pools.pop()
            total, count = total + before, count + more
        pools.append((total, count))
    means = [total / count for total, count in pools for _ in range(count)]
    top = 1.0 - (len(order) - 1) * gap
    spaced = [0.0] * len(heights)
    for number, (place, mean) in enumerate(zip(order, means, strict=True)):
        spaced[place] = min(max(mean, 0.0), max(top, 0.0)) + number * gap
    return spaced
