"""Samples on their way to disk: texts in a scratch file, some numbers for each in memory.

A text is cut to its first `max_length` bytes. A label is a word or a number, blanks around it left out; the classes are
the different labels, in the order of numbers if all are numbers and of letters otherwise.
"""

import hashlib
import math
from array import array
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nystrom.tasks.store.token_files import MEMBERS, SPLITS, write_part

MOST_CLASSES = 256


class Row(NamedTuple):
    """One sample of a source.

    Attributes:
        place: Where it stands, such as "my.csv, line 7".
        split: The split of the source that it belongs to.
        label: Its label.
        texts: Its text, or texts.
        rank: Samples are written in the order of ranks, and in that of their coming where those are equal.
    """

    place: str
    split: str
    label: bytes
    texts: tuple[bytes, ...]
    rank: int = 0


class Gathered:
    """Samples of a source.

    Args:
        scratch: An open file for the texts.
        texts: Texts per sample.
        max_length: Bytes that are kept of a text.
        seed: Decides the hashes.
    """

    def __init__(self, scratch: Any, *, texts: int, max_length: int, seed: int):
        self._scratch, self._texts, self._max_length, self._key = scratch, texts, max_length, str(seed).encode()
        self._ends, self._sequences = array("q", [0]), array("q")
        self._hashes, self._labels, self._splits, self._ranks = array("Q"), array("H"), array("B"), array("q")
        self._known: dict[bytes, int] = {}
        self._codes: dict[str, int] = {}
        self._cut = array("B")

    def add(self, row: Row) -> None:
        """Take a sample."""
        if not all(row.texts):
            raise ValueError(f"{row.place}: a text is empty: mend it, or leave such rows out with skip_empty.")
        self._labels.append(self._code(row))
        digests = []
        for text in row.texts:
            self._cut.append(len(text) > self._max_length)
            cut = text[: self._max_length]
            digests.append(hashlib.blake2b(cut, digest_size=16, key=self._key).digest())
            self._sequences.append(self._store(cut, digests[-1]))
        digest = hashlib.blake2b(b"".join(digests), digest_size=8).digest()
        self._hashes.append(int.from_bytes(digest, "little"))
        self._splits.append(SPLITS.index(row.split))
        self._ranks.append(row.rank)

    def _code(self, row: Row) -> int:
        try:
            label = row.label.decode("utf-8").strip()
        except UnicodeDecodeError as error:
            raise ValueError(f"{row.place}: the label {row.label[:40]!r} is no UTF-8 text.") from error
        if not label:
            raise ValueError(f"{row.place}: the label is empty: give every text a label.")
        code = self._codes.setdefault(label, len(self._codes))
        if code >= MOST_CLASSES:
            raise ValueError(
                f"{row.place}: the label {label[:40]!r} makes more than {MOST_CLASSES} classes:"
                " is the field of the labels the right one?"
            )
        return code

    def _store(self, text: bytes, digest: bytes) -> int:
        """Write a text and give its number; where several make a sample, equal ones are written once."""
        if (number := self._known.get(digest)) is not None:
            return number
        number = len(self._ends) - 1
        if self._texts > 1:
            self._known[digest] = number
        self._scratch.write(text)
        self._ends.append(self._ends[-1] + len(text))
        return number

    def classes(self) -> tuple[list[str], NDArray[np.uint8]]:
        """Give the names of the classes, and the class of each sample."""
        names = sorted(self._codes, key=_order(self._codes))
        place = np.zeros(len(names), dtype=np.uint8)
        place[[self._codes[name] for name in names]] = range(len(names))
        return names, place[np.array(self._labels, dtype=np.int64)]

    def splits(self) -> NDArray[np.uint8]:
        """For each sample the split that the source gave."""
        return np.array(self._splits, dtype=np.uint8)

    def hashes(self) -> NDArray[np.uint64]:
        """For each sample a number that the seed and its bytes decide."""
        return np.array(self._hashes, dtype=np.uint64)

    def truncated(self, numbers: NDArray[np.int64]) -> int:
        """How many texts of these samples were cut."""
        return int(np.array(self._cut).reshape(-1, self._texts)[numbers].sum())

    def write(self, folder: Path, split: str, numbers: NDArray[np.int64], labels: NDArray[np.uint8]) -> None:
        """Write the samples of these numbers as a split."""
        numbers = numbers[np.argsort(np.array(self._ranks, dtype=np.int64)[numbers], kind="stable")]
        which = np.array(self._sequences, dtype=np.int64).reshape(-1, self._texts)[numbers]
        if self._texts > 1:
            shape = which.shape
            which, members = np.unique(which, return_inverse=True)
            write_part(folder / f"{split}_{MEMBERS}.npy", members.reshape(shape).astype(np.int64))
        ends = np.array(self._ends, dtype=np.int64)
        starts, stops = ends[which.ravel()], ends[which.ravel() + 1]
        offsets = np.concatenate([np.zeros(1, dtype=np.int64), (stops - starts).cumsum()])
        self._scratch.flush()
        written = np.memmap(self._scratch, dtype=np.uint8, mode="r")
        pieces = (written[start:stop] for start, stop in zip(starts.tolist(), stops.tolist(), strict=True))
        _write_bytes(folder / f"{split}_tokens.npy", pieces, int(offsets[-1]))
        write_part(folder / f"{split}_offsets.npy", offsets)
        write_part(folder / f"{split}_labels.npy", labels[numbers])


def _order(names: Iterable[str]) -> Callable[[str], tuple[float, str]]:
    """Give the key that sorts labels: by value if all are numbers, by letters otherwise."""
    try:
        values = {name: float(name) for name in names}
    except ValueError:
        values = {}
    if not all(map(math.isfinite, values.values())):
        values = {}
    return lambda name: (values.get(name, 0.0), name)


def _write_bytes(path: Path, pieces: Iterable[NDArray[np.uint8]], total: int) -> None:
    """Write a file in numpy's format piece by piece."""
    try:
        with path.open("wb") as file:
            header = {"descr": "|u1", "fortran_order": False, "shape": (total,)}
            np.lib.format.write_array_header_1_0(file, header)
            for piece in pieces:
                file.write(piece)  # type: ignore[arg-type]
    except OSError as error:
        raise OSError(f"{path} needs {total} bytes and could not be written ({error}): free space.") from error
