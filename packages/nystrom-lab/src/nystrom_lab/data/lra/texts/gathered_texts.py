"""Samples being prepared: texts in a scratch file, a few numbers for each in memory.

A text is cut to its first `max_length` bytes. A label is a word or a number, stripped of white space. If all are
numbers, equal values such as 1 and 1.0 are one class, which is reported, and classes are in numerical order; otherwise
each label is a class, and classes are in alphabetical order. A number is written as 12, -0.5 or 1e2.
"""

import hashlib
from array import array
from collections.abc import Collection
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nystrom_lab.data.sources.source import NUMBER, LabelledSample
from nystrom_lab.data.store.header import SPLITS
from nystrom_lab.data.store.token_files import write_pieces

MOST_CLASSES = 256


class Gathered:
    """Samples of a source.

    Args:
        scratch: An open file for the texts.
        texts: Texts per sample.
        max_length: Bytes to keep of each text.
        seed: Decides the hashes.
    """

    def __init__(self, scratch: Any, *, texts: int, max_length: int, seed: int):
        self._scratch, self._texts, self._max_length, self._key = scratch, texts, max_length, str(seed).encode()
        self._ends, self._sequences = array("q", [0]), array("q")
        self._hashes, self._labels, self._splits, self._ranks = array("Q"), array("H"), array("B"), array("q")
        self._known: dict[bytes, int] = {}
        self._codes: dict[str, int] = {}
        self._cut = array("B")

    def add(self, row: LabelledSample) -> None:
        """Add a sample."""
        if not all(row.texts):
            raise ValueError(f"{row.place}: a text is empty: fill it in, or leave such rows out with --skip-empty.")
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

    def _code(self, row: LabelledSample) -> int:
        try:
            label = row.label.decode("utf-8").strip()
        except UnicodeDecodeError as error:
            raise ValueError(f"{row.place}: the label {row.label[:40]!r} is not UTF-8.") from error
        if not label:
            raise ValueError(f"{row.place}: the label is empty: give every text a label.")
        code = self._codes.setdefault(label, len(self._codes))
        if code >= MOST_CLASSES:
            raise ValueError(
                f"{row.place}: the label {label[:40]!r} makes more than {MOST_CLASSES} classes: name the field of the"
                " labels with --label-field."
            )
        return code

    def _store(self, text: bytes, digest: bytes) -> int:
        """Write a text and return its number; if samples have several texts, equal ones are written once."""
        if (number := self._known.get(digest)) is not None:
            return number
        number = len(self._ends) - 1
        if self._texts > 1:
            self._known[digest] = number
        self._scratch.write(text)
        self._ends.append(self._ends[-1] + len(text))
        return number

    def classes(self) -> tuple[list[str], NDArray[np.uint8]]:
        """The names of the classes, and the class of each sample."""
        named = _class_of_each(self._codes)
        names = [*dict.fromkeys(named.values())]
        place = np.array([names.index(named[label]) for label in self._codes], dtype=np.uint8)
        return names, place[np.array(self._labels, dtype=np.int64)]

    def joined(self) -> list[str]:
        """A clause for each class with several labels."""
        spelt: dict[str, list[str]] = {}
        for label, name in _class_of_each(self._codes).items():
            spelt.setdefault(name, []).append(label)
        return [
            f"the labels {', '.join(map(repr, sorted(same)))} are one class" for same in spelt.values() if len(same) > 1
        ]

    def splits(self) -> NDArray[np.uint8]:
        """The split of each sample in the source."""
        return np.array(self._splits, dtype=np.uint8)

    def hashes(self) -> NDArray[np.uint64]:
        """A hash of each sample's bytes and the seed."""
        return np.array(self._hashes, dtype=np.uint64)

    def truncated(self, numbers: NDArray[np.int64]) -> int:
        """How many texts of these samples were truncated."""
        return int(np.array(self._cut).reshape(-1, self._texts)[numbers].sum())

    def also_among(self, numbers: NDArray[np.int64], others: NDArray[np.int64]) -> int:
        """How many of some samples have the same bytes as one of the others."""
        hashes = self.hashes()
        return int(np.isin(hashes[numbers], hashes[others]).sum())

    def write(self, folder: Path, split: str, numbers: NDArray[np.int64], labels: NDArray[np.uint8]) -> None:
        """Write the samples of these numbers as a split."""
        numbers = numbers[np.argsort(np.array(self._ranks, dtype=np.int64)[numbers], kind="stable")]
        which = np.array(self._sequences, dtype=np.int64).reshape(-1, self._texts)[numbers]
        members = None
        if self._texts > 1:
            shape = which.shape
            which, members = np.unique(which, return_inverse=True)
            members = members.reshape(shape)
        ends = np.array(self._ends, dtype=np.int64)
        starts, stops = ends[which.ravel()], ends[which.ravel() + 1]
        offsets = np.concatenate([np.zeros(1, dtype=np.int64), (stops - starts).cumsum()])
        self._scratch.flush()
        written = np.memmap(self._scratch, dtype=np.uint8, mode="r")
        pieces = (written[start:stop] for start, stop in zip(starts.tolist(), stops.tolist(), strict=True))
        write_pieces(folder, split, pieces, offsets, labels[numbers], members)


def _class_of_each(labels: Collection[str]) -> dict[str, str]:
    """The class of each label, in the order of the classes."""
    values = {label: _number(label) for label in labels}
    of_value: dict[Decimal, list[str]] = {}
    for label, value in values.items():
        if value is not None:
            of_value.setdefault(value, []).append(label)
    if None not in values.values():
        # A class is named the shortest way that its number is written.
        shortest = {value: min(same, key=lambda name: (len(name), name)) for value, same in of_value.items()}
        return {label: shortest[value] for value in sorted(of_value) for label in of_value[value]}
    if twice := next((same for same in of_value.values() if len(same) > 1), None):
        raise ValueError(
            f"the labels {twice[0]!r} and {twice[1]!r} are one number, among others that are words: write them alike."
        )
    return {label: label for label in sorted(labels)}


def _number(label: str) -> Decimal | None:
    """A label as a number; 1_1 and digits of other scripts, which Python would also read, count as words."""
    try:
        value = Decimal(label if NUMBER.fullmatch(label) else "nan")
    except InvalidOperation:
        return None
    return value if value.is_finite() else None
