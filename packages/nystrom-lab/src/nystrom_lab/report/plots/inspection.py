"""Figures of an inspection: maps of layers by heads, and the error against the size of each method."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import quantiles
from typing import TYPE_CHECKING

from nystrom_lab.measure.rows import Row
from nystrom_lab.report.inspection import DISTANCE, ENTROPY, ERROR, HIDDEN, NEAR, RANK, layer_and_head
from nystrom_lab.report.plots.canvas import PAGE, figure_of
from nystrom_lab.report.plots.lines import draw_lines

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Maps side by side.
_COLUMNS = 4
_FACTS = {
    ENTROPY: ("entropy", "nats"),
    DISTANCE: ("mean distance", "tokens"),
    NEAR: ("weight within 32 tokens", "share"),
    RANK: ("effective rank", ""),
}


# The figures of an inspection, by name.
FIGURES = ("errors", "attention", "sizes")


def inspection_figures(rows: Sequence[Row], family: Callable[[str], str]) -> "Mapping[str, Figure]":
    """All figures of the rows of one inspection, by name, see `FIGURES`; `family` names a method without its size."""
    figures = {"errors": draw_errors(rows), "attention": draw_attention(rows)}
    if any(row.quantity == ERROR and row.m is not None for row in rows):
        figures["sizes"] = draw_sizes(rows, family)
    return figures


def draw_errors(rows: Sequence[Row]) -> "Figure":
    """The error of each head of each layer, a map for each method, all on one scale."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    methods = list(dict.fromkeys(row.method for row in rows if row.quantity == ERROR))
    maps = {method: _map(rows, ERROR, method) for method in methods}
    figure, panels = _grid(maps)
    # Above 1, an output of zero would be nearer.
    norm, colours = Normalize(0, 1), "magma_r"
    for axes, (method, values) in zip(panels, maps.items(), strict=True):
        axes.imshow(values, norm=norm, cmap=colours, aspect="auto", interpolation="nearest")
        axes.set_title(method)
    shown = ScalarMappable(norm, colours)
    bar = figure.colorbar(shown, ax=panels, label="relative error of the output", extend="max", aspect=30, pad=0.01)
    bar.outline.set_linewidth(0.4)  # pyright: ignore[reportCallIssue]
    return figure


def draw_attention(rows: Sequence[Row]) -> "Figure":
    """Properties of exact attention in each head, each on its own scale."""
    from matplotlib.colors import LogNorm

    maps = {quantity: _map(rows, quantity, "softmax") for quantity in _FACTS}
    figure, panels = _grid(maps, extra=0.6)
    for axes, (quantity, values) in zip(panels, maps.items(), strict=True):
        title, unit = _FACTS[quantity]
        # Ranks lie between 1 and the number of tokens, most of them near 1.
        norm = LogNorm() if quantity == RANK else None
        image = axes.imshow(values, norm=norm, cmap="viridis", aspect="auto", interpolation="nearest")
        axes.set_title(title)
        bar = figure.colorbar(image, ax=axes, label=unit, location="bottom", aspect=18)
        bar.outline.set_linewidth(0.4)  # pyright: ignore[reportCallIssue]
    return figure


def draw_sizes(rows: Sequence[Row], family: Callable[[str], str]) -> "Figure":
    """Errors against the size of a method: its landmarks, features or clusters."""
    layers: dict[str, list[Row]] = {}
    for row in rows:
        if row.quantity == ERROR and row.m is not None:
            layers.setdefault(row.method, []).append(row)
    panels = {"outputs of the heads": [_spread(those) for those in layers.values()]}
    whole = [row for row in rows if row.quantity == HIDDEN and "exact" not in row.facts and row.m is not None]
    if whole:
        panels["hidden states after the last layer"] = [replace(row, low=row.value, high=row.value) for row in whole]
    named = {title: [replace(row, method=family(row.method)) for row in those] for title, those in panels.items()}
    figure = draw_lines(
        named,
        over=lambda row: row.m,
        x_label="landmarks, features or clusters",
        y_label="relative error",
        band="quartiles over layers and heads",
        log_y=False,
    )
    figure.axes[0].set_ylim(bottom=0)
    return figure


def _grid(maps: Mapping[str, "np.ndarray"], *, extra: float = 0.0) -> "tuple[Figure, list[Axes]]":
    """A panel for each map, `extra` inches higher; layers count from 0 at the top, heads from 0 at the left."""
    layers, heads = next(iter(maps.values())).shape
    columns = min(_COLUMNS, len(maps))
    lines = math.ceil(len(maps) / columns)
    figure = figure_of(PAGE * (columns + 0.6) / (_COLUMNS + 0.6), 0.3 + lines * (0.75 + extra + 0.13 * min(layers, 16)))
    grid = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True)
    for axes in grid.flat[len(maps) :]:
        axes.set_visible(False)
    panels = list(grid.flat[: len(maps)])
    every = max(1, math.ceil(layers / 12)), max(1, math.ceil(heads / 6))
    for place, axes in enumerate(panels):
        axes.set_yticks(range(0, layers, every[0]))
        axes.set_xticks(range(0, heads, every[1]))
        if place % columns == 0:
            axes.set_ylabel("layer")
        if place + columns >= len(maps):
            axes.set_xlabel("head")
            axes.tick_params(labelbottom=True)
    return figure, panels


def _map(rows: Sequence[Row], quantity: str, method: str) -> "np.ndarray":
    import numpy as np

    values = {layer_and_head(row): row.value for row in rows if (row.quantity, row.method) == (quantity, method)}
    layers, heads = (1 + max(place[which] for place in values) for which in (0, 1))
    # Layers that keep exact attention stay blank.
    return np.array([[values.get((layer, head), np.nan) for head in range(heads)] for layer in range(layers)])


def _spread(rows: Sequence[Row]) -> Row:
    """The mean and the quartiles over the heads of all layers, as one row."""
    values = [row.value for row in rows]
    low, _, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return replace(rows[0], value=sum(values) / len(values), low=low, high=high, facts={})
