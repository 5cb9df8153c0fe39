"""Time and peak memory of a whole training step in the five tasks of the Long Range Arena: Table 2 of Skyformer.

A step is the forward pass with dropout, the loss, the backward pass and the update by AdamW, of the model and the
batch that `nystrom.studies.speed.lra_models` describes. All methods of a task take turns: a warm-up step each, then a
timed step each, `repeats` times over, then a step each for its memory. Per task and method there are two rows:

- "text step time": the median in ms, `low` and `high` being the quartiles;
- "text step memory": the peak beyond weights, optimizer and batch, in MB of 10^6 bytes; see `nystrom.measure.clock`.

Before that each method takes two steps with an eighth of the batch. What would then not fit in half of the free memory,
or would take longer than a limit per step, is not run: its rows hold NaN and a note with the estimate.

Source: Chen et al. (2021), arXiv:2111.00035, Table 2.
Departs from the paper: a step instead of 50,000 with their evaluations; the fused softmax stands beside the
materialised one.
"""

import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from tqdm import tqdm

from nystrom.checks import check_at_least, check_choice, check_names
from nystrom.measure.clock import free_bytes, peak_bytes, seconds
from nystrom.measure.rows import Row, append_rows, check_folder, new_row, read_rows
from nystrom.studies.speed.asked import command_line, device_name, differing_setting, find_device
from nystrom.studies.speed.interleaved import MEMORY_SHARE
from nystrom.studies.speed.lra_models import (
    HEADS,
    HIDDEN,
    LAYERS,
    LRA_TASKS,
    WIDTH,
    Batch,
    build_model,
    find_method,
    random_batch,
)

Precision = Literal["float32", "bfloat16"]

METHODS = (
    "softmax-materialised",
    "softmax",
    "kernelized",
    "nystrom-128",
    "linformer-128",
    "informer-128",
    "performer-128",
    "reformer-2",
    "bigbird-3",
    "skyformer-128",
)
_PROBE = 8


@dataclass(frozen=True)
class _Plan:
    methods: tuple[str, ...]
    batch: int | None
    precision: Precision
    repeats: int
    seed: int
    threads: int
    limit_seconds: float
    device: torch.device
    command: str


def run_training(
    *,
    tasks: tuple[str, ...] = tuple(LRA_TASKS),
    methods: tuple[str, ...] = METHODS,
    batch: int | None = None,
    precision: Precision = "float32",
    device: str = "cpu",
    repeats: int = 3,
    seed: int = 0,
    threads: int | None = None,
    limit_seconds: float = 60.0,
    to: Path = Path("runs/training"),
) -> list[Row]:
    """Measure time and peak memory of a training step with each method, in the tasks of the Long Range Arena.

    Rows go to training.csv in the folder, a task at a time. The same command continues a run that was interrupted, and
    skips the tasks that are done.

    Args:
        tasks: listops, text, retrieval, image, pathfinder.
        methods: Methods of this library with their number, such as nystrom-128; ratios are taken against the first.
        batch: Samples of a step; None takes the paper's: 32, 16, 16, 256 and 128.
        precision: float32, or bfloat16 for autocast with float32 weights.
        device: cpu, cuda or cuda:1.
        repeats: Timed steps of each method.
        seed: Of the weights and the batch.
        threads: Threads on the CPU; None leaves what torch has.
        limit_seconds: A step that would take longer is not run.
        to: Folder of the results.

    Raises:
        ValueError: Something asked for is unknown or out of range, or the folder holds another setting.
    """
    asked = dict(locals())
    _check(asked)
    place = find_device(device)
    plan = _Plan(
        methods=tuple(dict.fromkeys(methods)),
        batch=batch,
        precision=precision,
        repeats=repeats,
        seed=seed,
        threads=torch.get_num_threads() if threads is None else threads,
        limit_seconds=limit_seconds,
        device=place,
        command=command_line(("nystrom", "bench", "training"), run_training, asked, "tasks"),
    )
    check_folder(to)
    path = to / "training.csv"
    rows = _done(path, plan)
    threads_before = torch.get_num_threads()
    torch.set_num_threads(plan.threads)
    try:
        for task in dict.fromkeys(tasks):
            if not any(row.quantity == f"{task} step time" for row in rows):
                new = _measure(task, plan)
                append_rows(path, new)
                rows.extend(new)
                print(f"{task}: {sum(not row.note for row in new)} of {len(new)} rows, in {path}.", file=sys.stderr)
    except KeyboardInterrupt:
        print(f"\nStopped. {path} keeps the tasks that are done; the same command continues.", file=sys.stderr)
        raise
    finally:
        torch.set_num_threads(threads_before)
    return [row for row in rows if row.quantity.partition(" ")[0] in tasks]


def _check(asked: Mapping[str, Any]) -> None:
    for name in ("tasks", "methods"):
        if not asked[name]:
            raise ValueError(f"{name} is empty; expected at least one.")
    check_names("task", asked["tasks"], LRA_TASKS)
    for name in asked["methods"]:
        find_method(name)
    check_choice("precision", asked["precision"], get_args(Precision))
    check_at_least("repeats", asked["repeats"], 1)
    check_at_least("seed", asked["seed"], 0)
    for name in ("batch", "threads"):
        if asked[name] is not None:
            check_at_least(name, asked[name], 1)
    if not asked["limit_seconds"] > 0:
        raise ValueError(f"limit_seconds is {asked['limit_seconds']}; expected a positive number.")


