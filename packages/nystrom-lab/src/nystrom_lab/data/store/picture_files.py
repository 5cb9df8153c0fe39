"""A data set of square gray pictures, on disk as `token_files` says: a token is a pixel, 0 to 255, row after row.

All 256 tokens are real, black among them, and all samples of a data set have one length, so nothing pads.
"""

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nystrom_lab.data.store.header import damaged
from nystrom_lab.data.store.split import Split
from nystrom_lab.data.store.token_files import write_pieces


class Pictures(NamedTuple):
    """Some pictures.

    Attributes:
        pixels: Picture, row, column.
        labels: Class of each.
    """

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
    """Write one split into a folder of `new_folder`, part by part.

    Args:
        folder: The folder.
        split: One of train, val and test.
        parts: Pictures; `count` of them in all.
        count: How many there are.
        side: Their rows and columns.
    """
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
