"""One split of a prepared data set of texts: what the byte tasks share.

A text is stored as its bytes. A token is byte + 1, so that 0 can pad: a vocabulary of 257.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from nystrom.tasks.store.token_files import open_members, open_split, read_facts, verify

VOCAB_SIZE = 257


class ByteSplit:
    """One split, read from disk as it is asked for.

    A copy for another process opens the files anew.

    Args:
        folder: The prepared folder.
        split: One of train, val and test.

    Attributes:
        classes: The label of each class.

    Raises:
        ValueError: The folder holds no complete data set of the task, or `split` is unknown.
    """

    task: ClassVar[str]
    vocab_size: ClassVar[int] = VOCAB_SIZE

    def __init__(self, folder: Path, split: str):
        self.folder, self.split = Path(folder), split
        self._samples = open_split(self.folder, split, task=self.task)
        self._members = open_members(self.folder, split, task=self.task)
        self.classes: list[str] = list(read_facts(self.folder, task=self.task)["classes"])

    def __len__(self) -> int:
        return self._samples.labels.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        raise NotImplementedError

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        return [self[index] for index in indices]

    def __reduce__(self) -> tuple[type["ByteSplit"], tuple[Path, str]]:
        return type(self), (self.folder, self.split)

    @property
    def num_labels(self) -> int:
        """How many classes there are, in all splits together."""
        return len(self.classes)

    @property
    def labels(self) -> NDArray[np.uint8]:
        """The class of each sample."""
        return self._samples.labels

    @property
    def majority_share(self) -> float:
        """The share of the largest class: what a model that ignores its input can reach."""
        return float(np.bincount(self.labels, minlength=1).max() / max(len(self), 1))

    def verify(self) -> None:
        """Read all files of the data set, of every split, and compare their checksums.

        Raises:
            ValueError: A file differs from what was written; it is named.
        """
        verify(self.folder, task=self.task)

    def _checked(self, index: int) -> int:
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} is out of range for the {len(self)} samples of {self.split}.")
        return index % len(self)

    def _tokens(self, sequence: int) -> NDArray[np.int16]:
        stored, offsets, _ = self._samples
        return stored[offsets[sequence] : offsets[sequence + 1]].astype(np.int16) + np.int16(1)