class _Training:
    """A model, its optimizer, and one step of it."""

    def __init__(self, name: str, task: str, plan: _Plan):
        self.model = build_model(name, LRA_TASKS[task], plan.seed)
        self.model.to(plan.device)  # pyright: ignore[reportArgumentType] (transformers types it away)
        self.model.train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.plan = plan

    def step(self, batch: Batch) -> None:
        """Forward, backward, update."""
        self.optimizer.zero_grad(set_to_none=True)
        half = self.plan.precision == "bfloat16"
        with torch.autocast(self.plan.device.type, torch.bfloat16) if half else nullcontext():
            loss = self.model(**batch).loss
        loss.backward()
        self.optimizer.step()

    def seconds(self, batch: Batch) -> float:
        """Of a step."""
        self.optimizer.zero_grad(set_to_none=True)
        return seconds(lambda: self.step(batch), self.plan.device)

    def peak_bytes(self, batch: Batch) -> int:
        """Of a step."""
        self.optimizer.zero_grad(set_to_none=True)
        return peak_bytes(lambda: self.step(batch), self.plan.device)


def _measure(task: str, plan: _Plan) -> list[Row]:
    """Rows of one task."""
    size = plan.batch or LRA_TASKS[task].batch
    batch = random_batch(LRA_TASKS[task], size, plan.seed, plan.device)
    times: dict[str, list[float]] = {}
    peaks: dict[str, int] = {}
    notes = dict.fromkeys(plan.methods, "")
    with tqdm(total=len(plan.methods) * (plan.repeats + 3), desc=task, leave=False, disable=None) as bar:

        def each(names: Sequence[str], act: Callable[[str], None]) -> None:
            for name in names:
                act(name)
                bar.update()

        ready: dict[str, _Training] = {}

        def probe(name: str) -> None:
            training = _Training(name, task, plan)
            notes[name] = _too_much(training, task, size, plan)
            if notes[name]:
                print(f"{task}: {name} is not measured: {notes[name]}.", file=sys.stderr)
            else:
                ready[name], times[name] = training, []

        each(plan.methods, probe)
        each(tuple(ready), lambda name: ready[name].step(batch))
        for _ in range(plan.repeats):
            each(tuple(ready), lambda name: times[name].append(ready[name].seconds(batch)))
        each(tuple(ready), lambda name: peaks.update({name: ready[name].peak_bytes(batch)}))
    return [
        row
        for name in plan.methods
        for row in _rows(task, size, name, times.get(name, []), peaks.get(name), notes[name], plan)
    ]


def _too_much(training: _Training, task: str, size: int, plan: _Plan) -> str:
    """Why a full step should not be run, judged by an eighth of it; or nothing."""
    part = max(1, size // _PROBE)
    batch = random_batch(LRA_TASKS[task], part, plan.seed, plan.device)
    try:
        training.step(batch)
        wanted = training.seconds(batch) * size / part
        if wanted > plan.limit_seconds:
            return f"would take about {wanted:.0f} s a step, the limit is {plan.limit_seconds:g} s"
        need, free = training.peak_bytes(batch) * size / part, MEMORY_SHARE * free_bytes(plan.device)
    except RuntimeError as error:
        return str(error).partition("\n")[0].rstrip(".") or type(error).__name__
    if need > free:
        return f"needs about {need / 1e9:.3g} GB, {MEMORY_SHARE:.0%} of the free memory is {free / 1e9:.3g} GB"
    return ""


def _rows(
    task: str, size: int, name: str, times: Sequence[float], peak: int | None, note: str, plan: _Plan
) -> list[Row]:
    """Time with its quartiles, and memory."""
    ordered = [1e3 * x for x in times]
    low = high = None
    if ordered:
        quartiles = statistics.quantiles(ordered, n=4, method="inclusive") if len(ordered) > 1 else ordered * 3
        low, high = quartiles[0], quartiles[2]
    shape = LRA_TASKS[task]
    sizes = (
        f"b={size} documents={shape.documents} layers={LAYERS} width={WIDTH} heads={HEADS} hidden={HIDDEN} "
        f"threads={plan.threads}"
    )

    def row(what: str, value: float, unit: str, repeats: int, low: float | None, high: float | None) -> Row:
        return new_row(
            study="training",
            quantity=f"{task} step {what}",
            method=name,
            value=value,
            unit=unit,
            low=low,
            high=high,
            repeats=repeats,
            n=shape.n,
            m=find_method(name)[1] or None,
            sizes=sizes,
            dtype=plan.precision,
            seed=plan.seed,
            device=device_name(plan.device),
            command=plan.command,
            note=note,
        )

    return [
        row("time", statistics.median(ordered) if ordered else math.nan, "ms", len(ordered), low, high),
        row("memory", math.nan if peak is None else peak / 1e6, "MB", int(peak is not None), None, None),
    ]


def _done(path: Path, plan: _Plan) -> list[Row]:
    """The rows of an earlier run of this plan, whatever its tasks.

    Raises:
        ValueError: The file holds rows of another setting.
    """
    if not path.exists():
        return []
    rows = read_rows(path)
    for row in rows:
        task = row.quantity.partition(" ")[0]
        new = _rows(task, 1, plan.methods[0], [], None, "unknown", plan)[0] if task in LRA_TASKS else None
        found = ("quantity", row.quantity, "a task's step") if new is None else differing_setting(row, new, "tasks")
        if found is not None:
            name, came, wanted = found
            raise ValueError(
                f"{path} holds rows of another setting: {name} is {came!r} there and {wanted!r} now. "
                "Name another folder in to, or delete that file to start anew."
            )
    return rows
