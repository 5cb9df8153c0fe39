"""The texts and labels of one split.

Labels are still strings here. A split without labels has none at all: no such column, or nothing, null, -1 or "hidden"
in each row. Texts are UTF-8; other bytes become the replacement character, and the rows that hold them are counted.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nystrom_lab.data.language.labelled.glue import LabelledTask
from nystrom_lab.data.sources.arrow_files import SavedPart
from nystrom_lab.data.sources.row_files import (
    RowsPart,
    first_fields,
    lacks_field,
    pass_byte_order_mark,
    place_of,
    plain_name,
    read_fields,
)
from nystrom_lab.data.sources.source import has_field
from nystrom_lab.data.sources.unpacking import BROKEN, lines_of, open_unpacked, unreadable

# What stands in the column of labels where a test split has none.
_NO_LABEL = {"", "-1", "hidden", "None"}


@dataclass
class SplitRows:
    """The rows of one split.

    Attributes:
        texts: The texts, or the first of each pair.
        pairs: The second of each pair; None for single texts.
        labels: Their labels as strings; None if the split has none.
        places: Function that returns the file and line of a row, for messages.
        classes: Names of its classes in order, if the files name them.
        remarks: Notices for the user about the files.
    """

    texts: list[str]
    pairs: list[str] | None
    labels: list[str] | None
    places: Callable[[int], str]
    classes: tuple[str, ...] | None = None
    remarks: list[str] = field(default_factory=list)


def read_rows(files: Sequence[RowsPart], task: LabelledTask, *, may_lack_labels: bool) -> SplitRows:
    """Read the parts of a split, whose labels may be missing if it is a test split.

    Raises:
        ValueError: A file is broken or lacks a column, or some rows have a label and others none; the line is named.
    """
    texts: list[str] = []
    seconds: list[str] = []
    labels: list[str] = []
    lines: list[tuple[RowsPart, int]] = []
    labelled = None
    broken: list[int] = []
    spoilt: list[int] = []
    for path in files:
        here = not may_lack_labels or _has_label(path, task)
        if labelled not in (None, here):
            raise ValueError(
                f"{files[0]} has labels and {path} has none, or vice versa, but both are parts of one split."
            )
        labelled = here
        # The rows of a test are numbered where they are scored: none may be missing.
        for line, cells in _cells(path, task, labelled=here, broken=None if may_lack_labels else broken):
            words = _decoded(cells, len(texts), spoilt)
            if here:
                labels.append(words.pop(0).strip())
            texts.append(words[0])
            seconds.extend(words[1:])
            lines.append((path, line))
    name = ", ".join(map(str, files))
    if not texts:
        raise ValueError(f"{name} holds no rows below its header: add texts, or fetch it again if it was cut off.")
    remarks = []
    if broken:
        shown = ", ".join(map(str, broken[:5]))
        remarks.append(f"{len(broken)} rows of {name} lack fields and are left out (line {shown})")
    if spoilt:
        remarks.append(spoilt_rows(name, spoilt))

    def place(row: int) -> str:
        return place_of(*lines[row])

    given = labels if labelled and not (may_lack_labels and {*labels} <= _NO_LABEL) else None
    if given is not None and (none := [row for row, word in enumerate(given) if not word]):
        if len(none) == len(given):
            raise ValueError(f"{place(0)}: no row has a label: name another column with --label-field.")
        raise ValueError(
            f"{place(none[0])}: the label is missing, but other rows have one: add it, or leave the row out."
        )
    pairs = seconds if task.pairs is not None else None
    return SplitRows(texts, pairs, given, place, _classes(files[0], task), remarks)


def read_texts(path: Path, task: LabelledTask, spoilt: list[int]) -> Iterator[tuple[str, ...]]:
    """The texts of a file, or pairs, one at a time; each line of a .txt file is a text, even an empty one.

    The list `spoilt` receives the indices, from 0, of texts with invalid UTF-8.

    Raises:
        ValueError: The file is broken or lacks a column, or is plain text for a task on pairs.
    """
    if Path(plain_name(path)).suffix.lower() == ".txt":
        if task.pairs is not None:
            raise ValueError(f"{path} has a text in each line, but the task is on pairs: name a .tsv, .csv or .jsonl.")
        try:
            with open_unpacked(path) as file:
                pass_byte_order_mark(path, file)
                for number, line in lines_of(path, file):
                    yield tuple(_decoded([line.rstrip(b"\r\n")], number - 1, spoilt))
        except BROKEN as error:
            raise unreadable(path, error) from error
        return
    for row, (_, cells) in enumerate(_cells(path, task, labelled=False, broken=None)):
        yield tuple(_decoded(cells, row, spoilt))


def spoilt_rows(name: str, rows: Sequence[int]) -> str:
    """A clause about rows of a file, numbered from 0, with invalid UTF-8."""
    return f"{len(rows)} rows of {name} hold bytes that are not UTF-8, which became \ufffd (the first: {rows[0]})"


def _decoded(cells: Sequence[bytes], row: int, spoilt: list[int]) -> list[str]:
    words = [cell.decode("utf-8", errors="replace") for cell in cells]
    if any(word.encode() != cell for word, cell in zip(words, cells, strict=True)):
        spoilt.append(row)
    return words


def _cells(
    part: RowsPart, task: LabelledTask, *, labelled: bool, broken: list[int] | None
) -> Iterator[tuple[int, list[bytes]]]:
    wanted: dict[str, Sequence[str]] = {"label_field": task.labels} if labelled else {}
    wanted["text_field"] = task.texts
    if task.pairs is not None:
        wanted["pair_field"] = task.pairs
    columns = None
    if _is_headless(part, task):
        columns = task.headless
        wanted = {name: [word for word in words if word in columns] for name, words in wanted.items()}
    on_broken = broken.append if task.broken_rows and broken is not None else None
    try:
        yield from read_fields(part, wanted, columns=columns, on_broken=on_broken, may_be_null="label_field")
    except ValueError as error:
        # The one hint that the reader of files cannot give.
        hint = " This task is on pairs of texts." if task.pairs is not None and "-field" in str(error) else ""
        raise ValueError(f"{error}{hint}") from error


def _classes(path: RowsPart, task: LabelledTask) -> tuple[str, ...] | None:
    """The classes that a saved data set names, in their order."""
    named = path.classes if isinstance(path, SavedPart) else {}
    return next((classes for column, classes in named.items() if has_field([column], task.labels)), None)


def _has_label(part: RowsPart, task: LabelledTask) -> bool:
    return not lacks_field(part, task.labels) or _is_headless(part, task)


def _is_headless(part: RowsPart, task: LabelledTask) -> bool:
    """Whether a tsv file has no header row, as some of GLUE's."""
    if not task.headless or not isinstance(part, Path):
        return False
    fields = first_fields(part)
    return len(fields) == len(task.headless) and not has_field(fields, task.texts)
