"""The tasks: how their data are prepared, opened and recognised.

The data set of a preset's default folder is made if it is missing. A folder named by the user must exist: a misspelt
name should not start an hour of preparation.
"""

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from nystrom.checks import check_names
from nystrom.models import EncoderForSequenceClassification
from nystrom.models.heads.pairs import EncoderForPairClassification
from nystrom_lab.config import Columns
from nystrom_lab.data.lra.facts import LRA
from nystrom_lab.data.store.prepared_folder import verify
from nystrom_lab.data.store.split import Split
from nystrom_lab.data.store.token_files import HEADER, read_header
from nystrom_lab.training.batches import collate, collate_pairs, collate_whole
from nystrom_lab.training.presets import DataSizes

Model = EncoderForSequenceClassification | EncoderForPairClassification


class Splits(NamedTuple):
    """A data set; test is None for a training that does not read it."""

    train: Split
    val: Split
    test: Split | None


class Guess(NamedTuple):
    """A baseline without a model, which a trained model should beat.

    Attributes:
        name: Basis of the guess.
        share: Accuracy on the second split, fitted on the first.
    """

    name: str
    share: Callable[[Any, Any], float]


@dataclass(frozen=True, kw_only=True)
class Task:
    """Everything that training needs of a task in addition to its facts (`nystrom_lab.data.lra.facts`).

    Attributes:
        open: Opens one split of a prepared folder.
        prepare: Generates a data set of given sizes; None if it is read from the user's files.
        model: The model class.
        collate: Makes a batch of samples.
        vary: Randomly augments a training input; the class stays the same.
        takes_own_texts: Whether a user's own labelled texts, or pairs of texts, can be used directly.
        guess: The best known baseline beyond the largest class.
    """

    open: Callable[[Path, str], Split]
    prepare: Callable[[Path, DataSizes], None] | None = None
    model: type[Model] = EncoderForSequenceClassification
    collate: Callable[..., dict[str, Tensor]] = collate
    vary: Callable[[Any, np.random.Generator], Any]
    takes_own_texts: bool = False
    guess: Guess | None = None


def _listops() -> Task:
    from nystrom_lab.data.lra.listops.expressions import shuffle_arguments
    from nystrom_lab.data.lra.listops.task import ListOps, first_operator_share, prepare_listops

    def prepare(folder: Path, sizes: DataSizes) -> None:
        names = ("train", "val", "test", "min_length", "max_length")
        prepare_listops(folder, **{name: getattr(sizes, name) for name in names})

    guess = Guess("first operator", first_operator_share)
    return Task(open=ListOps, prepare=prepare, vary=shuffle_arguments, guess=guess)


def _text() -> Task:
    from nystrom_lab.data.lra.augmentation import crop_text
    from nystrom_lab.data.lra.texts.reviews import Text

    return Task(open=Text, vary=crop_text, takes_own_texts=True)


def _retrieval() -> Task:
    from nystrom_lab.data.lra.augmentation import crop_texts
    from nystrom_lab.data.lra.texts.retrieval import Retrieval

    model = EncoderForPairClassification
    return Task(open=Retrieval, model=model, collate=collate_pairs, vary=crop_texts, takes_own_texts=True)


def _image() -> Task:
    from nystrom_lab.data.lra.augmentation import vary_picture
    from nystrom_lab.data.lra.image import Image

    return Task(open=Image, vary=vary_picture, collate=collate_whole)


def _pathfinder() -> Task:
    from nystrom_lab.data.lra.augmentation import mirror_picture
    from nystrom_lab.data.lra.pathfinder.task import Pathfinder, prepare_pathfinder

    def prepare(folder: Path, sizes: DataSizes) -> None:
        size = math.isqrt(sizes.max_length)
        assert size == 32, "the presets are for pictures of 32 x 32"
        prepare_pathfinder(folder, size=size, contour=sizes.contour, train=sizes.train, val=sizes.val, test=sizes.test)

    return Task(open=Pathfinder, prepare=prepare, vary=mirror_picture, collate=collate_whole)


# The modules of a task are imported when it is looked up.
TASKS: dict[str, Callable[[], Task]] = {
    "listops": _listops,
    "text": _text,
    "retrieval": _retrieval,
    "image": _image,
    "pathfinder": _pathfinder,
}


def find_task(name: str) -> Task:
    """Look up a task.

    Raises:
        ValueError: There is no task with that name.
    """
    check_names("task", [name], TASKS)
    return TASKS[name]()


def default_folder(sizes: DataSizes) -> Path:
    """The folder of a preset's data set, unless another one is named."""
    return Path("data") / sizes.folder


