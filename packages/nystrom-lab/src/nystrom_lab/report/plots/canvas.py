"""The look of all figures: colours, markers, the canvas and the formats.

Colours are distinguishable by colour-blind readers, and each comes with a marker for print in grey. Figures are drawn
with matplotlib's own canvases: no window is opened, and no state is shared with a caller's figures.
"""

import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nystrom.whole_files import check_folder, whole_file
from nystrom_lab.report.plots.mark import MARK, check_free

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito (2008), without its black, which is left to references, and its yellow, which is too faint on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#882255")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
REFERENCE = "#7F7F7F"
FORMATS = (".png", ".svg")
_DPI = 150

# Inches: one column of a paper's two, and the whole page.
COLUMN, PAGE = 3.4, 7.0
_STYLE: dict[Any, Any] = {
    "font.size": 8,
    "axes.titlesize": 8.5,
    "axes.labelsize": 8,
    "legend.fontsize": 7.5,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "lines.linewidth": 1.3,
    "lines.markersize": 4,
    "legend.frameon": False,
    "grid.alpha": 0.3,
    "grid.linewidth": 0.5,
    "image.cmap": "viridis",
}


class Look(NamedTuple):
    """How a method looks in every figure: its colour, its marker, and the style of its line."""

    colour: str
    marker: str
    line: str = "-"


# Related methods share a colour and differ in marker and line.
METHOD_LOOKS: dict[str, Look] = {
    "softmax": Look(REFERENCE, "", "-"),
    "softmax-materialised": Look(REFERENCE, "", "--"),
    "nystrom": Look("#0072B2", "o"),
    "nystrom-kmeans": Look("#0072B2", "h", "--"),
    "nystrom-uniform": Look("#0072B2", "p", ":"),
    "nystrom-columns": Look("#56B4E9", "d", "--"),
    "near_far": Look("#000000", "*"),
    "skyformer": Look("#D55E00", "s"),
    "skyformer_softmax": Look("#D55E00", "D", "--"),
    "skyformer-printed": Look("#D55E00", "P", ":"),
    "kernelized": Look("#882255", "X", "-"),
    "performer": Look("#009E73", "^"),
    "linear": Look("#999933", "v"),
    "linformer": Look("#CC79A7", ">"),
    "informer": Look("#E69F00", "<"),
    "reformer": Look("#56B4E9", "P"),
    "longformer": Look("#332288", "d"),
    "bigbird": Look("#AA4499", "H"),
    # Kernels and matrices that figures show in the place of methods, and values that were derived, not measured.
    "gaussian": Look("#882255", "X"),
    "matern52": Look("#0072B2", "o"),
    "matern32": Look("#56B4E9", "s", "--"),
    "laplace": Look("#E69F00", "^", "-."),
    "unnormalised": Look("#E69F00", "s", "--"),
    "formula": Look(REFERENCE, "", "--"),
}


def method_look(name: str) -> Look:
    """How a method looks, by its name in rows; additions, as in "nystrom-64" or "nystrom, 4000", do not count."""
    # Split by hand: a regular expression would take time quadratic in the length of a name.
    words = re.split(r",| \(", name, maxsplit=1)[0].removesuffix("+skip").split("-")
    while len(words) > 1 and words[-1].isdecimal():
        words.pop()
    base = "-".join(words)
    known = METHOD_LOOKS.get(base)
    if known is not None:
        return known
    # The same name gets the same look each time, in every figure and process.
    colour, marker = look(zlib.crc32(base.encode()))
    return Look(colour, marker, "-.")


def method_looks(names: Iterable[str]) -> dict[str, Look]:
    """The looks of the methods in one figure: methods that differ only in size differ in shade, marker and line."""
    seen: dict[Look, int] = {}
    looks = {}
    for name in names:
        plain = method_look(name)
        place = seen[plain] = seen.get(plain, -1) + 1
        styles = ("-", "--", ":", "-.")
        markers = (plain.marker, *(marker for marker in MARKERS if marker != plain.marker))
        line = styles[(styles.index(plain.line) + place) % len(styles)]
        looks[name] = Look(_shade(plain.colour, place), markers[place % len(markers)], line)
    return looks


def _shade(colour: str, place: int) -> str:
    """The colour itself, then a darker and a lighter one, and again."""
    towards, share = ((0, 0.0), (0, 0.5), (255, 0.4))[place % 3]
    parts = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(part + share * (towards - part)):02X}" for part in parts)


@contextmanager
def house_style() -> Iterator[None]:
    """Fonts, lines and grids of all figures, legible at printed width; can also be used as a decorator."""
    import matplotlib

    with matplotlib.rc_context(_STYLE):
        yield


def check_figure(path: Path) -> None:
    """Check, before the work, a user's file name for a figure, and create its folder.

    Raises:
        ValueError: It ends in neither .png nor .svg, its folder cannot be written, or the file exists and is not a
            figure of this project.
    """
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"figure is {path}; expected a file name that ends in {' or '.join(FORMATS)}.")
    check_folder(path.parent)
    check_free(path)


def figure_of(width: float, height: float) -> "Figure":
    """A figure of this width and height in inches, on its own canvas."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: "Figure", path: Path) -> None:
    """Write a figure in the format that the file's name ends in; the same figure gives the same file.

    Raises as `check_figure`, also for a file that came since that was called.
    """
    import matplotlib

    check_figure(path)
    # Without a date and random names, so that a figure drawn again is the same file.
    metadata = {"Date": None, "Creator": MARK} if path.suffix.lower() == ".svg" else {"Software": MARK}
    with matplotlib.rc_context({"svg.hashsalt": "nystrom", "svg.fonttype": "none"}), whole_file(path) as partial:
        figure.savefig(partial, format=path.suffix.lower()[1:], dpi=_DPI, metadata=metadata)


def look(place: int) -> tuple[str, str]:
    """Colour and marker of the line at an index; beyond the last colour, colours repeat with other markers."""
    return COLOURS[place % len(COLOURS)], MARKERS[(place + 3 * (place // len(COLOURS))) % len(MARKERS)]


def plain_numbers(axes: "Axes", which: str) -> None:
    """Write 2000, not 2 x 10^3, along the logarithmic axis "x" or "y", between powers of ten where there is room."""
    from matplotlib.ticker import FuncFormatter, LogFormatterSciNotation

    axis = axes.xaxis if which == "x" else axes.yaxis
    between = LogFormatterSciNotation()
    between.set_axis(axis)

    def write(x: float, place: int | None) -> str:
        between.set_locs(axis.get_minorticklocs())
        return f"{x:g}" if between(x, place) else ""

    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(FuncFormatter(write))
