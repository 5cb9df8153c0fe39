r"""Fig. 2 of Skyformer: the validation accuracy over the seconds and steps of training, from trained runs.

--runs names the folder of `nystrom lra run`, or the file that `nystrom lra curves --gather` wrote of its curves. Rows
are the points of the curves; their device, dtype and seconds are those of the runs.

- The limit of a run is the mean of the last quarter of its evaluations, which must be at least three; its noise is
  their standard deviation.
- A run that is still rising has no limit: the later half of that quarter is above the earlier half by more than a point
  and by more than two standard errors, estimated from the differences of successive evaluations.
- The limit is reached at the first evaluation that is not more than two deviations of the noise below it.
- A run has learned if its limit is more than two points and two deviations above the share of the largest class.

Softmax attention is compared with another method on a task and preset if both have at least three seeds that ran to the
same step, have limits, and have learned. The steps or seconds of softmax attention are above those of the
other if the difference of the means is more than two standard errors and more than the steps or seconds between two
evaluations; likewise for below.

Source: Chen et al. (2021), arXiv:2111.00035, Fig. 2 and section 5; the figure has no numbers. The largest class of
ListOps, 16 to 17 % of its samples, is that of the generated data.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev, variance
from typing import NamedTuple

import pandas as pd

from nystrom_lab.measure.rows import Row
from nystrom_lab.report.table import Table
from nystrom_papers.report.lra.curves import ArenaRun, lra_curves_figure, read_lra_curves
from nystrom_papers.report.lra.runs import Line
from nystrom_papers.report.printed import LRA_CLASSES, LRA_TASKS, SKYFORMER_TABLE_1
from nystrom_papers.studies.arena.beside_paper import Ran, differs_from_paper
from nystrom_papers.studies.reproduce.declared import Answer, Claim, declare, each, frame_of
from nystrom_papers.studies.reproduce.known import MARGIN, Known, error_over, estimate, holds_for_share, is_competitive
from nystrom_papers.studies.reproduce.study import Figures, Plan, Setting, part

_ACCURACY = "validation accuracy"
_SEEDS, _FEWEST, _RISE = 3, 3, 0.01
_EXACT, _KERNELS = "softmax", ("kernelized", "skyformer")
_LARGEST_CLASS = {task: 1 / classes for task, classes in LRA_CLASSES.items()} | {"listops": 0.17}


class Plateau(NamedTuple):
    """The limit of a run, the noise around it, what it took, and the steps and seconds between two evaluations."""

    accuracy: float
    noise: float
    steps: float
    seconds: float
    every: tuple[float, float]


def _plan(setting: Setting) -> Plan:
    if setting.runs is None:
        raise ValueError(
            "this study draws trained runs: name the folder of `nystrom lra run`, or the file that `nystrom lra "
            "curves --gather` wrote of it, with --runs."
        )
    runs = [run for run in read_lra_curves([setting.runs], "accuracy") if len(run.curve) > 1]
    if setting.size == "paper":
        _check_all(runs, setting.runs)
    parts = [part(re.sub(r"\s", "_", run.name), _measure, run) for run in runs]
    return Plan(parts, {"runs": " ".join(part.name for part in parts)}, _beside_paper(runs))


def _check_all(runs: Sequence[ArenaRun], source: Path) -> None:
    """Raise ValueError unless all runs that the figure shows are present."""
    seeds = [(run.task, Line(run.method, "").base) for run in runs if run.preset == "skyformer"]
    missing = [
        f"{method} on {task}"
        for method in SKYFORMER_TABLE_1
        for task in LRA_TASKS
        if seeds.count((task, method)) < _SEEDS
    ]
    if missing:
        raise ValueError(
            f"--size paper needs three runs with the preset skyformer of {', '.join(missing)} in {source}: make them "
            f"with nystrom lra run --preset skyformer --methods {' '.join(SKYFORMER_TABLE_1)} --seeds 0 1 2."
        )


def _measure(run: ArenaRun) -> Iterable[Row]:
    method, _, besides = run.method.partition(", ")
    facts = {"task": run.task, "preset": ", ".join(filter(None, (run.preset, besides)))}
    seed = re.search(r"seed(\d+)", run.name)
    for step, (seconds, value) in sorted(run.curve.items()):
        lost = not math.isfinite(value)
        yield Row(
            quantity=_ACCURACY, method=method, value=math.nan if lost else value,
            facts={**facts, "step": step, "seconds": f"{seconds:g}"},
            seed=int(seed[1]) if seed else None, dtype="dtype of the runs", device="device of the runs",
            note="the accuracy is not finite" if lost else "",
        )  # fmt: skip


def _runs(rows: pd.DataFrame) -> list[ArenaRun]:
    """The runs that the rows are from, in the order of the rows."""
    runs: dict[str, ArenaRun] = {}
    for row in each(rows, _ACCURACY):
        name = f"{row.task}-{row.method}-{row.preset}-seed{row.seed}"
        run = runs.setdefault(name, ArenaRun(row.task, row.method, row.preset, {}, name))
        run.curve[int(row.step)] = (float(row.seconds), row.value)
    return list(runs.values())


def find_limit(curve: Mapping[int, tuple[float, float]]) -> Plateau | None:
    """The limit of a run; None if it has too few evaluations or one that is not finite, or is still rising.

    The curve has seconds and accuracy of each evaluation, by step.
    """
    steps = sorted(curve)
    values = [curve[step][1] for step in steps]
    quarter = len(values) // 4
    if quarter < _FEWEST or not all(map(math.isfinite, values)):
        return None
    last = values[-quarter:]
    accuracy, noise = fmean(last), stdev(last)
    earlier, later = last[: quarter // 2], last[quarter // 2 :]
    moved = math.sqrt(fmean((b - a) ** 2 for a, b in pairwise(last)) / 2)
    error = moved * math.sqrt(1 / len(earlier) + 1 / len(later))
    if fmean(later) - fmean(earlier) > max(_RISE, 2 * error):
        return None
    reached = next(step for step in steps if curve[step][1] >= accuracy - 2 * noise)
    times = [curve[step][0] for step in steps]
    every = ((steps[-1] - steps[0]) / (len(steps) - 1), (times[-1] - times[0]) / (len(steps) - 1))
    return Plateau(accuracy, noise, reached, curve[reached][0], every)


def _beside_paper(runs: Sequence[ArenaRun]) -> str:
    """How the runs differ from those of the figure."""
    ran = Counter((run.task, run.preset, Line(run.method, "").base, max(run.curve)) for run in runs)
    return differs_from_paper(
        [Ran(task, preset, method, seeds, steps) for (task, preset, method, steps), seeds in ran.items()],
        "skyformer",
        SKYFORMER_TABLE_1,
    )


def _groups(rows: pd.DataFrame) -> dict[tuple[str, str], dict[str, list[ArenaRun]]]:
    """Runs by task and preset, and by method."""
    groups: dict[tuple[str, str], dict[str, list[ArenaRun]]] = {}
    for run in _runs(rows):
        groups.setdefault((run.task, run.preset), {}).setdefault(run.method, []).append(run)
    return groups


def _state(task: str, runs: Sequence[ArenaRun]) -> tuple[list[Plateau], str]:
    """The limits of the seeds of a method, and why they decide nothing; "" if they decide."""
    limits = [limit for run in runs if (limit := find_limit(run.curve)) is not None]
    if len({max(run.curve) for run in runs}) > 1:
        return limits, "other steps"
    if len(limits) < len(runs):
        few = any(len(run.curve) < 4 * _FEWEST for run in runs)
        return limits, "few evaluations" if few else "no limit"
    if any(each.accuracy - 2 * each.noise <= _LARGEST_CLASS[task] + MARGIN for each in limits):
        return limits, "not learned"
    return limits, "" if len(runs) >= _SEEDS else "few seeds"


def _deciding(rows: pd.DataFrame) -> dict[str, dict[str, list[Plateau]]]:
    """The limits that decide, by task with preset and by method; of a method's sizes, the one with the most seeds."""
    plateaus: dict[str, dict[str, list[Plateau]]] = {}
    for (task, preset), methods in _groups(rows).items():
        here = plateaus.setdefault(f"{task} ({preset})", {})
        if _EXACT not in methods:
            continue
        end = max(methods[_EXACT][0].curve)
        for method, runs in sorted(methods.items(), key=lambda each: -len(each[1])):
            limits, why = _state(task, runs)
            if not why and max(runs[0].curve) == end:
                here.setdefault(Line(method, "").base, limits)
    return {task: methods for task, methods in plateaus.items() if _EXACT in methods}