def check_data(task: str, data: Path | None) -> None:
    """Check that the given data exist, and are a prepared folder if the task accepts nothing else.

    Raises:
        ValueError: They do not exist, or are something else.
    """
    if data is None or data.is_dir():
        return
    own_texts = find_task(task).takes_own_texts
    if own_texts and data.suffix and not data.exists():
        raise ValueError(f"data is {data}, which does not exist: name a table of texts, or a prepared folder.")
    if not data.exists():
        raise ValueError(
            f"data is {data}, which does not exist: name a prepared folder, leave it out for the preset's, or make "
            f"it with `nystrom data prepare {task}{_source(task)} --to {data}`."
        )
    if not own_texts:
        raise ValueError(f"data is {data}, a file; expected a folder that `nystrom data prepare {task}` made.")


def prepared_folder(task: str, data: Path, *, max_length: int, columns: Columns) -> Path:
    """The prepared folder for the data that a user names; the user's own files are prepared first.

    Args:
        data: A prepared folder, or files of the task.
        max_length: The longest sample that the model takes; longer ones are cut.
        columns: Columns of texts and labels in the files.

    Raises:
        ValueError: It is neither, or columns are named for data that are already prepared.
    """
    if not find_task(task).takes_own_texts or (data / HEADER).is_file():
        columns.check_no_columns(f"data {data} is not a file of texts")
        return data
    from nystrom_lab.data.lra.texts.own_texts import prepare_own

    folder = prepare_own(task, data, max_length=max_length, **columns.columns())
    print(f"The data of {data} are in {folder}.")
    return folder


def _source(task: str) -> str:
    return "" if find_task(task).prepare else " --from FILES"


def prepare_if_missing(task: str, folder: Path, sizes: DataSizes) -> None:
    """Prepare the preset's data set if its folder is missing, with a message.

    Raises:
        ValueError: It is read from the user's files.
    """
    if folder.exists():
        return
    prepare = find_task(task).prepare
    if prepare is None:
        raise ValueError(
            f"{folder} does not exist, and {task} is read from files: make it with `nystrom data prepare {task}"
            f"{_source(task)} --to {folder}{f' --max-length {sizes.max_length}' if LRA[task].is_cut else ''}`, "
            "or name a prepared folder with --data."
        )
    print(f"{folder} does not exist: preparing {sizes.train} + {sizes.val} + {sizes.test} samples of {task}.")
    prepare(folder, sizes)


def open_splits(task: str, folder: Path, *, num_positions: int, batch_size: int, test: bool = True) -> Splits:
    """Open a data set, and check that it can be trained on.

    Args:
        num_positions: The longest sample that the model takes.

    Raises:
        ValueError: The folder holds no data of the task, modified data, samples that are too long, or too few samples.
    """
    verify(folder, task=task)
    names = Splits._fields if test else ("train", "val")
    opened = {name: find_task(task).open(folder, name) for name in names}
    for name, split in opened.items():
        if len(split) == 0:
            raise ValueError(f"data {folder} holds no samples in {name}; expected at least one.")
        check_lengths(folder, name, split, num_positions)
    if len(opened["train"]) < batch_size:
        raise ValueError(
            f"batch_size is {batch_size} but data {folder} holds {len(opened['train'])} training samples: "
            "use a smaller batch or more data."
        )
    return Splits(opened["train"], opened["val"], opened.get("test"))


def check_lengths(folder: Path, name: str, split: Split, num_positions: int) -> None:
    """Check that no sample has more tokens than the model has positions.

    Raises:
        ValueError: One has.
    """
    if (longest := int(split.lengths.max(initial=0))) > num_positions:
        raise ValueError(
            f"data {folder} holds a sample of {longest} tokens in {name}, but the model has {num_positions} positions: "
            "name shorter data (texts are cut by --max-length when prepared), or train with --max-length."
        )


def fingerprint(splits: Splits, folder: Path) -> str:
    """Two checksums of the open splits: of the lengths and classes of all samples, and of their files.

    An older run has only the first, which cannot distinguish images of equal size.
    """
    seen = 0
    for split in filter(None, splits):
        for array in (split.lengths, split.labels):
            seen = zlib.crc32(np.ascontiguousarray(array, dtype=np.int64).tobytes(), seen)
    files = read_header(folder)["files"]
    sums = sorted((name, file["sha256"]) for name, file in files.items())
    opened = [each for each in sums if splits.test is not None or not each[0].startswith("test_")]
    return f"{seen:08x}-{zlib.crc32(repr(opened).encode()):08x}"
