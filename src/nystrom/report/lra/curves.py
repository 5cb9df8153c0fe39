"""Validation accuracy over the time of training, as in Fig. 2 of Skyformer (Chen et al. 2021, arXiv:2111.00035).

A panel per task and a line per method: the mean over the seeds at each step, a band from the lowest to the highest. The
time is that of the runs' own clocks, evaluations and checkpoints included.
"""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nystrom.report.plots import COLOURS, DPI, MARKERS, figure_of, read_curves
from nystrom.report.printed.accuracies import LRA_TASKS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

QUANTITY = "validation accuracy"

# step: (seconds, accuracy)
_Curve = dict[int, tuple[float, float]]


def draw_lra_curves(folder: Path, png: Path) -> None:
    """Draw the runs of a grid, finished or not.

    Args:
        folder: The folder of `nystrom lra run`.
        png: Where to.

    Raises:
        ValueError: The folder holds no run that was evaluated, or curves without seconds.
    """
    runs = _read_runs(Path(folder))
    tasks = sorted({task for task, _ in runs}, key=lambda task: (*LRA_TASKS, task).index(task))
    methods = list(dict.fromkeys(method for _, method in sorted(runs)))
    figure = figure_of(1.8 + 4.2 * len(tasks), 4.0)
    panels = figure.subplots(1, len(tasks), squeeze=False)[0]
    for axes, task in zip(panels, tasks, strict=True):
        for i, method in enumerate(methods):
            if (task, method) in runs:
                _draw(axes, runs[task, method], method, i)
        axes.set_title(task, fontsize=11)
        axes.set_xlabel("seconds of training")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel(f"{QUANTITY} (%)")
    handles = {
        label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside right center", frameon=False)
    figure.savefig(png, dpi=DPI)


def _read_runs(folder: Path) -> dict[tuple[str, str], list[_Curve]]:
    """Curves of all seeds by task and method; the preset is named where there are several."""
    found: list[tuple[Mapping[str, object], _Curve]] = []
    for path in sorted(folder.glob("*/run.json")):
        if not (curves := path.with_name("curves.csv")).is_file():
            continue
        points = read_curves(curves).get(QUANTITY, [])
        if any(math.isnan(seconds) for *_, seconds in points):
            raise ValueError(f"{curves} has no seconds: it is of an earlier version; train that run again.")
        if points:
            curve = {int(step): (seconds, value) for step, value, seconds in points}
            content = json.loads(path.read_text(encoding="utf-8"))
            # Runs of an earlier version do not name their size.
            method = content.get("method", content["settings"]["attention"])
            found.append((content["settings"] | {"method": method}, curve))
    if not found:
        raise ValueError(f"{folder} holds no run with a {QUANTITY}; expected the folder of `nystrom lra run`.")
    several = len({settings["preset"] for settings, _ in found}) > 1
    runs: dict[tuple[str, str], list[_Curve]] = {}
    for settings, curve in found:
        method = f"{settings['method']} ({settings['preset']})" if several else str(settings["method"])
        runs.setdefault((str(settings["task"]), method), []).append(curve)
    return runs


def _draw(axes: "Axes", curves: Sequence[_Curve], method: str, place: int) -> None:
    """One line with its band, over the steps that all its seeds have come to."""
    steps = sorted(set.intersection(*map(set, curves)))
    times = [statistics.fmean(curve[step][0] for curve in curves) for step in steps]
    values = [[100 * curve[step][1] for curve in curves] for step in steps]
    colour = COLOURS[place % len(COLOURS)]
    marker = MARKERS[place % len(MARKERS)] if len(steps) <= 50 else ""
    style = "-" if place < len(COLOURS) else "--"
    means = [statistics.fmean(each) for each in values]
    axes.plot(times, means, style, color=colour, marker=marker, markersize=4, linewidth=1.3, label=method)
    axes.fill_between(times, [min(each) for each in values], [max(each) for each in values], color=colour, alpha=0.15)
