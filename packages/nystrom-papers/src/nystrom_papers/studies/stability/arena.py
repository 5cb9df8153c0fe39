"""Tasks of the Long Range Arena for short trainings: their samples, and the models and batches that all methods share.

ListOps and Pathfinder can be generated; the other tasks come from folders that `nystrom data prepare` made. A model has
the settings of the preset "skyformer", unless another is named. With the same seed all methods have the same initial
weights and the same batches.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nystrom_lab.data.lra.facts import LRA
from nystrom_lab.data.store.split import Split
from nystrom_lab.data.store.token_files import HEADER
from nystrom_lab.training.presets import DataSizes, find_preset
from nystrom_lab.training.run_settings import Settings, train_options
from nystrom_lab.training.tasks import Model, find_task

Batch = dict[str, Tensor]
PRESET = "skyformer"


@dataclass(frozen=True)
class ArenaTask:
    """The source of a task's samples.

    Without a folder the samples are generated in that of the study, in these sizes.
    """

    task: str
    folder: Path | None
    sizes: DataSizes

    @property
    def name(self) -> str:
        """The name in settings and rows."""
        drawn = f"drawn, to {self.sizes.max_length} tokens"
        return f"{self.task} ({drawn if self.folder is None else self.folder.name})"

    def open(self, split: str, study: Path) -> Split:
        """Open a split, which is generated first if it has to be."""
        folder, task = self.folder, find_task(self.task)
        if folder is None:
            sizes = self.sizes
            numbers = (sizes.train, sizes.val, sizes.test, sizes.min_length, sizes.max_length)
            folder = study / "data" / "-".join((self.task, *map(str, numbers)))
            if not folder.exists():
                assert task.prepare is not None, "find_sources leaves out what cannot be drawn"
                task.prepare(folder, sizes)
        return task.open(folder, split)


def find_sources(data: Path | None, drawn: Mapping[str, DataSizes]) -> list[ArenaTask]:
    """The available tasks: those that a folder holds in subfolders of their names, and those that are generated.

    Raises:
        ValueError: The folder holds no task, or samples that are longer than the paper's.
    """
    if data is not None and not any((data / task / HEADER).is_file() for task in LRA):
        raise ValueError(
            f"--data {data} holds none of the folders {', '.join(LRA)}; expected folders that `nystrom data prepare` "
            "made, such as text."
        )
    sources = []
    for task in LRA:
        published = find_preset(task, PRESET).data
        if data is not None and (data / task / HEADER).is_file():
            source = ArenaTask(task, data / task, published)
            longest = int(find_task(task).open(data / task, "train").lengths.max(initial=0))
            if longest > published.max_length:
                raise ValueError(
                    f"--data {data / task} holds a sample of {longest} tokens; expected at most "
                    f"{published.max_length}, the length of the paper."
                )
            sources.append(source)
        elif task in drawn:
            sources.append(ArenaTask(task, None, drawn[task]))
    return sources


def new_model(source: ArenaTask, method: str, *, seed: int) -> Model:
    """A model of the paper's shape with random weights, which are the same for all methods with the same seed."""
    settings = Settings.resolve(
        train_options(
            source.task, device="cpu", precision="float32", seed=seed, attention=method, conv_kernel_size=0,
            preset=PRESET,
        ),
        num_positions=source.sizes.max_length,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return find_task(source.task).model(settings.encoder_config())


def random_batches(source: ArenaTask, split: Split, *, batch: int, count: int, seed: int) -> Iterator[Batch]:
    """Batches of samples in random order; no sample comes again before all have come."""
    rng, collate = np.random.default_rng(seed), find_task(source.task).collate
    passes = -(-batch * count // len(split))
    order = np.concatenate([rng.permutation(len(split)) for _ in range(passes)])
    for start in range(0, batch * count, batch):
        yield collate(split.__getitems__(order[start : start + batch].tolist()))
