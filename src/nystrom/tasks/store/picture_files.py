"""A data set of square gray pictures, on disk as `token_files` says: a token is a pixel, 0 to 255, row after row.

All 256 tokens are real, black among them, and all samples of a data set have one length, so nothing pads.
"""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from nystrom.tasks.store.token_files import open_split, verify, write_part


class Pictures(NamedTuple):
    """Some pictures.

    Attributes:
        pixels: Picture, row, column.
        labels: The class of each.
    """

    pixels: NDArray[np.uint8]
    labels: NDArray[np.uint8]


class PictureSplit:
    """One split of a prepared data set, read from disk as it is asked for.

    Items are `input_ids` (pixels, 0 to 255) and `labels`. A copy for another process opens the files anew.

    Args:
        folder: The prepared folder.
        split: One of train, val and test.

    Raises:
        ValueError: The folder holds no complete data set of the task, or `split` is unknown.
    """

    task: ClassVar[str]
    num_labels: ClassVar[int]
    classes: ClassVar[tuple[str, ...]]
    vocab_size: ClassVar[int] = 256

    def __init__(self, folder: Path, split: str):
        self.folder, self.split = Path(folder), split
        samples = open_split(self.folder, split, task=self.task)
        self._labels = samples.labels
        self._length = int(samples.offsets[-1]) // max(len(samples.labels), 1)
        if (np.diff(samples.offsets) != self._length).any() or math.isqrt(self._length) ** 2 != self._length:
            raise ValueError(
                f"{folder} holds {self.task} samples in {split} that are no squares of one size: delete it and prepare"
                " it again."
            )
        self._tokens = samples.tokens.reshape(-1, self._length) if self._length else samples.tokens.reshape(0, 0)

    def __len__(self) -> int:
        return self._labels.size

    def __getitem__(self, index: int) -> dict[str, NDArray[np.uint8] | int]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} is out of range for the {len(self)} samples of {self.split}.")
        # A copy: views of a read-only map cannot become tensors without a warning.
        return {"input_ids": self._tokens[index].copy(), "labels": int(self._labels[index])}

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, NDArray[np.uint8] | int]]:
        return [self[index] for index in indices]

    def __reduce__(self) -> tuple[type["PictureSplit"], tuple[Path, str]]:
        return type(self), (self.folder, self.split)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The number of pixels of each sample."""
        return np.full(len(self), self._length, dtype=np.int64)

    @property
    def labels(self) -> NDArray[np.uint8]:
        """The class of each sample."""
        return self._labels

    @property
    def majority_share(self) -> float:
        """The share of the largest class: what a model that ignores its input can reach."""
        return float(np.bincount(self.labels, minlength=1).max() / max(len(self), 1))

    def picture(self, index: int) -> NDArray[np.uint8]:
        """Give a sample as rows and columns."""
        return self._tokens[index].reshape(2 * (math.isqrt(self._length),))

    def verify(self) -> None:
        """Read all files of the data set, of every split, and compare their checksums.

        Raises:
            ValueError: A file differs from what was written; it is named.
        """
        verify(self.folder, task=self.task)


def write_pictures(folder: Path, split: str, parts: Iterable[Pictures], *, count: int, side: int) -> None:
    """Write one split into a folder lent by `new_folder`, a part at a time.

    Args:
        folder: The folder.
        split: One of train, val and test.
        parts: Pictures; `count` of them in all.
        count: How many there are.
        side: Their rows and columns.
    """
    path, labels = folder / f"{split}_tokens.npy", [np.zeros(0, dtype=np.uint8)]
    header = {"descr": "|u1", "fortran_order": False, "shape": (count * side * side,)}
    try:
        # Written, not mapped: a full disk then raises an error and does not kill the process.
        with path.open("wb") as file:
            npy.write_array_header_1_0(file, header)
            for part in parts:
                assert part.pixels.shape == (len(part.labels), side, side)
                file.write(np.ascontiguousarray(part.pixels, dtype=np.uint8).data)
                labels.append(part.labels)
    except OSError as error:
        raise OSError(f"{path} needs {count * side * side} bytes and could not be written ({error}).") from error
    whole = np.concatenate(labels)
    assert whole.size == count
    write_part(folder / f"{split}_offsets.npy", np.arange(count + 1, dtype=np.int64) * side * side)
    write_part(folder / f"{split}_labels.npy", whole.astype(np.uint8))
