"""Lines over a size or over the steps of an iteration, in panels: medians, with bands around them."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from nystrom_lab.measure.rows import Row
from nystrom_lab.report.plots.canvas import COLOURS, MARKERS, PAGE, figure_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D


def draw_bands(
    panels: Mapping[str, Mapping[str, Sequence[Row]]],
    *,
    over: Callable[[Row], float | None],
    looks: Mapping[str, tuple[int, bool]],
    band: str,
    x_label: str,
    y_label: str,
    limits: tuple[float, float],
    log_x: bool = False,
    columns: int = 2,
) -> "Figure":
    """Draw a panel for each group of lines, on a logarithmic axis, with one legend below all panels.

    Args:
        panels: Rows of each line, by panel and by name of the line.
        over: The place of a row on the horizontal axis; None for a level line.
        looks: The index of a line's colour, and whether it is dashed, by name; in the order of the legend.
        band: What `low` and `high` are, for the legend.
        x_label: Name of the horizontal axis.
        y_label: Name of the vertical axis.
        limits: Ends of the vertical axis; values beyond are drawn at the end.
        log_x: Whether the horizontal axis is logarithmic, with a tick at each measured place.
        columns: Panels in a row.
    """
    high = math.ceil(len(panels) / columns)
    figure = figure_of(PAGE, 0.7 + 2.0 * high)
    grid = figure.subplots(high, columns, squeeze=False, sharex=True, sharey=True)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    handles: dict[str, Line2D] = {}
    for place, (title, lines) in enumerate(panels.items()):
        axes: Axes = grid.flat[place]
        axes.set_yscale("log")
        axes.set_ylim(*limits)
        for name, rows in lines.items():
            if rows:
                handles.setdefault(name, _draw_line(axes, rows, over, looks[name], limits))
        if log_x:
            ticks = sorted({x for rows in lines.values() for row in rows if (x := over(row)) is not None})
            axes.set_xscale("log", base=2)
            axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
            axes.minorticks_off()
        axes.grid(True)
        axes.set_title(title)
        if place % columns == 0:
            axes.set_ylabel(y_label)
        if place >= len(panels) - columns:
            axes.set_xlabel(x_label)
    names = [name for name in looks if name in handles]
    figure.legend(
        [handles[name] for name in names],
        names,
        loc="outside lower center",
        # Lines of the legend of equal length, up to four names each.
        ncols=max(1, math.ceil(len(names) / max(1, math.ceil(len(names) / 4)))),
        title=f"lines: medians; bands: {band}",
        title_fontsize=7.5,
    )
    return figure


def _draw_line(
    axes: "Axes",
    rows: Sequence[Row],
    over: Callable[[Row], float | None],
    look: tuple[int, bool],
    limits: tuple[float, float],
) -> "Line2D":
    def inside(value: float | None, otherwise: float) -> float:
        return min(max(otherwise if value is None else value, limits[0]), limits[1])

    place, dashed = look
    colour = COLOURS[place]
    points = sorted(((x, row) for row in rows if (x := over(row)) is not None), key=lambda point: point[0])
    if not points:
        return axes.axhline(rows[0].value, color=colour, linestyle=":" if dashed else "-", linewidth=1.0)
    places = [x for x, _ in points]
    low, middle, high = (
        [inside(value, row.value) for _, row in points for value in (getattr(row, end),)]
        for end in ("low", "value", "high")
    )
    (line,) = axes.plot(
        places,
        middle,
        color=colour,
        marker=MARKERS[place],
        markerfacecolor="white" if dashed else colour,
        linestyle="--" if dashed else "-",
        markevery=max(1, len(points) // 8),
    )
    axes.fill_between(places, low, high, color=colour, alpha=0.12, linewidth=0)
    return line
