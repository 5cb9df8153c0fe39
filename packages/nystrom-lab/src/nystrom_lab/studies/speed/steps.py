"""Training steps of one setup, measured a task at a time and continued where they were interrupted."""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from nystrom.progress import Progress
from nystrom.turns import in_turns, quartiles
from nystrom_lab.measure.memory import allocator, free_bytes
from nystrom_lab.measure.rows import Row, append_rows, new_row, rows_so_far
from nystrom_lab.studies.speed.asked import device_name
from nystrom_lab.studies.speed.choices import StepDtype
from nystrom_lab.studies.speed.interleaved import MEMORY_SHARE
from nystrom_lab.studies.speed.lra_models import build_model, find_method, random_batch
from nystrom_lab.studies.speed.lra_shapes import HEADS, HIDDEN, LAYERS, SHAPES, WIDTH, TaskShape
from nystrom_lab.studies.training_step import TrainingStep

# A step is first tried with the batch divided by this.
_PROBE = 8


@dataclass(frozen=True)
class StepSetup:
    """What is measured in each task, and what every row records of it.

    Attributes:
        methods: Methods with their number.
        batch: Samples of a step; None takes the paper's.
        precision: float32, or bfloat16 for autocast.
        repeats: Timed steps of each method.
        seed: Seed of the weights and the batch.
        threads: Threads on the CPU.
        limit_seconds: Skip steps that would take longer.
        device: The device that it runs on.
        command: The command that measures it.
        shapes: Shapes of the tasks.
        free_bytes: Function that returns the free memory of a device.
    """

    methods: tuple[str, ...]
    batch: int | None
    precision: StepDtype
    repeats: int
    seed: int
    threads: int
    limit_seconds: float
    device: torch.device
    command: str
    shapes: Mapping[str, TaskShape] = field(default_factory=lambda: SHAPES)
    free_bytes: Callable[[torch.device], int] = free_bytes


def measure_tasks(tasks: Sequence[str], setup: StepSetup, path: Path) -> list[Row]:
    """Measure the tasks that have no rows in the file yet, and write each when it is done.

    Args:
        tasks: Tasks.
        setup: What to measure in each.
        path: The file.

    Returns:
        The rows of these tasks.

    Raises:
        ValueError: The file holds rows of another setting.
    """
    rows = rows_so_far(path, _rows(tasks[0], 1, setup.methods[0], [], None, "unknown", setup)[0], "tasks")
    threads_before = torch.get_num_threads()
    torch.set_num_threads(setup.threads)
    try:
        for task in dict.fromkeys(tasks):
            if not any(row.quantity == f"{task} step time" for row in rows):
                new = measure_task(task, setup)
                append_rows(path, new)
                rows.extend(new)
                print(f"{task}: {sum(not row.note for row in new)} of {len(new)} rows, in {path}.", file=sys.stderr)
    except KeyboardInterrupt:
        print(f"\nStopped. {path} keeps the tasks that are done; the same command continues.", file=sys.stderr)
        raise
    finally:
        torch.set_num_threads(threads_before)
    return [row for row in rows if row.quantity.partition(" ")[0] in tasks]


def new_training(name: str, task: str, setup: StepSetup) -> TrainingStep:
    """The model of a task with an attention, and its optimizer."""
    model = build_model(name, setup.shapes[task], setup.seed)
    model.to(setup.device)  # pyright: ignore[reportArgumentType] (transformers hides its type)
    return TrainingStep(model, torch.optim.AdamW(model.parameters(), lr=1e-4), precision=setup.precision)


def measure_task(task: str, setup: StepSetup) -> list[Row]:
    """The rows of one task."""
    size = setup.batch or setup.shapes[task].batch
    peaks: dict[str, int] = {}
    notes = dict.fromkeys(setup.methods, "")
    with Progress(task, len(setup.methods) * (setup.repeats + 3), unit="steps") as bar:
        ready: dict[str, TrainingStep] = {}
        for name in setup.methods:
            training = new_training(name, task, setup)
            notes[name] = _too_much(training, task, size, setup)
            if notes[name]:
                print(f"{task}: {name} is not measured: {notes[name]}.", file=sys.stderr)
            else:
                ready[name] = training
            bar.update()
        batch = random_batch(setup.shapes[task], size if ready else 1, setup.seed, setup.device)
        clocks = {name: partial(training.seconds, batch) for name, training in ready.items()}
        times = in_turns(clocks, setup.repeats, tick=bar.update)
        for name, training in ready.items():
            peaks[name] = training.peak_bytes(batch)
            bar.update()
    return [
        row
        for name in setup.methods
        for row in _rows(task, size, name, times.get(name, []), peaks.get(name), notes[name], setup)
    ]


def _too_much(training: TrainingStep, task: str, size: int, setup: StepSetup) -> str:
    """Why a full step should not be run, judging by an eighth of the batch; empty if it should be."""
    part = max(1, size // _PROBE)
    try:
        batch = random_batch(setup.shapes[task], part, setup.seed, setup.device)
        training.step(batch)
        wanted = training.seconds(batch) * size / part
        if wanted > setup.limit_seconds:
            return f"would take about {wanted:.0f} s a step, the limit is {setup.limit_seconds:g} s"
        need, free = training.peak_bytes(batch) * size / part, MEMORY_SHARE * setup.free_bytes(setup.device)
    except RuntimeError as error:
        return str(error).partition("\n")[0].rstrip(".") or type(error).__name__
    if need > free:
        return f"needs about {need / 1e9:.3g} GB, {MEMORY_SHARE:.0%} of the free memory is {free / 1e9:.3g} GB"
    return ""


def _rows(
    task: str, size: int, name: str, times: Sequence[float], peak: int | None, note: str, setup: StepSetup
) -> list[Row]:
    """Time with its quartiles, and memory."""
    low, middle, high = quartiles([1e3 * x for x in times]) if times else (None, math.nan, None)
    shape = setup.shapes[task]
    facts = {
        "b": size, "documents": shape.documents, "layers": LAYERS, "width": WIDTH, "heads": HEADS, "hidden": HIDDEN,
        "threads": setup.threads, "allocator": allocator(),
    }  # fmt: skip

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
            facts=facts,
            dtype=setup.precision,
            seed=setup.seed,
            device=device_name(setup.device),
            command=setup.command,
            note=note,
        )

    return [
        row("time", middle, "ms", len(times), low, high),
        row("memory", math.nan if peak is None else peak / 1e6, "MB", int(peak is not None), None, None),
    ]
