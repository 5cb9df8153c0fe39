"""The runs of a grid, with the arguments of `train` for each."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import NamedTuple

from nystrom_lab.config import TrainOptions
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
    settings = replace(planned.settings, threads=threads, data=data, to=to / planned.name, max_length=max_length)
    # The child resumes as its folder says; a grid takes prepared data, and its rows are accuracies of a test.
    others = {"resume", "timeout", "context_parallel", "mask_share", *settings.columns()}
    arguments = {
        entry.name: str(value) if isinstance(value := getattr(settings, entry.name), Path) else value
        for entry in fields(TrainOptions)
        if entry.name not in others
    }
    method = {"options": dict(settings.options), "conv_kernel_size": settings.conv_kernel_size or 0}
    return Run(planned.name, arguments | method)
