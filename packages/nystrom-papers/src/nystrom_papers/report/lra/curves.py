"""Training curves over time or steps, as in Fig. 2 of Skyformer (Chen et al. 2021, arXiv:2111.00035).

There is a panel per task and a line per method: the mean over the seeds at each step, with a band from the lowest to
the highest. Time is that of the runs' own clocks, including evaluations and checkpoints. Each axis of accuracies begins
at zero and has a line at chance, so that noise around chance does not look like progress; gradient norms have a
logarithmic axis. A run with a single point has no curve. If a seed's value is not finite, there is neither mean nor
band, and the figure names the method: the remaining seeds alone would look like a good run.
"""

import csv
import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from nystrom.checks import check_choice
from nystrom.json_files import read_json
from nystrom.whole_files import check_folder, check_new, whole_file
from nystrom_lab.report.plots.canvas import (
    REFERENCE,
    Look,
    check_figure,
    figure_of,
    house_style,
    method_looks,
    save_figure,
)
from nystrom_lab.report.plots.curves import read_curves, read_points
from nystrom_papers.report.printed import LRA_CLASSES, LRA_TASKS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Shown = Literal["accuracy", "loss", "gradient-norm"]
Axis = Literal["seconds", "steps"]
# Their names in the files of curves.
_QUANTITIES: dict[Shown, str] = {
    "accuracy": "validation accuracy",
    "loss": "validation loss",
    "gradient-norm": "gradient norm",
}
_CHANCE = "chance"
# Characters per inch of the text below the panels.
_CHARACTERS = 16
GATHERED = ("run", "step", "quantity", "value", "seconds")

# TASK-METHOD-PRESET-seedSEED, with the origin of the encoder and the positions, and a suffix of a copy.
_RUN_NAME = re.compile(
    r"(?P<task>\w+)-(?P<method>.+?)-(?P<preset>modern-small|[a-z]\w*(?:-1000)?)"
    r"(?:-(?P<start>pretrained))?(?:-(?P<positions>\d+))?-seed\d+(?:-(?P<besides>\w+))?"
)
# Settings that runs of one method may differ in.
_FREE = {"seed", "accumulation", "processes", "device", "compile", "evaluate_every", "log_every", "model"}

_WANTED = "the folder of `nystrom lra run`, or the CSV file of its curves"

# step: (seconds, value)
_Curve = dict[int, tuple[float, float]]
# (task, method, preset): the first run of it, and its settings
_Settings = dict[tuple[str, str, str], tuple[Path, dict[str, Any]]]


class ArenaRun(NamedTuple):
    """A curve of a run: its task, method with size, preset with the origin of its encoder, and the name of its folder.

    The curve has seconds of training and value, by step.
    """

    task: str
    method: str
    preset: str
    curve: dict[int, tuple[float, float]]
    name: str


@house_style()
def draw_lra_curves(
    source: Path | Sequence[Path], path: Path, *, quantity: Shown = "accuracy", over: Axis = "seconds"
) -> None:
    """Draw the runs of a grid, finished or not.

    Args:
        source: The folder of `nystrom lra run`, a CSV file that `gather_curves` wrote, or several of them.
        quantity: "accuracy" and "loss" on the validation split, or "gradient-norm", that of a step before it is
            clipped.

    Raises:
        ValueError: The cases of `read_lra_curves`, another format, or a method's seeds share fewer than two steps.
    """
    check_figure(path)
    check_choice("quantity", quantity, get_args(Shown))
    check_choice("over", over, get_args(Axis))
    sources = [source] if isinstance(source, str | Path) else list(source)
    if not sources:
        raise ValueError(f"source is an empty list; expected {_WANTED}.")
    runs = read_lra_curves(sources, quantity)
    save_figure(lra_curves_figure(runs, " and ".join(map(str, sources)), quantity=quantity, over=over), path)


