r"""Rows of users' files, one at a time and as bytes.

    .csv                    one header line; fields in quotes may hold commas, line ends and doubled quotes
    .tsv                    one header line; a row is a line, a field ends at a tab, quotes are letters like any other
    .jsonl .ndjson .json    one JSON object per line
    .parquet, and splits of folders that `save_to_disk` of Hugging Face datasets wrote: see `arrow_files`

the first three as they are, or with .gz, .xz, .bz2, .zst or .lz4 appended. Blank lines are skipped, except in a file of
one column those between two rows are rows with an empty cell, and so are quotes with nothing between them.

Texts are read as bytes. In CSV and tsv they are taken unchanged, valid UTF-8 or not; a byte order mark at the start of
a file is dropped. JSON is UTF-8 by its definition, so other bytes in JSON lines are an error.

A row has at most 20 MB. One that cannot be read raises an error that names the file and line: a row is never skipped,
unless the caller counts it. For this reason Python's own csv and json read these. The readers of pyarrow 26.0.1 name no
line; of CSV they put all that follows a quote without its end into one text and say nothing, and end a row at a
carriage return inside a field of tsv; of JSON lines they make times of texts that look like one.
"""

import csv
import io
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from nystrom.json_files import parse_json
from nystrom.progress import Progress
from nystrom_lab.data.sources.arrow_files import PARQUET, SavedPart, arrow_fields, columns_of, is_arrow
from nystrom_lab.data.sources.columns import Wanted, all_as_bytes, find_names, has_field
from nystrom_lab.data.sources.unpacking import BROKEN, LONGEST, lines_of, open_unpacked, too_long, unreadable

PLAIN, COMPRESSED = (".csv", ".tsv", ".jsonl", ".ndjson", ".json"), (".gz", ".xz", ".bz2", ".zst", ".lz4")
UTF_16 = (b"\xff\xfe", b"\xfe\xff")
BOM = "\ufeff".encode()
_FIRST_LINE = 1 << 16

# A file of rows, or a split of a folder that was saved.
RowsPart = Path | SavedPart
# Rows, each with the number of its first line.
Numbered = Generator[tuple[int, list[bytes]], None, None]


def plain_name(path: Path) -> str:
    """The file name without its compression suffix."""
    return path.stem if path.suffix.lower() in COMPRESSED else path.name


def is_row_file(path: Path) -> bool:
    """Whether a file holds rows, judging by its name."""
    return plain_name(path).lower().endswith(PLAIN) or path.suffix.lower() == PARQUET


def endings() -> str:
    """The supported file endings, for messages."""
    return f"{', '.join(PLAIN)}, each also with {' or '.join(COMPRESSED)}, or {PARQUET}"


def read_fields(
    part: RowsPart,
    wanted: Wanted,
    *,
    columns: Sequence[str] | None = None,
    may_be_longer: bool = False,
    on_broken: Callable[[int], None] | None = None,
    may_be_null: str | None = None,
) -> Iterator[tuple[int, list[bytes]]]:
    """Read the wanted fields of each row.

    Args:
        part: File, whose name gives the format, or a split of a saved folder.
        wanted: The fields, each under the name of the option that selects it; exactly one of its names must be in the
            file, ignoring case.
        columns: Names of the columns of a CSV or tsv file that has no header; one with tabs enough is read as tsv,
            regardless of its name.
        may_be_longer: Whether rows of a file without a header may have more fields, which are not read.
        on_broken: Called with the line of each row of CSV or tsv that has another number of fields, which is then left
            out; otherwise such a row is an error.
        may_be_null: The name in `wanted` of the field that may be null in JSON, and is then empty; in the other fields
            null is an error.

    Yields:
        The number of the line that a row begins on, or of the row, and its fields; see `place_of`.

    Raises:
        ValueError: A row or the file is broken, or lacks a field; the place is named.
    """
    if isinstance(part, SavedPart) or is_arrow(part):
        rows = arrow_fields(part, wanted, may_be_null=may_be_null)
        yield from Progress(str(part), unit="rows").over(rows)
        return
    line = 0
    try:
        with open_unpacked(part) as file:
            if (kind := _kind(part, file, columns)) in _CELLS:
                rows = _chosen_cells(part, _CELLS[kind](part, file), wanted, columns, on_broken, may_be_longer)
            else:
                rows = _chosen_values(part, file, wanted, may_be_null)
            for line, fields in rows:
                yield line, fields
    except BROKEN as error:
        raise unreadable(part, error, f" after line {line}") from error


def place_of(part: RowsPart, number: int) -> str:
    """The place of a row, for messages."""
    return f"{part}, {'row' if is_arrow(part) else 'line'} {number}"


def first_fields(part: RowsPart, columns: Sequence[str] | None = None) -> Sequence[str]:
    """The names of the fields of a part: of its columns, the cells of its first line, or the names in its first object.

    Empty if the first row cannot be read; `read_fields` then reports the error. Cells may be equal: the first row need
    not be a header, and `columns` are those of a file without one.
    """
    if isinstance(part, SavedPart) or is_arrow(part):
        return columns_of(part)
    try:
        with open_unpacked(part) as file:
            if (kind := _kind(part, file, columns)) in _CELLS:
                return _header(part, _CELLS[kind](part, file))[1]
            return list(parse_json(next(line for _, line in lines_of(part, file) if not line.isspace())))
    except (ValueError, StopIteration, TypeError, *BROKEN):
        return []


def lacks_field(part: RowsPart, names: Sequence[str]) -> bool:
    """Whether the first row of a part can be read and lacks all fields of these names."""
    fields = first_fields(part)
    return bool(fields) and not has_field(fields, names)


