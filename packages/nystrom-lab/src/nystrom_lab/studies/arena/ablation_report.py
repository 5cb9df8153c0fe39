"""What the rows of the ablation of the arena say: a table, verdicts and a figure."""

import math
import statistics
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd

from nystrom_lab.report.lra.runs import FIRST_OPERATOR
from nystrom_lab.report.plots.canvas import PAGE, figure_of, look
from nystrom_lab.report.table import Table
from nystrom_lab.studies.reproduce.declared import Claim, Found, each
from nystrom_lab.studies.reproduce.known import error_over

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TASKS = ("listops", "text")
# The arms with their names for readers, in the order in which each builds on the one before.
NAMES = {
    "papers": "the papers' model",
    "normed": "+ norm of the pooled",
    "rotary": "+ rotary positions",
    "convolution": "+ short convolutions",
    "lifted": "+ denoising or shuffling",
    "near_far": "+ near_far for nystrom",
    "softmax": "all, exact attention",
    "window": "all, window alone",
    "none": "all, no attention",
}
# Claims, by the arm and the arm that it is compared with.
CLAIMS = {
    ("normed", "papers"): "A norm of the pooled tokens over the batch lifts the papers' model.",
    ("rotary", "normed"): "Rotary positions lift it further.",
    ("convolution", "rotary"): "Short convolutions of queries, keys and values lift it further.",
    ("lifted", "convolution"): "Denoising on Text and shuffled arguments on ListOps lift it further.",
    ("near_far", "lifted"): "Near and far attention lifts it further than Nyström attention.",
    ("softmax", "none"): "Exact attention lifts the accuracy above that of the convolutions alone.",
    ("lifted", "none"): "Nyström attention lifts the accuracy above that of the convolutions alone.",
    ("near_far", "none"): "Near and far attention lifts the accuracy above that of the convolutions alone.",
    ("window", "none"): "A window lifts the accuracy above that of the convolutions alone.",
    ("softmax", "window"): "Exact attention lifts the accuracy above that of a window.",
}
_BEFORE = {arm: other for arm, other in CLAIMS if other not in ("none", "window")}
# The guesses without a model that the rows of a training hold: shares of the test samples that they get right.
GUESSES = ("largest class of test", FIRST_OPERATOR)
# From so many seeds on, their deviation is used.
_SEEDS = 3


class ArmScore(NamedTuple):
    """The test accuracies of an arm on a task.

    Attributes:
        values: The accuracy of each seed.
        samples: Number of test samples.
    """

    values: tuple[float, ...]
    samples: int

    @property
    def mean(self) -> float:
        """Mean over the seeds."""
        return statistics.fmean(self.values)

    @property
    def shown(self) -> str:
        """The mean in percent, with the standard deviation over seeds if there are several."""
        spread = f" ± {100 * statistics.stdev(self.values):.1f}" if len(self.values) > 1 else ""
        return f"{100 * self.mean:.1f}{spread}"

    @property
    def error(self) -> float:
        """Standard error of the mean."""
        share = math.sqrt(self.mean * (1 - self.mean) / self.samples)
        return max(share, error_over(self.values)) if len(self.values) >= _SEEDS else share


class Gap(NamedTuple):
    """How far an arm is above another on a task.

    Attributes:
        gap: The difference of the means.
        error: Its standard error.
        seeds: Numbers of seeds of both, such as "3" or "3 and 1".
    """

    gap: float
    error: float
    seeds: str

    @property
    def side(self) -> int:
        """1 if it is above, -1 if it is below, 0 if both are equal within two standard errors."""
        return 0 if abs(self.gap) <= 2 * self.error else int(math.copysign(1, self.gap))

    @property
    def shown(self) -> str:
        """The difference in points, with its standard error."""
        return f"{100 * self.gap:+.1f} ± {100 * self.error:.1f}"


def scores(rows: pd.DataFrame) -> dict[tuple[str, str], ArmScore]:
    """Scores by task and arm."""
    found: dict[tuple[str, str], dict[int | None, Any]] = {}
    for row in each(rows, "test accuracy"):
        found.setdefault((row.task, row.method), {})[row.seed] = row
    return {
        (task, arm): ArmScore(tuple(row.value for row in seeds.values()), min(row.repeats for row in seeds.values()))
        for task in TASKS
        for arm in NAMES
        if (seeds := found.get((task, arm)))
    }


def _gap(found: Mapping[tuple[str, str], ArmScore], task: str, arm: str, other: str) -> Gap | None:
    """The difference of two arms; None where one of them was not trained."""
    ours, theirs = found.get((task, arm)), found.get((task, other))
    if ours is None or theirs is None:
        return None
    counts = dict.fromkeys((str(len(ours.values)), str(len(theirs.values))))
    return Gap(ours.mean - theirs.mean, math.hypot(ours.error, theirs.error), " and ".join(counts))


