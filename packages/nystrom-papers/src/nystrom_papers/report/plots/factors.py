"""A matrix, the three factors of its approximation and their product, side by side as an equation."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from nystrom_lab.report.plots.canvas import PAGE, figure_of
from nystrom_papers.report.plots.maps import add_bar, draw_map, scale_of

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure

# The short side of a factor relative to the long one; true proportions would leave a line.
_SHORT = 0.4
_PANELS = {
    "exact": ("softmax matrix S\nn x n", 1.0, 1.0, ""),
    "left": ("F\nn x m", _SHORT, 1.0, "≈"),
    "inverse": ("Z ≈ A⁺\nm x m", _SHORT, _SHORT, "×"),
    "right": ("B\nm x n", 1.0, _SHORT, "×"),
    "nystrom": ("Nyström F Z B\nn x n", 1.0, 1.0, "="),
}


def draw_factors(matrices: "Mapping[str, np.ndarray]", *, title: str, bar: str) -> "Figure":
    """Draw S ≈ F × Z × B = their product; attention weights share one colour scale, the inverse has its own.

    The matrices are "exact", "left", "inverse", "right" and "nystrom"; `bar` is what a colour of the weights means.
    """
    figure = figure_of(PAGE, 2.75)
    widths = [width for _, width, _, _ in _PANELS.values()]
    panels = figure.subplots(1, len(_PANELS), width_ratios=widths)
    weights = scale_of([matrices["exact"]], "weights")
    signed = scale_of([matrices["inverse"]], "signed")
    for axes, (name, (head, width, height, sign)) in zip(panels, _PANELS.items(), strict=True):
        draw_map(axes, matrices[name], *(signed if name == "inverse" else weights))
        axes.set_box_aspect(height / width)
        axes.set_title(head)
        if sign:
            axes.set_ylabel(sign, rotation=0, fontsize=11, va="center", labelpad=8)
    figure.suptitle(title, fontsize=8)
    others = [axes for axes, name in zip(panels, _PANELS, strict=True) if name in ("exact", "left")]
    add_bar(figure, others, *weights, bar, below=True)
    rest = [axes for axes, name in zip(panels, _PANELS, strict=True) if name in ("inverse", "right", "nystrom")]
    add_bar(figure, rest, *signed, "entry of Z", below=True)
    return figure
