"""The runs of a grid, with the arguments of `train` for each."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from nystrom_lab.training.presets.recipe import ARGUMENTS, RECIPE
from nystrom_lab.training.run_settings import Settings


@dataclass(frozen=True)
class Run:
    """One run of the grid.

    Attributes:
        name: Name of its folder.
        arguments: Arguments of `nystrom_lab.training.train.train`, as JSON values.
    """

    name: str
    arguments: Mapping[str, object]


class Planned(NamedTuple):
    """A run with its settings.

    Attributes:
        name: Name of its folder.
        settings: Its settings.
    """

    name: str
    settings: Settings


def run_name(task: str, method: str, preset: str, seed: int, model: Path | None, max_length: int | None) -> str:
    """The name of a run's folder, which shows a starting encoder or a length other than the preset's."""
    parts = [task, method, preset, *(["pretrained"] if model else []), *([str(max_length)] if max_length else [])]
    return "-".join([*parts, f"seed{seed}"])


def run_of(to: Path, planned: Planned, data: Path, *, threads: int, max_length: int | None = None) -> Run:
    """The run of a plan, with all arguments of `train`."""
    settings = planned.settings
    arguments: dict[str, object] = {
        "task": settings.task,
        "attention": settings.attention,
        "options": dict(settings.options),
        "conv_kernel_size": settings.conv_kernel_size or 0,
        "preset": settings.preset,
        "model": settings.model,
        "max_length": max_length,
        "seed": settings.seed,
        "steps": settings.steps,
        "batch_size": settings.batch_size,
        "accumulation": settings.accumulation,
        "learning_rate": settings.learning_rate,
        "warmup_steps": settings.warmup_steps,
        "dropout": settings.dropout,
        "evaluate_every": settings.evaluate_every,
        "log_every": settings.log_every,
        **{ARGUMENTS.get(name, name): getattr(settings, name) for name in RECIPE},
        "device": settings.device,
        "precision": settings.precision,
        "compile": settings.compile,
        "threads": threads,
        "data": str(data),
        "to": str(to / planned.name),
    }
    return Run(planned.name, arguments)