def lra_curves_figure(
    arena_runs: Sequence[ArenaRun], source: str, *, quantity: Shown = "accuracy", over: Axis = "seconds"
) -> "Figure":
    """The figure of some runs, those with a single point left out; `source` is where they are from, for errors.

    Raises:
        ValueError: Seeds of a method share fewer than two steps.
    """
    name, runs = _QUANTITIES[quantity], _by_method(arena_runs)
    _check_shared(source, runs)
    tasks = sorted({task for task, _ in runs}, key=lambda task: (*LRA_TASKS, task).index(task))
    methods = sorted({method for _, method in runs}, key=_by_size)
    looks = method_looks(methods)
    width = 1.4 + 2.6 * len(tasks)
    figure = figure_of(width, 2.8)
    panels = figure.subplots(1, len(tasks), squeeze=False)[0]
    for axes, task in zip(panels, tasks, strict=True):
        for method in methods:
            if (task, method) in runs:
                _draw(axes, runs[task, method], method, looks[method], over, 100 if quantity == "accuracy" else 1)
        if quantity == "accuracy" and task in LRA_CLASSES:
            axes.axhline(100 / LRA_CLASSES[task], color=REFERENCE, linestyle="--", linewidth=1, label=_CHANCE)
        axes.margins(y=0.12)
        if quantity == "accuracy":
            axes.set_ylim(bottom=0)
        elif quantity == "gradient-norm":
            axes.set_yscale("log")
        axes.set_xlim(left=0)
        axes.set_title(task)
        axes.set_xlabel("seconds of training" if over == "seconds" else "step")
        axes.grid(True)
    panels[0].set_ylabel(f"{name} (%)" if quantity == "accuracy" else name)
    handles = {
        label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    labels = [label for label in (*methods, _CHANCE) if label in handles]
    figure.legend([handles[label] for label in labels], labels, loc="outside right center")
    seeds = max(map(len, runs.values()))
    figure.suptitle("one seed each" if seeds == 1 else f"mean of up to {seeds} seeds; bands: lowest to highest")
    if diverged := _diverged(runs):
        said = f"no line where a value is not finite: {', '.join(diverged)}"
        figure.supxlabel(fill(said, round(_CHARACTERS * width)), fontsize=7.5)
    return figure


def gather_curves(folder: Path, to: Path) -> None:
    """Write the curves of all runs of a grid to a new CSV file, with the name of the run in the first column.

    Raises:
        ValueError: The folder holds no curves, or the file exists or cannot be written.
    """
    check_new(Path(to))
    files = [curves for curves, _ in _classifying(Path(folder))]
    if not files:
        raise ValueError(f"{folder} holds no run with curves; expected the folder of `nystrom lra run`.")
    check_folder(Path(to).parent)
    with whole_file(Path(to), new=True) as partial, partial.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(GATHERED)
        for curves in files:
            for quantity, points in read_curves(curves).items():
                writer.writerows(
                    (curves.parent.name, int(step), quantity, repr(value), f"{seconds:g}")
                    for step, value, seconds in points
                )


def read_lra_curves(sources: Sequence[Path], shown: Shown) -> list[ArenaRun]:
    """The runs of all sources; no run comes twice, and each source has at least one that can be drawn.

    Raises:
        ValueError: A source that does not exist or has no run with two points, a run that two sources hold, curves
            without seconds, or a file of another format.
    """
    quantity = _QUANTITIES[shown]
    collected: list[ArenaRun] = []
    holders: dict[str, Path] = {}
    settings: _Settings = {}
    for source in map(Path, sources):
        if not source.exists():
            raise ValueError(f"{source} does not exist; expected {_WANTED}.")
        runs = list(_read_gathered(source, quantity) if source.is_file() else _read_runs(source, quantity, settings))
        if not any(_has_two(run) for run in runs):
            raise ValueError(f"{source} holds no run with two values of the {quantity}; expected {_WANTED}.")
        for run in runs:
            if run.name in holders:
                raise ValueError(f"{holders[run.name]} and {source} both hold the run {run.name}: name one of them.")
        holders |= {run.name: source for run in runs}
        collected += runs
    return collected


def _has_two(run: ArenaRun) -> bool:
    return len(run.curve) > 1


def _by_method(arena_runs: Sequence[ArenaRun]) -> dict[tuple[str, str], list[_Curve]]:
    """Curves of all seeds by task and method; with several presets, the method's name includes the preset."""
    several = len({run.preset for run in arena_runs}) > 1
    runs: dict[tuple[str, str], list[_Curve]] = {}
    for run in arena_runs:
        if _has_two(run):
            method = f"{run.method} ({run.preset})" if several else run.method
            runs.setdefault((run.task, method), []).append(run.curve)
    return runs


def _by_size(method: str) -> list[str | int]:
    """The order of methods: alphabetical, but with sizes as numbers."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", method)]


def _check_shared(source: str, runs: Mapping[tuple[str, str], Sequence[_Curve]]) -> None:
    for (task, method), curves in runs.items():
        if len(_shared_steps(curves)) < 2:
            each = " and ".join(dict.fromkeys(_shown_steps(curve) for curve in curves))
            raise ValueError(
                f"{source}: the seeds of {method} on {task} share fewer than two steps (they have {each}), so there is "
                "no mean to draw: train them with the same --evaluate-every and --log-every, or draw them from folders "
                "of their own."
            )


def _shared_steps(curves: Sequence[_Curve]) -> list[int]:
    return sorted(set.intersection(*map(set, curves)))


def _shown_steps(curve: _Curve) -> str:
    steps = sorted(curve)
    return ", ".join(map(str, steps if len(steps) < 5 else [*steps[:2], "...", steps[-1]]))


def _diverged(runs: Mapping[tuple[str, str], Sequence[_Curve]]) -> list[str]:
    """The methods with seeds whose values are not all finite, each with its task and the number of these seeds."""
    said = []
    for (task, method), curves in sorted(runs.items()):
        wild = sum(not all(math.isfinite(value) for _, value in curve.values()) for curve in curves)
        if wild:
            said.append(f"{method} on {task} ({wild} of {len(curves)} seed{'s' if len(curves) > 1 else ''})")
    return said


def _read_runs(folder: Path, quantity: str, before: _Settings) -> Iterator[ArenaRun]:
    for curves, content in _classifying(folder):
        points = read_curves(curves).get(quantity, [])
        if any(math.isnan(seconds) for *_, seconds in points):
            raise ValueError(f"{curves} has no seconds: it is of an earlier version; train that run again.")
        settings = content["settings"]
        # Runs of an earlier version do not name their size.
        method = content.get("method", settings["attention"])
        curve = {int(step): (seconds, value) for step, value, seconds in points}
        drawn = ArenaRun(
            settings["task"],
            method,
            _preset(settings["preset"], "pretrained" if settings.get("model") else None, settings.get("positions")),
            curve,
            curves.parent.name,
        )
        first, same = before.setdefault(drawn[:3], (curves.parent, settings))
        different = [key for key in sorted(same.keys() & settings.keys() - _FREE) if same[key] != settings[key]]
        if different:
            raise ValueError(
                f"{first} and {curves.parent} differ in {', '.join(different)}; a mean over "
                "seeds needs the same settings: draw them from folders of their own."
            )
        yield drawn


def _classifying(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The curves of the runs in a folder that train a classifier on a task, each with its run.json.

    Other runs in the folder, such as the pretraining of their encoder, are left out.
    """
    for path in sorted(folder.glob("*/run.json")):
        try:
            content = read_json(path, remedy="move its folder elsewhere")
            settings = content["settings"]
            classifies = {"task", "preset", "attention"} <= settings.keys() and not settings.get("mask_share")
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} does not describe a run ({error}): move its folder elsewhere.") from error
        if classifies and (curves := path.with_name("curves.csv")).is_file():
            yield curves, content