def _kind(path: Path, file: BinaryIO, columns: Sequence[str] | None) -> str:
    """The ending that says how to read a file, at its beginning; passes the byte order mark."""
    if not is_row_file(path):
        raise ValueError(f"{path} has an unsupported format: its name must end in {endings()}.")
    pass_byte_order_mark(path, file)
    kind = Path(plain_name(path)).suffix.lower()
    if columns and kind == ".csv":
        line = file.peek(_FIRST_LINE).partition(b"\n")[0]  # type: ignore[attr-defined]
        return ".tsv" if line.count(b"\t") + 1 >= len(columns) else kind
    return kind


def pass_byte_order_mark(path: Path, file: BinaryIO) -> None:
    """Skip the UTF-8 byte order mark at the beginning of a file.

    Raises:
        ValueError: The mark is that of UTF-16.
    """
    start = file.peek(3)[:3]  # type: ignore[attr-defined]
    if start[:2] in UTF_16:
        raise ValueError(f"{path} is UTF-16: save it as UTF-8.")
    if start == BOM:
        file.read(3)


def _tsv_rows(path: Path, file: BinaryIO) -> Numbered:
    lines = ((number, line.removesuffix(b"\n").removesuffix(b"\r")) for number, line in lines_of(path, file))
    return _without_blank_lines((number, line.split(b"\t") if line else []) for number, line in lines)


def _csv_rows(path: Path, file: BinaryIO) -> Numbered:
    return _without_blank_lines(_csv_cells(path, file))


def _csv_cells(path: Path, file: BinaryIO) -> Numbered:
    line, size = 1, 0

    def lines() -> Iterator[str]:
        nonlocal size
        while part := text.readline(LONGEST + 1):
            size += len(part)
            if size > LONGEST:
                raise too_long(path, line)
            yield part

    # The csv module reads text; bytes that are not UTF-8 go through it as lone surrogates, and come out unchanged.
    with io.TextIOWrapper(file, encoding="utf-8", errors="surrogateescape", newline="") as text:
        reader = csv.reader(lines(), strict=True)
        while (cells := _next_row(reader, path, line)) is not None:
            # The csv module gives no cell for a blank line, and an empty one for quotes.
            yield line, [cell.encode("utf-8", errors="surrogateescape") for cell in cells]
            line, size = reader.line_num + 1, 0


def _next_row(reader: Iterator[list[str]], path: Path, line: int) -> list[str] | None:
    # The limit is that of the whole process, so it is put back.
    limit = csv.field_size_limit(sys.maxsize)
    try:
        return next(reader, None)
    except csv.Error as error:
        raise ValueError(
            f"{path}, line {line}: the row is not CSV ({error}): a quote is missing, or the file is cut short."
        ) from error
    finally:
        csv.field_size_limit(limit)


_CELLS: dict[str, Callable[[Path, BinaryIO], Numbered]] = {".csv": _csv_rows, ".tsv": _tsv_rows}


def _without_blank_lines(rows: Iterator[tuple[int, list[bytes]]]) -> Numbered:
    """Skip blank lines, which have no cells; but between rows of a single column they are rows with an empty cell."""
    width, blank = 0, list[tuple[int, list[bytes]]]()
    for number, cells in rows:
        if not cells:
            blank.append((number, [b""]))
            continue
        if width == 1:
            yield from blank
        blank.clear()
        width = width or len(cells)
        yield number, cells


def _chosen_cells(
    path: Path,
    rows: Numbered,
    wanted: Wanted,
    columns: Sequence[str] | None,
    on_broken: Callable[[int], None] | None,
    may_be_longer: bool,
) -> Numbered:
    may_be_longer = may_be_longer and columns is not None
    if columns is None:
        line, columns = _header(path, rows)
        try:
            names = find_names(columns, wanted)
        except ValueError as error:
            raise ValueError(f"{path}, line {line}: the first line must name the columns, and {error}") from error
    else:
        names = [names[0] for names in wanted.values()]
    places = [columns.index(name) for name in names]
    for line, cells in rows:
        if len(cells) == len(columns) or (may_be_longer and len(cells) > len(columns)):
            yield line, [cells[place] for place in places]
        elif on_broken is not None:
            on_broken(line)
        else:
            shown = b" ".join(cells).decode("utf-8", errors="backslashreplace")[:60]
            raise ValueError(
                f"{path}, line {line}: {len(cells)} fields where {len(columns)} are wanted ({', '.join(columns)}),"
                f" beginning {shown!r}: the row is broken, the file is cut short, or of another kind."
            )


def _header(path: Path, rows: Numbered) -> tuple[int, list[str]]:
    line, header = next(rows, (1, []))
    if not header:
        raise ValueError(f"{path} is empty: it must begin with a header line, or the file is cut short.")
    return line, [cell.decode("utf-8", errors="backslashreplace") for cell in header]


def _chosen_values(path: Path, file: BinaryIO, wanted: Wanted, may_be_null: str | None) -> Numbered:
    names: list[str] = []
    for number, line in lines_of(path, file):
        if line.isspace():
            continue
        try:
            row = _object(line)
            names = names or find_names(list(row), wanted)
            if missing := [name for name in names if name not in row]:
                raise ValueError(f"the field {missing[0]!r} is missing, which the first row has.")
            fields = all_as_bytes([row[name] for name in names], names, wanted, may_be_null)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        yield number, fields


def _object(line: bytes) -> dict[str, object]:
    try:
        return parse_json(line)
    except ValueError as error:
        raise ValueError(f"the line {error}: the file is cut short, or does not hold one object per line.") from error
