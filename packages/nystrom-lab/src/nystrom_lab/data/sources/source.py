"""A user's files as a source of samples."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

# A label that is a number: Python would read 1_1 and digits of other scripts, too.
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)


class LabelledSample(NamedTuple):
    """One sample of a source.

    Attributes:
        place: Its location, such as "my.csv, line 7".
        split: The split of the source that it belongs to.
        label: Its label.
        texts: Its text, or texts.
        rank: Samples are written in order of rank, and those of equal rank in their original order.
    """

    place: str
    split: str
    label: bytes
    texts: tuple[bytes, ...]
    rank: int = 0


@dataclass(frozen=True)
class Source:
    """Labelled texts of any kind.

    Attributes:
        kind: What it is, in words.
        settings: What decides its samples: the SHA-256 of its files, and the fields that are read.
        splits: The splits it has of its own.
        rows: Reads it, and says how far it is if the argument is true.
        published: Samples of each split where the data set is a published one.
        equal_classes: Each class has the same number of samples in each split, as published.
        val_is_test: Whether val is the test split by definition.
        remarks: Notices for the user about how it is read; a clause each.
    """

    kind: str
    settings: Mapping[str, str]
    splits: tuple[str, ...]
    rows: Callable[[bool], Iterator[LabelledSample]]
    published: Mapping[str, int] | None = None
    equal_classes: bool = False
    val_is_test: bool = False
    remarks: tuple[str, ...] = ()
