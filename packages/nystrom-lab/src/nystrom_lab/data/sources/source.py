"""Labelled texts of any kind, row by row."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class LabelledRow(NamedTuple):
    """One row of a source.

    Attributes:
        place: Location, such as "my.csv, line 7".
        split: The split of the source that it belongs to.
        label: Label; empty in a split without labels.
        texts: Text, or texts.
        rank: Rows are written in order of rank, and those of equal rank in their original order.
    """

    place: str
    split: str
    label: str
    texts: tuple[bytes, ...]
    rank: int = 0

    def check_texts(self) -> None:
        """Raise ValueError if a text is empty."""
        if not all(self.texts):
            raise ValueError(
                f"{self.place}: a text is empty: fill it in, or leave such rows out, which `nystrom data prepare` does "
                "with --skip-empty."
            )


@dataclass(frozen=True)
class Source:
    """Labelled texts of any kind.

    Attributes:
        kind: Kind of source, in words.
        settings: Computes what decides its rows: the SHA-256 of its files, and the fields that the user named.
        splits: The splits it has of its own.
        rows: Reads it, and says how far it is.
        unlabelled: Test splits without labels.
        classes: Names of its classes in order, if the files name them.
        published: Rows of each split where the data set is a published one.
        equal_classes: Each class has the same number of rows in each split, as published.
        val_is_test: Whether val is the test split by definition.
        remarks: Notices for the user about how it is read; a clause each. Notices on rows that are left out come when
            these have been read.
    """

    kind: str
    settings: Callable[[], Mapping[str, str]]
    splits: tuple[str, ...]
    rows: Callable[[], Iterator[LabelledRow]]
    unlabelled: tuple[str, ...] = ()
    classes: tuple[str, ...] | None = None
    published: Mapping[str, int] | None = None
    equal_classes: bool = False
    val_is_test: bool = False
    remarks: list[str] = field(default_factory=list)
