"""Training steps on the tasks of the Long Range Arena, at the papers' shapes, measured a task at a time.

The model has two layers of width 64 with two heads, hidden width 128, mean pooling, dropout 0.1, norms before the
blocks. Texts are padded to the task's length; their real lengths are drawn uniformly from a quarter of it to all of it.
Pictures have no padding. Tokens and classes are drawn at random: they do not change the cost of a step.

Source: Xiong et al. (2021), arXiv:2102.03902, and Chen et al. (2021), arXiv:2111.00035, section 5; the batches are
those of the latter.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from nystrom.models import EncoderConfig, EncoderForSequenceClassification
from nystrom.models.heads.pairs import EncoderForPairClassification
from nystrom.progress import Progress
from nystrom_lab.data.lra.facts import LRA, TaskFacts
from nystrom_lab.measure.memory import allocator
from nystrom_lab.measure.rows import Row
from nystrom_lab.training.presets import find_preset
from nystrom_papers.bench.contenders import find_method
from nystrom_papers.bench.harness import Setup, reason, sweep, take_turns, time_and_memory
from nystrom_papers.bench.options import TrainingOptions, device_name
from nystrom_papers.bench.training_step import TrainingStep

LAYERS, WIDTH, HEADS, HIDDEN = 2, 64, 2, 128
# A step is first tried with the batch divided by this.
_PROBE = 8


@dataclass(frozen=True, kw_only=True)
class StepSetup(Setup):
    """The plan of the measurements in each task."""

    methods: tuple[str, ...]
    batch: int | None
    shapes: Mapping[str, TaskFacts]


def step_setup(options: TrainingOptions, command: str, device: torch.device) -> StepSetup:
    """The setup of `nystrom bench training`."""
    blank = Row(
        study="training", quantity="", method="", value=0.0, device=device_name(device), seed=options.seed,
        dtype=options.precision, command=command,
    )  # fmt: skip
    return StepSetup(
        blank=blank, device=device, repeats=options.repeats, threads=options.threads_used,
        limit_seconds=options.limit_seconds, methods=tuple(dict.fromkeys(options.methods)), batch=options.batch,
        shapes=LRA,
    )  # fmt: skip


def paper_batch(task: str) -> int:
    """Samples of a step in Skyformer's experiments."""
    return find_preset(task, "skyformer").batch_size


def measure_tasks(tasks: Sequence[str], setup: StepSetup, path: Path) -> list[Row]:
    """Measure the tasks that have no rows in the file yet; see `nystrom_papers.bench.harness.sweep`."""
    return sweep(
        {task: task for task in tasks},
        setup,
        path,
        plural="tasks",
        column_of=lambda row: row.quantity.partition(" ")[0],
        measure=lambda task, rows: measure_task(task, setup),
    )


def measure_task(task: str, setup: StepSetup) -> list[Row]:
    """The rows of one task."""
    shape, size = setup.shapes[task], setup.batch or paper_batch(task)
    notes: dict[str, str] = {}
    with Progress(task, len(setup.methods) * (setup.repeats + 3), unit="steps") as bar:
        ready: dict[str, TrainingStep] = {}
        for name in setup.methods:
            training = new_training(name, task, setup)
            notes[name] = _too_much(training, shape, size, setup)
            if notes[name]:
                print(f"{task}: {name} is not measured: {notes[name]}.", file=sys.stderr)
            else:
                ready[name] = training
            bar.update()
        batch = random_batch(shape, size if ready else 1, setup.blank.seed or 0, setup.device)
        clocks = {name: (lambda training=training: training.seconds(batch)) for name, training in ready.items()}
        peaks = {name: (lambda training=training: training.peak_bytes(batch)) for name, training in ready.items()}
        taken = take_turns(clocks, peaks, setup.repeats, bar, warm_up=True)
    facts = {
        "b": size, "documents": shape.documents, "layers": LAYERS, "width": WIDTH, "heads": HEADS, "hidden": HIDDEN,
        "threads": setup.threads, "allocator": allocator(),
    }  # fmt: skip
    like = replace(setup.blank, n=shape.max_length, facts=facts)
    return [
        row
        for name, note in notes.items()
        for row in time_and_memory(
            replace(like, method=name, m=find_method(name)[1] or None), f"{task} step", taken.get(name), note
        )
    ]


def _too_much(training: TrainingStep, shape: TaskFacts, size: int, setup: StepSetup) -> str:
    """Why a full step should not be run, judging by an eighth of the batch; empty if it should be."""
    part = max(1, size // _PROBE)
    try:
        batch = random_batch(shape, part, setup.blank.seed or 0, setup.device)
        training.step(batch)
        slow = setup.too_much(seconds=training.seconds(batch) * size / part, call="step")
        return slow or setup.too_much(need=training.peak_bytes(batch) * size / part)
    except RuntimeError as error:
        return reason(error)


def new_training(name: str, task: str, setup: StepSetup) -> TrainingStep:
    """The model of a task with an attention, and its optimizer."""
    model = build_model(name, setup.shapes[task], setup.blank.seed or 0)
    model.to(setup.device)  # pyright: ignore[reportArgumentType] (transformers hides its type)
    return TrainingStep(model, torch.optim.AdamW(model.parameters(), lr=1e-4), precision=setup.blank.dtype)


def build_model(
    name: str, shape: TaskFacts, seed: int
) -> EncoderForSequenceClassification | EncoderForPairClassification:
    """The model of a task with the attention of a name such as "nystrom-128", with random weights.

    Raises:
        ValueError: The cases of `find_method`.
    """
    method, number = find_method(name)
    config = EncoderConfig(
        vocab_size=shape.vocab_size,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=HIDDEN,
        max_position_embeddings=shape.max_length,
        attention=method.method,
        attention_options=method.options(number, shape.max_length),
        norm="pre",
        pooling="mean",
        num_labels=shape.num_labels,  # pyright: ignore[reportCallIssue] (transformers takes it in addition to the fields)
    )
    torch.manual_seed(seed)
    return (EncoderForPairClassification if shape.documents == 2 else EncoderForSequenceClassification)(config)


def random_batch(shape: TaskFacts, size: int, seed: int, device: torch.device) -> dict[str, Tensor]:
    """A batch of so many samples, determined by the seed."""
    generator, n = torch.Generator().manual_seed(seed), shape.max_length
    sizes = (size, n) if shape.documents == 1 else (size, shape.documents, n)
    inputs = {
        "input_ids": torch.randint(1, shape.vocab_size, sizes, generator=generator),
        "labels": torch.randint(shape.num_labels, (size,), generator=generator),
    }
    if shape.pad_token_id is not None:
        lengths = torch.randint(n // 4, n + 1, (*sizes[:-1], 1), generator=generator)
        inputs["attention_mask"] = torch.arange(n) < lengths
    return {name: x.to(device) for name, x in inputs.items()}
