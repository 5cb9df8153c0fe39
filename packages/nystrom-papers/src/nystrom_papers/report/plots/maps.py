"""Grids of matrices as pictures, with one colour scale for all of them."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from nystrom_lab.report.plots.canvas import PAGE, figure_of

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

Scale = Literal["weights", "signed"]

# The same weight has the same colour in every figure; smaller and negative weights have the darkest.
_LEAST, _MOST = 1e-4, 1e-1
# Largest width of a matrix in inches.
_SIDE = 1.15


def draw_maps(
    lines: Mapping[str, Mapping[str, "np.ndarray"]],
    *,
    columns: Mapping[str, str],
    bar: str,
    scale: Scale = "weights",
    captions: Mapping[tuple[str, str], str] | None = None,
    across: int = 1,
    title: str = "",
) -> "Figure":
    """Draw a grid of matrices: a line for each head, a column for each kind of matrix.

    Args:
        lines: Matrices by the names of their line and their column.
        columns: Titles of the columns, by name, in order.
        bar: Meaning of a colour.
        scale: The colour scale, as for `scale_of`.
        captions: Text below a matrix, by line and column.
        across: Groups of columns side by side, so that many lines need less height.
        title: Title of the whole figure.
    """
    heights = -(-len(lines) // across)
    wide = across * len(columns)
    side = min((PAGE - 1.3) / wide, _SIDE)
    figure = figure_of(side * wide + 1.3, heights * (side + (0.2 if captions else 0.08)) + (0.45 if title else 0.25))
    norm, style = scale_of([lines[line][column] for line in lines for column in columns], scale)
    grid = figure.subplots(heights, wide, squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
    for place, (line, matrices) in enumerate(lines.items()):
        group, height = divmod(place, heights)
        for offset, (column, head) in enumerate(columns.items()):
            axes: Axes = grid[height][group * len(columns) + offset]
            draw_map(axes, matrices[column], norm, style)
            if height == 0:
                axes.set_title(head)
            if offset == 0:
                axes.set_ylabel(line, fontsize=7)
            if captions and (line, column) in captions:
                axes.set_xlabel(captions[line, column], fontsize=7, labelpad=2)
    figure.get_layout_engine().set(w_pad=0.02, h_pad=0.02, wspace=0.02, hspace=0.02)  # pyright: ignore
    if title:
        figure.suptitle(title, fontsize=8)
    add_bar(figure, list(grid.flat), norm, style, bar)
    return figure


def draw_map(axes: "Axes", matrix: "np.ndarray", norm: "Normalize", style: Mapping[str, Any]) -> None:
    """Draw one matrix without ticks, in a thin frame, stretched to the shape of its panel."""
    axes.set_axis_on()
    axes.imshow(matrix, norm=norm, aspect="auto", interpolation="nearest", **style)
    axes.set_box_aspect(1)
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_visible(True)
        spine.set_linewidth(0.4)


def scale_of(matrices: Sequence["np.ndarray"], scale: Scale) -> tuple["Normalize", dict[str, Any]]:
    """The colour scale that matrices share, and the colour map that goes with it.

    Args:
        matrices: All matrices that share it.
        scale: "weights" for attention weights, always from 0.0001 to 0.1; "signed" for numbers around 0, linear up to a
            thousandth of the largest and logarithmic beyond.
    """
    import numpy as np
    from matplotlib.colors import LogNorm, SymLogNorm

    if scale == "weights":
        return LogNorm(_LEAST, _MOST, clip=True), {"cmap": "viridis"}
    # The few numbers that an inverse has blown up are beyond the end of the scale.
    sizes = np.abs(np.concatenate([matrix.ravel() for matrix in matrices]))
    largest = float(np.quantile(sizes, 0.999)) or 1.0
    return SymLogNorm(largest / 1000, vmin=-largest, vmax=largest, clip=True), {"cmap": "RdBu_r"}


def add_bar(
    figure: "Figure",
    panels: Sequence["Axes"],
    norm: "Normalize",
    style: Mapping[str, Any],
    label: str,
    *,
    below: bool = False,
) -> None:
    """Draw the colour scale and its meaning beside the panels that share it, or below them, which then stay."""
    from matplotlib.cm import ScalarMappable

    place: dict[str, Any] = {"aspect": 40}
    if below:
        place = {"aspect": 30, "location": "bottom", "shrink": 0.9, "panchor": False}
    mappable = ScalarMappable(norm, style["cmap"])
    shown = figure.colorbar(mappable, ax=list(panels), label=label, extend="both", **place)
    shown.outline.set_linewidth(0.4)  # pyright: ignore[reportCallIssue]
    # Without the ticks that lie beyond the scale, and those that crowd around 0.
    low, high, linear = norm.vmin or 0.0, norm.vmax or 0.0, getattr(norm, "linthresh", 0.0)
    ticks = [float(tick) for tick in shown.get_ticks()]
    shown.set_ticks([tick for tick in ticks if low <= tick <= high and (tick == 0 or abs(tick) > 2 * linear)])
    shown.ax.minorticks_off()
