"""One split of a prepared text data set, common to the byte-level tasks.

A text is stored as its bytes. A token is byte + 1, so that 0 can pad: a vocabulary of 257.
"""

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from nystrom_lab.data.store.header import HEADER, damaged, read_facts
from nystrom_lab.data.store.split import Split


class ByteSplit(Split):
    """One split of texts; its classes are named as in the files that it was made of."""

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
