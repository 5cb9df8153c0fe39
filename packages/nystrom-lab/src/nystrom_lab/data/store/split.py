"""One split of a prepared folder: the interface of all tasks' data for training, for tokens, texts and pictures."""

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nystrom_lab.data.store.prepared_folder import verify
from nystrom_lab.data.store.token_files import HEADER, damaged, open_split, read_facts, write_pieces


class Split:
    """One split, read from disk on demand.

    Items have the fields for a collator: `input_ids` and `labels`. A copy for another process opens the files again.

    Attributes:
        task: Task of the data.
        vocab_size: Tokens.
        num_labels: Classes, in all splits together.
        classes: Name of each class.

    Raises:
        ValueError: `split` is unknown, or the folder is not prepared, damaged, or of another task.
    """

    task: ClassVar[str]
    vocab_size: ClassVar[int]
    num_labels: int
    classes: Sequence[str]

    def __init__(self, folder: Path, split: str):
        self.folder, self.split = Path(folder), split
        self._samples = open_split(self.folder, split, task=self.task)

    def __len__(self) -> int:
        return self._samples.labels.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} is out of range for the {len(self)} samples of {self.split}.")
        index %= len(self)
        return {"input_ids": self._input_ids(index), "labels": int(self.labels[index])}

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        return [self[index] for index in indices]

    def __reduce__(self) -> tuple[type["Split"], tuple[Path, str]]:
        return type(self), (self.folder, self.split)

    @property
    def labels(self) -> NDArray[np.unsignedinteger]:
        """Class of each sample."""
        return self._samples.labels

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sample."""
        return np.diff(self._samples.offsets)

    @property
    def majority_share(self) -> float:
        """Share of the largest class: the accuracy of a model that ignores its input."""
        return float(np.bincount(self.labels, minlength=1).max() / max(len(self), 1))

    def verify(self) -> None:
        """Read all files of the data set, and raise ValueError that names one if its checksum differs."""
        verify(self.folder, task=self.task)

    def _input_ids(self, index: int) -> Any:
        """Copy the tokens of a sample: views of a read-only map cannot become tensors without a warning."""
        return self._sequence(index).copy()

    def _sequence(self, number: int) -> NDArray[np.unsignedinteger]:
        tokens, offsets, _ = self._samples
        return tokens[offsets[number] : offsets[number + 1]]


class ByteSplit(Split):
    """One split of texts, common to the byte-level tasks; its classes are named as in the files that it was made of.

    A text is stored as its bytes. A token is byte + 1, so that 0 can pad: a vocabulary of 257.
    """

    vocab_size: ClassVar[int] = 257

    def __init__(self, folder: Path, split: str):
        super().__init__(folder, split)
        classes = read_facts(self.folder, task=self.task).get("classes")
        if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
            raise damaged(self.folder / HEADER, "names no classes", self.task)
        self.classes, self.num_labels = classes, len(classes)
        if self.labels.max(initial=0) >= self.num_labels:
            raise damaged(self.folder / HEADER, f"names {self.num_labels} classes and counts more", self.task)

    def _input_ids(self, index: int) -> Any:
        return self._tokens(index)

    def _tokens(self, number: int) -> NDArray[np.int16]:
        return self._sequence(number).astype(np.int16) + np.int16(1)


class Pictures(NamedTuple):
    """Some pictures, as pixels (picture, row, column), and the class of each."""

    pixels: NDArray[np.uint8]
    labels: NDArray[np.uint8]


class PictureSplit(Split):
    """One split of pictures of one size."""

    vocab_size: ClassVar[int] = 256

    def __init__(self, folder: Path, split: str):
        super().__init__(folder, split)
        pixels = int(self.lengths.max(initial=0))
        self._side = math.isqrt(pixels)
        if (self.lengths != pixels).any() or self._side**2 != pixels:
            path = self.folder / f"{split}_offsets.npy"
            raise damaged(path, f"holds {self.task} samples that are not squares of one size", self.task)

        # A row each, which is read faster than by offsets.
        self._pictures = self._samples.tokens.reshape(len(self), pixels)

    def picture(self, index: int) -> NDArray[np.uint8]:
        """A sample as rows and columns."""
        return self[index]["input_ids"].reshape(self._side, self._side)

    def _input_ids(self, index: int) -> NDArray[np.uint8]:
        return self._pictures[index].copy()


def write_pictures(folder: Path, split: str, parts: Iterable[Pictures], *, count: int, side: int) -> None:
    """Write `count` square pictures of one size, which come in parts, as a split in a folder of `new_folder`."""
    labels = np.zeros(count, dtype=np.uint8)

    def pixels() -> Iterator[NDArray[Any]]:
        start = 0
        for part in parts:
            assert part.pixels.shape == (len(part.labels), side, side)
            labels[start : start + len(part.labels)] = part.labels
            start += len(part.labels)
            yield part.pixels

    # The tokens are written first, and fill in the labels.
    write_pieces(folder, split, pixels(), np.arange(count + 1, dtype=np.int64) * side * side, labels)
