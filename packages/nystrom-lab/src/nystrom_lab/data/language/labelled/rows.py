"""Texts without labels, one at a time, for predictions."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from nystrom_lab.data.sources.columns import TextColumns
from nystrom_lab.data.sources.labelled_files import read_cells
from nystrom_lab.data.sources.row_files import pass_byte_order_mark, plain_name
from nystrom_lab.data.sources.unpacking import BROKEN, lines_of, open_unpacked, unreadable


def read_texts(path: Path, columns: TextColumns, spoilt: list[int]) -> Iterator[tuple[str, ...]]:
    """The texts of a file, or pairs, one at a time; each line of a .txt file is a text, even an empty one.

    The list `spoilt` receives the indices, from 0, of texts with invalid UTF-8.

    Raises:
        ValueError: The file is broken or lacks a column, or is plain text for a task on pairs.
    """
    if Path(plain_name(path)).suffix.lower() == ".txt":
        if columns.pairs is not None:
            raise ValueError(f"{path} has a text in each line, but the task is on pairs: name a .tsv, .csv or .jsonl.")
        try:
            with open_unpacked(path) as file:
                pass_byte_order_mark(path, file)
                for number, line in lines_of(path, file):
                    yield decoded([line.rstrip(b"\r\n")], number - 1, spoilt)
        except BROKEN as error:
            raise unreadable(path, error) from error
        return
    for row, (_, cells) in enumerate(read_cells(path, columns, labelled=False)):
        yield decoded(cells, row, spoilt)


def spoilt_rows(name: str, rows: Sequence[int]) -> str:
    """A clause about rows of a file, numbered from 0, with invalid UTF-8."""
    return f"{len(rows)} rows of {name} hold bytes that are not UTF-8, which became \ufffd (the first: {rows[0]})"


def decoded(cells: Sequence[bytes], row: int, spoilt: list[int]) -> tuple[str, ...]:
    """The texts of a row; bytes that are not UTF-8 become the replacement character, and the row is listed."""
    words = tuple(cell.decode("utf-8", errors="replace") for cell in cells)
    if any(word.encode() != cell for word, cell in zip(words, cells, strict=True)):
        spoilt.append(row)
    return words
