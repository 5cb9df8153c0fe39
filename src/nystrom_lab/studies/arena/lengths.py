"""Beyond the lengths of the arena: which attention still trains here, from 1,024 to 16,384 tokens.

The tasks are Pathfinder of 32 x 32, 64 x 64 and 128 x 128 pixels (snakes of three dashes) and ListOps of 6,000 to 8,000
tokens. The methods are exact attention in one fused call, Nyström attention with 32 landmarks, and near_far. The model
is that of the preset demo, two layers of width 64, without the convolution of the values. A step has about 32,768
tokens at every length, and takes half a second on one slow core with Nyström attention.

First the steps of all methods are timed in turn, as `nystrom_lab.studies.arena.settled_steps` describes; a step that
would take longer than two minutes is not run. Then each method is trained for 300 steps (size "small") or 3,000 (size
"paper"), in runs of `nystrom train` in the folder arena-small or arena-paper beside those of the studies. A run is not
begun if, judging by a step of one sample, it would take longer than twenty minutes ("paper": 200), or would not fit in
half of the free memory; its row says so. The curves are those of the training loss. So few steps are far from
what Pathfinder needs to do better than chance, whose loss is 0.693.

The claim, at each length: only a linear method trains here. The rule:

- it holds if exact attention was not begun, since it would need at least one and a half times the limit of time or
  memory, and Nyström attention or near_far finished its steps;
- it is refuted if exact attention finished too, or if no method did;
- it is undecided if exact attention would need less than one and a half times the limit, since another machine, or the
  same one at another hour, would have begun it; and as long as runs are missing.

Source: ours; the tasks are those of Tay et al. (2021), arXiv:2011.04006.
"""

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from nystrom.attention.method_names import read_method
from nystrom_lab.data.lra.listops.task import prepare_listops
from nystrom_lab.data.lra.pathfinder.task import prepare_pathfinder
from nystrom_lab.measure.rows import Row, cpu_name, new_row, read_rows
from nystrom_lab.report.plots.curves import read_curves
from nystrom_lab.studies.arena.lengths_report import ESTIMATE, LOSS, METHODS, figures, tables, verdicts
from nystrom_lab.studies.arena.settled_steps import SettledSteps, cost_rows, estimated, measure_in_turn
from nystrom_lab.studies.reproduce.study import Part, Plan, Setting, Study, beside_none
from nystrom_lab.studies.training.runs import Training, train
from nystrom_lab.training.hardware import Precision
from nystrom_lab.training.options import TrainOptions
from nystrom_lab.training.run.folder import RunFolder
from nystrom_lab.training.run_settings import Settings, settle

PRESET = "demo"
# The limit of a timed step in seconds, and the number of rounds.
_STEP_LIMIT, _ROUNDS = 120.0, 3
_READ = ("training time", "peak memory", "test accuracy")


class LengthCase(NamedTuple):
    """A task at a length.

    Attributes:
        task: The task.
        n: Tokens of the longest sample.
        batch: Samples of a step.
        samples: Samples for training; validation and test have a tenth as many each.
        shortest: Tokens of the shortest sample.
    """

    task: str
    n: int
    batch: int
    samples: int
    shortest: int = 0


class Extent(NamedTuple):
    """How long a run trains.

    Attributes:
        steps: Number of steps.
        limit: Seconds that a run may take; one that would take longer is not begun.
    """

    steps: int
    limit: float


CASES: dict[str, LengthCase] = {
    "pathfinder-32": LengthCase("pathfinder", 32**2, 32, 1600),
    "pathfinder-64": LengthCase("pathfinder", 64**2, 8, 800),
    "listops-8000": LengthCase("listops", 8000, 4, 400, shortest=6000),
    "pathfinder-128": LengthCase("pathfinder", 128**2, 2, 320),
}
EXTENTS = {"small": Extent(300, 1200.0), "paper": Extent(3000, 12000.0)}


def settings_of(case: LengthCase, method: str, precision: Precision) -> Settings:
    """The settings of a training step."""
    attention, options = read_method(method)
    return settle(
        TrainOptions(
            case.task,
            device="cpu",
            precision=precision,
            attention=attention,
            options=options,
            conv_kernel_size=0,
            preset=PRESET,
            batch_size=case.batch,
        ),
        positions=case.n,
    )