def _preset(name: str, start: str | None, positions: str | int | None) -> str:
    return ", ".join(str(word) for word in (name, start, positions) if word)


def _read_gathered(path: Path, wanted: str) -> Iterator[ArenaRun]:
    runs: dict[str, _Curve] = {}
    for point in read_points(path, GATHERED):
        if point.quantity == wanted:
            runs.setdefault(point.run, {})[int(point.step)] = (point.seconds, point.value)
    for run, curve in runs.items():
        if (named := _RUN_NAME.fullmatch(run)) is None:
            raise ValueError(f"{path} names the run {run!r}; expected TASK-METHOD-PRESET-seedSEED.")
        besides = f", {named['besides']}" if named["besides"] else ""
        preset = _preset(named["preset"], named["start"], named["positions"])
        yield ArenaRun(named["task"], named["method"] + besides, preset, curve, run)


def _draw(axes: "Axes", curves: Sequence[_Curve], method: str, look: Look, over: Axis, factor: float) -> None:
    """One line with its band, over the steps that all its seeds have reached."""
    steps = _shared_steps(curves)
    times = [statistics.fmean(curve[step][0] for curve in curves) if over == "seconds" else step for step in steps]
    values = [_finite([factor * curve[step][1] for curve in curves]) for step in steps]
    # Without some markers, lines of a fifth size would look like those of the first.
    every = 1 if len(steps) <= 50 else len(steps) // 10
    means = [statistics.fmean(each) for each in values]
    style: dict[str, Any] = {"color": look.colour, "linestyle": look.line, "marker": look.marker}
    axes.plot(times, means, markevery=every, label=method, **style)
    if len(curves) > 1:
        axes.fill_between(
            times, [min(each) for each in values], [max(each) for each in values], color=look.colour, alpha=0.15
        )


def _finite(values: list[float]) -> list[float]:
    """The values of all seeds at a step, or NaN for all if one is not finite, so that none is drawn."""
    return values if all(map(math.isfinite, values)) else [math.nan] * len(values)
