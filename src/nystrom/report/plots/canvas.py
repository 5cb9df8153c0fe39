"""What all figures share: their colours, their markers, the canvas and the formats.

Colours are those that colour-blind readers can tell apart, and each comes with a marker for print in grey. Figures are
drawn with matplotlib's own canvases: no window is opened, and no state is shared with a caller's figures.
"""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito (2008), without its black, which is left to references, and its yellow, which is too faint on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#882255")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
REFERENCE = "#7F7F7F"
FORMATS = (".png", ".svg")
_DPI = 150


def check_figure(path: Path) -> None:
    """Check the name of a figure's file, before the work that it is to show.

    Raises:
        ValueError: It ends in neither .png nor .svg.
    """
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"figure is {path}; expected a file name that ends in {' or '.join(FORMATS)}.")


def figure_of(width: float, height: float) -> "Figure":
    """A figure of a size in inches, on a canvas of its own."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: "Figure", path: Path) -> None:
    """Write a figure in the format that the name of the file ends in; the same figure gives the same file.

    Raises:
        ValueError: The name ends in neither .png nor .svg.
    """
    import matplotlib

    check_figure(path)
    # Without a date and random names, so that a figure drawn again is the same file.
    metadata = {"Date": None} if path.suffix.lower() == ".svg" else None
    with matplotlib.rc_context({"svg.hashsalt": "nystrom", "svg.fonttype": "none"}):
        figure.savefig(path, dpi=_DPI, metadata=metadata)


def look(place: int) -> tuple[str, str]:
    """Colour and marker of the line at a place; beyond the last colour they come again with other markers."""
    return COLOURS[place % len(COLOURS)], MARKERS[(place + 3 * (place // len(COLOURS))) % len(MARKERS)]


def plain_numbers(axes: "Axes", which: str) -> None:
    """Write 2000 rather than 2 x 10^3 along a logarithmic axis, between powers of ten where there is room.

    Args:
        axes: The panel.
        which: "x" or "y".
    """
    from matplotlib.ticker import FuncFormatter, LogFormatterSciNotation

    axis = axes.xaxis if which == "x" else axes.yaxis
    between = LogFormatterSciNotation()
    between.set_axis(axis)

    def write(x: float, place: int | None) -> str:
        between.set_locs(axis.get_minorticklocs())
        return f"{x:g}" if between(x, place) else ""

    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(FuncFormatter(write))