def _plan(setting: Setting) -> Plan:
    extent = EXTENTS[setting.size]
    parts = [Part(f"{name}-steps", partial(_measure_steps, name, setting)) for name in CASES]
    parts += [
        Part(f"{name}-{method}", partial(_measure_run, name, method, setting, extent))
        for name in CASES
        for method in METHODS
    ]
    said = {
        "cases": ", ".join(f"{name} in batches of {case.batch}" for name, case in CASES.items()),
        "methods": " ".join(METHODS),
        "preset": PRESET,
        "training": f"{extent.steps} steps, at most {extent.limit / 60:.0f} min",
        "precision": setting.precision,
    }
    return Plan(parts, said, beside_none(setting, f"{extent.steps} steps instead of 3,000"))


def _facts(name: str) -> dict[str, object]:
    return {"task": name, "b": CASES[name].batch}


def _measure_steps(name: str, setting: Setting, folder: Path) -> Iterable[Row]:
    """Time and memory of a step of each method, in turn."""
    case = CASES[name]
    settings = {method: settings_of(case, method, setting.precision) for method in METHODS}
    costs = measure_in_turn(settings, case.n, case.batch, rounds=_ROUNDS, limit_seconds=_STEP_LIMIT)
    for method, cost in costs.items():
        yield from cost_rows(method, cost, settings[method], n=case.n, facts=_facts(name))


def _measure_run(name: str, method: str, setting: Setting, extent: Extent, folder: Path) -> Iterable[Row]:
    """The curve and the results of a run, or the estimate because of which it is not begun."""
    case, runs = CASES[name], folder.parent / f"arena-{setting.size}"
    shared: dict[str, Any] = {
        "study": "", "method": method, "n": case.n, "seed": 0, "dtype": setting.precision, "device": cpu_name(),
    }  # fmt: skip
    training = Training(f"{name}-{method}", "train", _arguments(case, method, setting, extent))
    if not RunFolder(runs / training.name).is_started:
        run = SettledSteps(settings_of(case, method, setting.precision))
        cost = estimated(run, case.n, case.batch, limit_seconds=extent.limit / extent.steps)
        if cost.note:
            minutes = cost.estimate * extent.steps / 60
            yield new_row(quantity=ESTIMATE, value=minutes, unit="min", note=cost.note,
                          facts=_facts(name) | {"over": f"{cost.over:.3g}"}, **shared)  # fmt: skip
            return
    data = _draw(case, runs / f"data-{name}")
    run = train(training._replace(arguments={**training.arguments, "data": str(data)}), runs)
    for row in read_rows(run.rows):
        if row.quantity in _READ:
            yield new_row(
                quantity=row.quantity, value=row.value, unit=row.unit, low=row.low, high=row.high, repeats=row.repeats,
                facts=_facts(name), command=row.command, **shared,
            )  # fmt: skip
    for step, loss, seconds in read_curves(run.curves)[LOSS]:
        facts = {**_facts(name), "step": f"{step:.0f}", "seconds": f"{seconds:.1f}"}
        yield new_row(quantity=LOSS, value=loss, unit="", facts=facts, **shared)


def _arguments(case: LengthCase, method: str, setting: Setting, extent: Extent) -> Mapping[str, object]:
    """Arguments of `nystrom_lab.training.train.train`, without the data."""
    attention, options = read_method(method)
    length = {"max_length": case.n} if case.task == "listops" else {}
    return {
        "task": case.task,
        "attention": attention,
        "options": options,
        "preset": PRESET,
        "conv_kernel_size": 0,
        "batch_size": case.batch,
        "steps": extent.steps,
        "evaluate_every": extent.steps,
        "log_every": extent.steps // 20,
        "precision": setting.precision,
        "seed": 0,
        **length,
    }


def _draw(case: LengthCase, to: Path) -> Path:
    """The folder of the samples of a case, generated if they are missing."""
    train, few = case.samples, case.samples // 10
    if case.task == "pathfinder":
        size = round(case.n**0.5)
        return prepare_pathfinder(to, size=size, contour=3, train=train, val=few, test=few, workers=1, progress=False)
    return prepare_listops(
        to, min_length=case.shortest, max_length=case.n, train=train, val=few, test=few, workers=1, progress=False
    )


STUDIES = {"arena-lengths": Study(plan=_plan, tables=tables, verdicts=verdicts, figures=figures)}