def _above(ours: Sequence[float], other: Sequence[float], least: float) -> bool | None:
    """Whether a mean is above another beyond two standard errors and the least difference; None where it is neither."""
    gap, error = fmean(ours) - fmean(other), max(2 * _error(ours, other), least)
    return Known(gap - error, gap + error).above(0)


def _error(ours: Sequence[float], other: Sequence[float]) -> float:
    """Standard error of the difference of two means."""
    return math.hypot(error_over(ours), error_over(other))


def _comparable(other: Sequence[Plateau], exact: Sequence[Plateau]) -> bool | None:
    """Whether a limit is at most two points below that of softmax attention."""
    ours, theirs = ([each.accuracy for each in limits] for limits in (other, exact))
    return is_competitive(fmean(ours) - fmean(theirs), _error(ours, theirs))


_NOTHING = "no task has three seeds of both that learned and came to a limit, see the table."


def _more_steps(rows: pd.DataFrame) -> Answer:
    signs: list[bool | None] = []
    said = []
    for task, methods in _deciding(rows).items():
        for name in (name for name in _KERNELS if name in methods):
            exact, other = methods[_EXACT], methods[name]
            ours, theirs = ([each.steps for each in limits] for limits in (exact, other))
            level = _comparable(other, exact)
            signs.append(_above(ours, theirs, max(each.every[0] for each in (*exact, *other))) if level else None)
            lower = {True: "", False: ", to a lower limit", None: ", to a limit that may be lower"}[level]
            said.append(f"{fmean(ours):,.0f} beside {fmean(theirs):,.0f} of {name} on {task}{lower}")
    return holds_for_share(signs), f"steps to the limit: {'; '.join(said)}." if said else _NOTHING