def tables(rows: pd.DataFrame) -> list[Table]:
    """The accuracies of all arms, compared with the arm to which each adds a part and with no attention.

    The minutes of training have a column for each device, since seeds may have been trained on several devices.
    """
    found, lines = scores(rows), []
    devices = sorted(set(rows["device"]))
    for (task, arm), score in found.items():
        others = (_BEFORE.get(arm), "none" if (arm, "none") in CLAIMS else None)
        gaps = [None if other is None else _gap(found, task, arm, other) for other in others]
        lines.append([task, NAMES[arm], str(len(score.values)), score.shown])
        lines[-1] += ["" if gap is None else gap.shown for gap in gaps]
        lines[-1] += [_minutes(rows, device, task, arm) for device in devices]
    title = (
        "test accuracy and its standard deviation over seeds; differences in points and their standard errors, to the "
        "arm above and to no attention; minutes of training"
    )
    heads = ["task", "arm", "seeds", "accuracy, %", "to the arm above", "to no attention"]
    heads += ["min"] if len(devices) == 1 else [f"min, {device.partition(',')[0]}" for device in devices]
    return [Table(title, heads, lines, left=2)]


def _minutes(rows: pd.DataFrame, device: str, task: str, arm: str) -> str:
    """Mean minutes of training of an arm on one device; "" if there are none."""
    seconds = [row.value for row in each(rows, "training time", device=device, task=task, method=arm)]
    return f"{statistics.fmean(seconds) / 60:.1f}" if seconds else ""


def _guesses(rows: pd.DataFrame) -> dict[str, tuple[float, str]]:
    """Share of the test samples that the best guess gets right, and its name, by task."""
    found: dict[str, tuple[float, str]] = {}
    for row in each(rows, GUESSES):
        guess = (row.value, row.quantity.removesuffix(" of test"))
        found[row.task] = max(guess, found.get(row.task, guess))
    return found


def _lifts(arm: str, other: str, rows: pd.DataFrame) -> Found:
    """Whether an arm is above another on a task, and below it on none; at the best guess both are equal."""
    found, guesses = scores(rows), _guesses(rows)
    sides, said = [], []
    for task in TASKS:
        gap = _gap(found, task, arm, other)
        if gap is None:
            said.append(f"{task} not trained")
            continue
        side, words = gap.side, {1: "above", 0: "equal", -1: "below"}[gap.side]
        told, name = guesses.get(task, (0.0, ""))
        if all(score.mean - told <= 2 * score.error for score in (found[task, arm], found[task, other])):
            side, words = 0, f"{words}, both at the guess of the {name}"
        sides.append(side)
        said.append(f"{task} {gap.shown} points, {words} ({gap.seeds} seed{'' if gap.seeds == '1' else 's'})")
    lifts = 1 in sides and len(sides) == len(TASKS)
    return False if -1 in sides else True if lifts else None, f"{'; '.join(said)}."


_REFUSED = (
    "it is below on a task by more than two standard errors; unknown where it is above on none, or one is not trained"
)
CLAIMED = [Claim(says, "this library", partial(_lifts, arm, other), _REFUSED) for (arm, other), says in CLAIMS.items()]


def figures(rows: pd.DataFrame, folder: Path) -> "Mapping[str, Figure]":
    """The arms on one axis, for both tasks: means with two standard errors, seeds as points, and the best guess."""
    found, guesses = scores(rows), _guesses(rows)
    arms = [arm for arm in NAMES if any(of == arm for _, of in found)]
    tasks = [task for task in TASKS if any(of == task for of, _ in found)]
    figure = figure_of(PAGE, 1.0 + 0.32 * max(2, len(arms)))
    axes = figure.subplots()
    for number, task in enumerate(tasks):
        (colour, marker), shift = look(number), 0.12 * (2 * number - 1)
        here = [(place + shift, found[task, arm]) for place, arm in enumerate(arms) if (task, arm) in found]
        axes.errorbar(
            [100 * score.mean for _, score in here],
            [place for place, _ in here],
            xerr=[200 * score.error for _, score in here],
            color=colour, marker=marker, linestyle="", elinewidth=0.9, label=f"{task}, ± two standard errors",
        )  # fmt: skip
        seeds = [(100 * value, place) for place, score in here for value in score.values]
        axes.plot(*zip(*seeds, strict=True), color=colour, marker=".", markersize=3, linestyle="", alpha=0.5)
        if task in guesses:
            told, name = guesses[task]
            axes.axvline(100 * told, color=colour, linewidth=0.8, linestyle=":", label=f"{task}, {name}")
    axes.set(yticks=range(len(arms)), yticklabels=[NAMES[arm] for arm in arms], xlabel="test accuracy, %")
    axes.invert_yaxis()
    axes.grid(True, axis="x")
    figure.legend(loc="outside lower center", ncols=4)
    return {"": figure}
