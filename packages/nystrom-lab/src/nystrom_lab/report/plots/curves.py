"""Training curves: reading them, and a panel for each kind of quantity."""

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from nystrom_lab.report.plots.canvas import figure_of, house_style, look, save_figure

_COLUMNS = ("step", "quantity", "value", "seconds")
_COLUMNS_OF_PANELS = 3
_SPLITS = ("train", "validation", "test")


class CurvePoint(NamedTuple):
    """A row of curves; run "" and seconds NaN where the file does not have them."""

    run: str
    step: float
    quantity: str
    value: float
    seconds: float


@house_style()
def draw_curves(csv_path: Path, path: Path) -> None:
    """Draw the training curves of a file: a panel for each kind of quantity, with a line per split.

    "train loss" and "validation loss" share a panel; "learning rate", which belongs to no split, has its own. Raises
    as `read_curves`.
    """
    # There may be dozens of layers; only their mean is drawn.
    shown = {name: points for name, points in read_curves(csv_path).items() if " of layer " not in name}
    curves = {name: [(step, value) for step, value, _ in points] for name, points in shown.items()}
    kinds = list(dict.fromkeys(_kind(name) for name in curves))
    columns = min(len(kinds), _COLUMNS_OF_PANELS)
    lines = -(-len(kinds) // columns)
    figure = figure_of(3.4 * columns, 2.6 * lines)
    panels = figure.subplots(lines, columns, squeeze=False).flatten()
    for axes in panels[len(kinds) :]:
        axes.set_visible(False)
    for axes, kind in zip(panels, kinds, strict=False):
        for name in (name for name in curves if _kind(name) == kind):
            split = name.removesuffix(kind).strip()
            # A split looks the same in every panel.
            colour, marker = look(_SPLITS.index(split) if split else len(_SPLITS))
            steps, values = zip(*sorted(curves[name]), strict=True)
            marker = marker if len(steps) <= 50 else ""
            axes.plot(steps, values, color=colour, marker=marker, label=split or kind)
        values = [value for name in curves if _kind(name) == kind for _, value in curves[name]]
        if min(values) >= 0 > axes.get_ylim()[0]:
            # The axis of what is never negative begins at zero.
            axes.set_ylim(0, None if max(values) > 0 else 1)
        axes.set_ylabel(kind)
        axes.set_xlabel("step")
        axes.grid(True)
        if any(name != kind for name in curves if _kind(name) == kind):
            axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)
    save_figure(figure, path)


@house_style()
def draw_over_minutes(csv_path: Path, path: Path, quantity: str) -> None:
    """Draw one quantity of a training over its minutes, or of each run where curves of several are in the file.

    Raises:
        ValueError: The cases of `read_points`, or the quantity is not there.
    """
    runs: dict[str, list[CurvePoint]] = {}
    for point in read_points(csv_path, _COLUMNS, ("run", *_COLUMNS)):
        if point.quantity == quantity:
            runs.setdefault(point.run, []).append(point)
    if not runs:
        raise ValueError(f"{csv_path} has no {quantity}.")
    figure = figure_of(3.4, 2.6)
    axes = figure.subplots()
    for place, (name, points) in enumerate(runs.items()):
        colour, marker = look(place)
        minutes, values = zip(*[(point.seconds / 60, point.value) for point in sorted(points)], strict=True)
        axes.plot(minutes, values, color=colour, marker=marker, label=name)
    axes.set_ylim(0, None)
    axes.set_ylabel(quantity)
    axes.set_xlabel("minutes")
    axes.grid(True)
    if len(runs) > 1:
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    save_figure(figure, path)


def _kind(name: str) -> str:
    """The kind of a quantity, without its split: "loss" for "train loss"."""
    first, _, rest = name.partition(" ")
    return rest if first in _SPLITS and rest else name


def read_points(path: Path, *headers: Sequence[str]) -> Iterator[CurvePoint]:
    """The rows of a CSV file that begins with one of these headers.

    Raises:
        ValueError: The file is missing or no CSV, such as a picture, has other columns, or a cell that is no number.
    """
    wanted = " or ".join(map(",".join, headers))
    if not path.is_file():
        raise ValueError(f"{path} is not a file; expected a CSV file with the columns {wanted}.")
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        reader = csv.reader(file)
        try:
            if (header := next(reader, [])) not in map(list, headers):
                raise ValueError(f"{path}, line 1 is {','.join(header)[:80]!r}; expected {wanted}.")
            for cells in reader:
                try:
                    cell = dict(zip(header, cells, strict=True))
                    step, value, seconds = float(cell["step"]), float(cell["value"]), float(cell.get("seconds", "nan"))
                except ValueError:
                    place = f"{path}, line {reader.line_num} is {','.join(cells)[:80]!r}"
                    raise ValueError(f"{place}; expected {','.join(header)}.") from None
                yield CurvePoint(cell.get("run", ""), step, cell["quantity"].strip() or "value", value, seconds)
        except csv.Error as error:
            raise ValueError(f"{path}, line {reader.line_num} is no CSV ({error}): name another file.") from None


def read_curves(csv_path: Path) -> dict[str, list[tuple[float, float, float]]]:
    """Steps, values and seconds of training of each quantity; NaN for the seconds where the file has none.

    A line is such as `100,train loss,2.31,12.5`.

    Raises:
        ValueError: The cases of `read_points`, or there are no rows.
    """
    curves: dict[str, list[tuple[float, float, float]]] = {}
    for _, step, quantity, value, seconds in read_points(Path(csv_path), _COLUMNS, _COLUMNS[:3]):
        curves.setdefault(quantity, []).append((step, value, seconds))
    if not curves:
        raise ValueError(f"{csv_path} holds no rows below its header; expected at least one.")
    return curves