def _more_spread(rows: pd.DataFrame) -> Answer:
    deciding = _deciding(rows)
    signs: list[bool | None] = []
    said = []
    for name in _KERNELS:
        pairs = [(methods[_EXACT], methods[name]) for methods in deciding.values() if name in methods]
        if not pairs:
            continue
        free = [sum(len(pair[i]) - 1 for pair in pairs) for i in range(2)]
        pooled = [
            math.sqrt(sum((len(pair[i]) - 1) * variance(each.accuracy for each in pair[i]) for pair in pairs) / free[i])
            for i in range(2)
        ]
        ratio = math.log(max(pooled[0], 1e-9) / max(pooled[1], 1e-9))
        error = math.sqrt(sum(1 / (2 * each) for each in free))
        signs.append(estimate(ratio, error).above(0))
        said.append(
            f"{100 * pooled[0]:.2f} points beside {100 * pooled[1]:.2f} of {name} (tasks: {len(pairs)}; a ratio of "
            f"{math.exp(2 * error):.1f} would tell)"
        )
    return holds_for_share(signs), f"deviation of the limit over the seeds: {'; '.join(said)}." if said else _NOTHING


def _converges(rows: pd.DataFrame) -> Answer:
    signs: list[bool | None] = []
    said = []
    for task, methods in _deciding(rows).items():
        if "skyformer" not in methods:
            continue
        exact, ours = methods[_EXACT], methods["skyformer"]
        slow, fast = ([each.seconds for each in limits] for limits in (exact, ours))
        slower = _above(slow, fast, max(each.every[1] for each in (*exact, *ours)))
        signs.append(holds_for_share([slower, _comparable(ours, exact)]))
        gap = fmean(each.accuracy for each in ours) - fmean(each.accuracy for each in exact)
        said.append(f"{fmean(fast):,.0f} s beside {fmean(slow):,.0f} s, {100 * gap:+.1f} points on {task}")
    return holds_for_share(signs), f"{'; '.join(said)}." if said else _NOTHING


def _tables(rows: pd.DataFrame) -> list[Table]:
    tables = []
    for (task, preset), methods in _groups(rows).items():
        lines = []
        for method, runs in methods.items():
            limits, why = _state(task, runs)
            last = max(max(run.curve) for run in runs)
            end = fmean(run.curve[max(run.curve)][0] for run in runs)
            cells = ["", "", ""]
            if len(limits) == len(runs):
                spread = f" ± {100 * stdev(each.accuracy for each in limits):.1f}" if len(limits) > 1 else ""
                cells = [
                    f"{100 * fmean(each.accuracy for each in limits):.1f}{spread}",
                    f"{fmean(each.steps for each in limits):,.0f}",
                    f"{fmean(each.seconds for each in limits):,.0f}",
                ]
            lines.append([method, str(len(runs)), f"{last:,}", f"{end:,.0f}", *cells, why])
        heads = ["attention", "seeds", "steps", "seconds", "limit, %", "steps to it", "seconds to it", "not compared"]
        tables.append(Table(f"{task}, {preset}: validation accuracy", heads, lines))
    return tables


def _figures(rows: pd.DataFrame, folder: Path) -> Figures:
    draw = partial(lra_curves_figure, _runs(rows), str(folder))
    return {"": draw(over="seconds"), "steps": draw(over="steps")}


_SECTION = "Skyformer, section 5"

STUDIES = {
    "skyformer-figure-2": declare(
        shows="validation accuracy over the seconds and steps of training",
        source="Skyformer, arXiv:2111.00035, Fig. 2",
        needs="--runs with those of nystrom lra run, or the file of their curves",
        paper_needs="about 50 hours on an H200",
        trains=True,
        plan=_plan,
        tables=[_tables],
        claims=[
            Claim(
                "Softmax attention takes more steps to its limit than attention with Gaussian kernels.", _more_steps,
                _SECTION,
            ),
            Claim(
                "Seeds of softmax attention end further apart than those of attention with Gaussian kernels.",
                _more_spread, _SECTION,
            ),
            Claim(
                "Skyformer converges to its limit in less time than softmax attention, with comparable accuracy.",
                _converges, _SECTION,
            ),
        ],
        figures=_figures,
        differs=lambda rows: _beside_paper(_runs(frame_of(rows))),
    )
}  # fmt: skip
