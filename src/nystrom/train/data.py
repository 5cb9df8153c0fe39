"""The tasks that can be trained on: how their data are prepared, opened, and told apart.

The data set of a preset's default folder is made when it is missing; a folder that was named must be there, since a
wrong name should not start an hour of preparation.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from nystrom.shapes import check_names
from nystrom.tasks.lra_listops import ListOps, prepare_listops
from nystrom.train.presets import DataSizes


class Split(Protocol):
    """One split of a data set, its samples `{"input_ids": tokens, "labels": class}`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> dict[str, Any]: ...

    def __getitems__(self, indices: Sequence[int], /) -> list[dict[str, Any]]: ...

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sample."""
        ...

    @property
    def labels(self) -> NDArray[np.uint8]:
        """Class of each sample."""
        ...

    @property
    def majority_share(self) -> float:
        """Share of the largest class."""
        ...


class Splits(NamedTuple):
    """A data set."""

    train: Split
    val: Split
    test: Split


@dataclass(frozen=True)
class Task:
    """What training needs to know of a task.

    Attributes:
        vocab_size: Tokens.
        num_labels: Classes.
        pad_token_id: The token that no sample holds; None where every token is real.
        open: Opens one split of a prepared folder.
        prepare: Makes the data set of these sizes.
    """

    vocab_size: int
    num_labels: int
    pad_token_id: int | None
    open: Callable[[Path, str], Split]
    prepare: Callable[[Path, DataSizes], None]


def _prepare_listops(folder: Path, sizes: DataSizes) -> None:
    prepare_listops(
        folder,
        train=sizes.train,
        val=sizes.val,
        test=sizes.test,
        min_length=sizes.min_length,
        max_length=sizes.max_length,
    )


TASKS: dict[str, Task] = {
    "listops": Task(
        vocab_size=ListOps.vocab_size,
        num_labels=ListOps.num_labels,
        pad_token_id=0,
        open=ListOps,
        prepare=_prepare_listops,
    ),
}


def find_task(name: str) -> Task:
    """Look a task up.

    Raises:
        ValueError: There is none of that name.
    """
    check_names("task", [name], TASKS)
    return TASKS[name]


def default_folder(sizes: DataSizes) -> Path:
    """Where a preset's data set lies unless another folder is named."""
    return Path("data") / sizes.folder


def check_data_folder(task: str, data: Path | None) -> None:
    """Refuse a folder that was named and is not there.

    Raises:
        ValueError: It is not there.
    """
    if data is not None and not data.is_dir():
        raise ValueError(
            f"data is {data}, and there is no such folder: name a prepared one, leave it out to have the preset's data "
            f"made, or make it with `nystrom data prepare {task} --to {data}`."
        )


def prepare_if_missing(task: str, folder: Path, sizes: DataSizes) -> None:
    """Make the preset's data set where its folder is missing, with a message."""
    if not folder.exists():
        print(f"{folder} is not there: preparing {sizes.train} + {sizes.val} + {sizes.test} samples of {task}.")
        find_task(task).prepare(folder, sizes)


def open_splits(task: str, folder: Path, *, positions: int, batch_size: int) -> Splits:
    """Open a data set, and see that it can be trained on.

    Args:
        task: Task.
        folder: Its prepared data.
        positions: The longest sample that the model takes.
        batch_size: Samples per step.

    Raises:
        ValueError: The folder holds no data of the task, too long samples, or too few.
    """
    splits = Splits(*(find_task(task).open(folder, split) for split in Splits._fields))
    for name, split in zip(Splits._fields, splits, strict=True):
        if len(split) == 0:
            raise ValueError(f"data {folder} holds no samples in {name}; expected at least one.")
        check_lengths(folder, name, split, positions)
    if len(splits.train) < batch_size:
        raise ValueError(
            f"batch_size is {batch_size} but data {folder} holds {len(splits.train)} training samples: "
            "take a smaller batch or more data."
        )
    return splits


def check_lengths(folder: Path, name: str, split: Split, positions: int) -> None:
    """Refuse samples that are longer than the model has positions.

    Raises:
        ValueError: There is one.
    """
    if (longest := int(split.lengths.max(initial=0))) > positions:
        raise ValueError(
            f"data {folder} holds a sample of {longest} tokens in {name}, but the model has {positions} positions: "
            "name shorter data, or a preset for longer sequences."
        )


def fingerprint(splits: Splits) -> str:
    """Eight hexadecimal digits that change when the data do: of the number, lengths and classes of all samples."""
    digest = 0
    for split in splits:
        for array in (split.lengths, split.labels):
            digest = zlib.crc32(np.ascontiguousarray(array, dtype=np.int64).tobytes(), digest)
    return f"{digest:08x}"
