"""Training curves: reading them, and a panel for each kind of quantity."""

import csv
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nystrom.checks import check_names
from nystrom_lab.report.plots.canvas import figure_of, house_style, look, save_figure

_COLUMNS = ("step", "quantity", "value", "seconds")
_COLUMNS_OF_PANELS = 3
_SPLITS = ("train", "validation", "test")


@house_style()
def draw_curves(csv_path: Path, path: Path) -> None:
    """Draw training curves: a panel for each kind of quantity, with a line per split.

    "train loss" and "validation loss" share a panel; "learning rate", which belongs to no split, has its own.

    Args:
        csv_path: A file with the columns step, quantity, value and, if any, seconds, such as
            `100,train loss,2.31,12.5`.
        path: The file, .png or .svg.

    Raises:
        ValueError: The file is missing, has other columns, a cell that is no number, or no rows.
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
def draw_over_minutes(runs: Mapping[str, Path], path: Path, quantity: str) -> None:
    """Draw one quantity of the curves of trainings over their minutes.

    Args:
        runs: Their names, each with a file as for `draw_curves`, with seconds.
        path: The file, .png or .svg.
        quantity: Its name.

    Raises:
        ValueError: As for `draw_curves`, or the quantity is not there.
    """
    figure = figure_of(3.4, 2.6)
    axes = figure.subplots()
    for place, (name, csv_path) in enumerate(runs.items()):
        curves = read_curves(csv_path)
        check_names("quantity", [quantity], curves)
        values, seconds = zip(*[point[1:] for point in sorted(curves[quantity])], strict=True)
        colour, marker = look(place)
        axes.plot([each / 60 for each in seconds], values, color=colour, marker=marker, label=name)
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


def csv_rows(path: Path, reader: Any) -> Iterator[list[str]]:
    """The rows of a `csv.reader`.

    Raises:
        ValueError: The file is no CSV, such as a picture; the message names it.
    """
    try:
        yield from reader
    except csv.Error as error:
        raise ValueError(f"{path}, line {reader.line_num} is no CSV ({error}): name another file.") from None


def read_curves(csv_path: Path) -> dict[str, list[tuple[float, float, float]]]:
    """Steps, values and seconds of training of each quantity; NaN for the seconds where the file has none.

    Raises:
        ValueError: The file is missing, has other columns, a cell that is no number, or no rows.
    """
    columns = f"{','.join(_COLUMNS[:3])}, and {_COLUMNS[3]} if any"
    if not Path(csv_path).is_file():
        raise ValueError(f"{csv_path} is not a file; expected a CSV file with the columns {columns}.")
    curves: dict[str, list[tuple[float, float, float]]] = {}
    with Path(csv_path).open(encoding="utf-8", errors="replace", newline="") as file:
        reader = csv.reader(file)
        rows = csv_rows(csv_path, reader)
        header = tuple(next(rows, []))
        if header not in (_COLUMNS, _COLUMNS[:3]):
            raise ValueError(f"{csv_path}, line 1 is {','.join(header)!r}; expected {columns}.")
        for cells in rows:
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
