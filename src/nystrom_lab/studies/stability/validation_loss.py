r"""Fig. 1 of Skyformer's Appendix A: the validation loss over the seconds and steps of training.

With --runs the curves are those of trained runs of `nystrom lra run`, by task. Without it, a model is trained with each
method on ListOps of up to 128 tokens, by `nystrom_lab.studies.stability.loop`.

Claim: "Skyformer converges faster and finishes 50k steps earlier than vanilla Attention and Kernelized Attention over
all tasks". The rules that decide it, in every task, on means over the seeds:

- Skyformer finishes earlier: the seconds of all its steps are at least a tenth fewer than those of softmax and of
  kernelized attention. The claim fails if they are at least a tenth more than those of either.
- Skyformer converges faster: when it finishes, its loss is at least a twentieth lower than those of both others at
  their last evaluation up to that time. The claim fails if its loss is at least a twentieth higher than that of either.

A task is left out unless all three methods were trained to the same step. If the last loss of softmax or kernelized
attention is above nine tenths of its first, that method has not learned, and the task decides nothing.

Seconds are those of the machine. No rule can see whether a run shared it with other work; do not pass such runs. Beside
the paper's methods there is near_far, with as many keys for each query as the others have landmarks; no claim rests on
it.

Source: Chen et al. (2021), arXiv:2111.00035, Appendix A, which prints no numbers.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from nystrom_lab.data.lra.facts import LRA
from nystrom_lab.measure.rows import Row, cpu_name, new_row
from nystrom_lab.report.plots.canvas import PAGE, figure_of, method_look
from nystrom_lab.report.plots.curves import read_curves
from nystrom_lab.report.summary import Verdict
from nystrom_lab.report.table import Table
from nystrom_lab.studies.reproduce.known import most
from nystrom_lab.studies.reproduce.study import Part, Plan, Setting, Study
from nystrom_lab.studies.stability.arena import ArenaTask, new_model, size_of
from nystrom_lab.studies.stability.loop import train_plainly, validation_batches
from nystrom_lab.training.presets.published import DEPARTURES
from nystrom_lab.training.presets.sizes import DataSizes
from nystrom_lab.training.run.folder import RunFolder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METHODS = ("softmax", "kernelized", "nystrom", "skyformer", "near_far")
# Short enough that training leaves its first plateau within some hundred steps.
_SHORT = DataSizes(folder="listops", train=12_800, val=256, test=1, min_length=64, max_length=128)
_STEPS, _BATCH, _EVERY, _RATE, _LANDMARKS = 400, 32, 50, 2e-3, 32
_LOSS = "validation loss"
_FEWER_SECONDS, _LOWER_LOSS, _LEARNED = 0.1, 0.05, 0.9

# Steps: (seconds, loss).
_Curve = dict[int, tuple[float, float]]


def _plan(setting: Setting) -> Plan:
    if setting.runs is None:
        if setting.size == "paper":
            raise ValueError(
                "--size paper needs trained runs: name the folder of `nystrom lra run --preset skyformer` with --runs."
            )
        source = ArenaTask("listops", None, _SHORT)
        parts = [Part(method, partial(_measure_new, source, method)) for method in METHODS]
        said = {
            "task": source.name,
            "methods": " ".join(METHODS),
            "training": f"{_STEPS} steps of {_BATCH}, learning rate {_RATE:g}, {_LANDMARKS} landmarks, preset demo",
            "seed": "0",
        }
        differs = (
            f"ListOps to {_SHORT.max_length} tokens alone, {_STEPS} steps instead of 50,000, "
            f"{_LANDMARKS} landmarks instead of 128, a larger learning rate and larger start weights"
        )
        return Plan(parts, said, differs)
    curves = _find_curves(setting.runs, paper=setting.size == "paper")
    tasks = {task for task, _, _ in curves.values()}
    if setting.size == "paper" and (missing := [task for task in LRA if task not in tasks]):
        raise ValueError(
            f"--size paper needs runs of {', '.join(missing)} with the preset skyformer in {setting.runs}."
        )
    parts = [Part(name, partial(_measure_run, setting.runs / name, *found)) for name, found in curves.items()]
    return Plan(parts, {"runs": " ".join(curves)}, DEPARTURES if setting.size == "paper" else "the runs that are there")


def _find_curves(runs: Path, *, paper: bool) -> dict[str, tuple[str, str, int]]:
    """Task, method and seed of each run of these methods that was evaluated, by name."""
    found = {}
    for file in sorted(runs.glob("*/run.json")):
        settings = RunFolder(file.parent).read()["settings"]
        if settings["attention"] not in METHODS or (paper and settings["preset"] != "skyformer"):
            continue
        curves = file.with_name("curves.csv")
        if curves.is_file() and _LOSS in read_curves(curves):
            found[file.parent.name] = (settings["task"], settings["attention"], settings["seed"])
    if not found:
        raise ValueError(
            f"--runs {runs} holds no run with a validation loss; expected the folder of `nystrom lra run`."
        )
    return found


def _measure_run(run: Path, task: str, method: str, seed: int, folder: Path) -> Iterable[Row]:
    points = read_curves(run / "curves.csv")[_LOSS]
    return [_row(task, method, seed, int(step), seconds, loss) for step, loss, seconds in points]


def _measure_new(source: ArenaTask, method: str, folder: Path) -> Iterable[Row]:
    model = new_model(source, method, seed=0, options=size_of(method, _LANDMARKS), preset="demo")
    validation = validation_batches(source, source.open("val", folder), batch=64, count=4)
    trace = train_plainly(
        model, source, source.open("train", folder), validation,
        learning_rate=_RATE, steps=_STEPS, batch=_BATCH, every=_EVERY, seed=0,
    )  # fmt: skip
    points = zip(trace.step, trace.seconds, trace.validation_loss, strict=True)
    return [_row(source.task, method, 0, int(step), seconds, loss) for step, seconds, loss in points]


def _row(task: str, method: str, seed: int, step: int, seconds: float, loss: float) -> Row:
    lost = not math.isfinite(loss)
    return new_row(
        study="",
        quantity=_LOSS,
        method=method,
        value=math.nan if lost else loss,
        unit="",
        facts={"task": task, "step": step, "seconds": f"{seconds:.3f}"},
        seed=seed,
        device=cpu_name(),
        note="the loss is not finite" if lost else "",
    )


def _curves(rows: Sequence[Row]) -> dict[str, dict[str, _Curve]]:
    """Curves by task and method: means over the seeds, at the steps that all of them reached."""
    runs: dict[str, dict[str, dict[int | None, _Curve]]] = {}
    for row in rows:
        task, step, seconds = (row.facts[name] for name in ("task", "step", "seconds"))
        seeds = runs.setdefault(task, {}).setdefault(row.method, {})
        seeds.setdefault(row.seed, {})[int(step)] = (float(seconds), row.value)
    return {
        task: {method: _mean(list(seeds.values())) for method, seeds in methods.items()}
        for task, methods in runs.items()
    }


def _mean(curves: Sequence[_Curve]) -> _Curve:
    shared = sorted(set.intersection(*map(set, curves)))
    return {step: (fmean(c[step][0] for c in curves), fmean(c[step][1] for c in curves)) for step in shared}


def _tables(rows: Sequence[Row]) -> Sequence[Table]:
    tables = []
    for task, methods in _curves(rows).items():
        lines = [
            [method, str(max(curve)), f"{curve[max(curve)][0]:.1f}", f"{curve[max(curve)][1]:.3f}",
             f"{min(loss for _, loss in curve.values()):.3f}"]
            for method, curve in methods.items()
        ]  # fmt: skip
        tables.append(Table(task, ["method", "steps", "seconds", "last loss", "lowest loss"], lines))
    return tables


def _verdicts(rows: Sequence[Row]) -> Sequence[Verdict]:
    earlier, lower, said, losses, idle = [], [], [], [], []
    for task, methods in _curves(rows).items():
        others = [methods[m] for m in ("softmax", "kernelized") if m in methods]
        ours = methods.get("skyformer")
        if ours is None or len(others) < 2 or len({max(curve) for curve in (ours, *others)}) > 1:
            continue
        learned = all(curve[max(curve)][1] <= _LEARNED * curve[min(curve)][1] for curve in others)
        end, loss = ours[max(ours)]
        ends = [curve[max(curve)][0] for curve in others]
        reached = [[value for seconds, value in curve.values() if seconds <= end][-1] for curve in others]
        if learned:
            earlier += [_below(end, other, _FEWER_SECONDS) for other in ends]
            lower += [_below(loss, other, _LOWER_LOSS) for other in reached]
        else:
            earlier.append(None)
            lower.append(None)
            idle.append(f" On {task} softmax or kernelized attention has not learned.")
        said.append(f"{end:.1f} s beside {ends[0]:.1f} s and {ends[1]:.1f} s ({task})")
        losses.append(f"{loss:.3f} beside {reached[0]:.3f} and {reached[1]:.3f} ({task})")
    nothing = "no task has skyformer, softmax and kernelized trained to the same step."
    return [
        Verdict(
            "Skyformer finishes its steps earlier than softmax and kernelized attention in every task.",
            most(earlier),
            ", ".join(said) + "." + "".join(idle) if said else nothing,
        ),
        Verdict(
            "It converges faster than both.",
            most(lower),
            f"when it finishes, the validation losses are {', '.join(losses)}.{''.join(idle)}" if losses else nothing,
        ),
    ]


def _below(value: float, other: float, part: float) -> bool | None:
    """Whether a number is below another by a given part of it; False where it is above by as much."""
    return True if value <= other * (1 - part) else False if value >= other * (1 + part) else None


def _figures(rows: Sequence[Row], folder: Path) -> "Mapping[str, Figure]":
    curves = _curves(rows)
    figure = figure_of(PAGE, 0.5 + 2.3 * len(curves))
    grid = figure.subplots(len(curves), 2, squeeze=False, sharey="row")
    for (over_seconds, over_steps), (task, methods) in zip(grid, curves.items(), strict=True):
        for method, curve in methods.items():
            look = method_look(method)
            marker = look.marker if len(curve) <= 30 else ""
            style = {"color": look.colour, "linestyle": look.line, "marker": marker}
            losses = [loss for _, loss in curve.values()]
            over_seconds.plot([seconds for seconds, _ in curve.values()], losses, label=method, **style)
            over_steps.plot(list(curve), losses, **style)
        over_seconds.set_ylabel(f"{task}\nvalidation loss")
        over_seconds.set_xlabel("seconds of training")
        over_steps.set_xlabel("step")
        for axes in (over_seconds, over_steps):
            axes.grid(True)
    figure.legend(*grid[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    return {"": figure}


STUDIES = {"skyformer-appendix-a": Study(plan=_plan, tables=_tables, verdicts=_verdicts, figures=_figures)}
