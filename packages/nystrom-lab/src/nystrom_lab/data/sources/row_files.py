r"""Rows of CSV, tsv and JSON lines files, plain or compressed, one at a time and as bytes.

    .csv                    one header line; fields in quotes may hold commas, line ends and doubled quotes
    .tsv                    one header line; a row is a line, a field ends at a tab, quotes are letters like any other
    .jsonl .ndjson .json    one JSON object per line

each as it is, or with .gz, .xz, .bz2 or .zst appended. Blank lines are skipped, but in a file of one column those
between two rows are rows with an empty cell, and so are quotes with nothing between them, wherever they are.

Texts are read as bytes. In CSV and tsv they are taken unchanged, valid UTF-8 or not; a byte order mark at the start of
a file is dropped. JSON is UTF-8 by its definition, so other bytes in JSON lines are an error.

A row that cannot be read raises an error that names the file and line: a row is never skipped, unless the caller counts
it.
"""

import csv
import io
import json
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import BinaryIO

from nystrom_lab.data.sources.unpacking import BROKEN, open_unpacked, unreadable

PLAIN, COMPRESSED = (".csv", ".tsv", ".jsonl", ".ndjson", ".json"), (".gz", ".xz", ".bz2", ".zst")
UTF_16 = (b"\xff\xfe", b"\xfe\xff")
BOM = "\ufeff".encode()

# The fields that are wanted, in order: the option that names one, and the names that are looked for.
Wanted = Mapping[str, Sequence[str]]
# Rows, each with the number of its first line.
Numbered = Generator[tuple[int, list[bytes]], None, None]


def plain_name(path: Path) -> str:
    """The file name without its compression suffix."""
    return path.stem if path.suffix.lower() in COMPRESSED else path.name


def is_row_file(path: Path) -> bool:
    """Whether a file holds rows, judging by its name."""
    return plain_name(path).lower().endswith(PLAIN)


def read_fields(
    path: Path,
    wanted: Wanted,
    *,
    columns: Sequence[str] | None = None,
    max_unpacked: float | None = None,
    progress: bool = False,
    on_broken: Callable[[int], None] | None = None,
    may_be_null: str | None = None,
) -> Numbered:
    """Read the wanted fields of each row.

    Args:
        path: File; its name gives the format.
        wanted: The fields, each under the name of the option that selects it; exactly one of its names must be in the
            file, ignoring case.
        columns: Names of the columns of a CSV or tsv file that has no header.
        max_unpacked: Gigabytes that a compressed file may unpack to; see `unpacking`.
        progress: Say how far it is.
        on_broken: Called with the line of each row of CSV or tsv that has another number of fields, which is then left
            out; otherwise such a row is an error.
        may_be_null: The name in `wanted` of the field that may be null in JSON, and is then empty; in the other fields
            null is an error.

    Yields:
        The number of the line that a row begins on, and its fields.

    Raises:
        ValueError: A row or the file is broken, or lacks a field; the line is named.
    """
    line, kind = 0, _kind(path)
    try:
        with open_unpacked(path, max_unpacked=max_unpacked, progress=progress) as file:
            pass_byte_order_mark(path, file)
            if kind in (".csv", ".tsv"):
                cells = _csv_rows(file) if kind == ".csv" else _tsv_rows(file)
                rows = _chosen_cells(path, cells, wanted, columns, on_broken)
            else:
                rows = _chosen_values(file, wanted, may_be_null)
            with closing(rows):
                for line, fields in rows:
                    yield line, fields
    except _RowError as error:
        raise ValueError(f"{path}, line {error.line}: {error}") from error
    except BROKEN as error:
        raise unreadable(path, error, f" after line {line}") from error


def first_fields(path: Path, *, max_unpacked: float | None = None) -> list[str]:
    """The names of the fields of a file: the cells of its first line, or the names in its first object.

    Empty if the first row cannot be read; `read_fields` then reports the error. Cells may be equal: the first row need
    not be a header.
    """
    try:
        with open_unpacked(path, max_unpacked=max_unpacked) as file:
            pass_byte_order_mark(path, file)
            if (kind := _kind(path)) in (".csv", ".tsv"):
                return _first_cells(path, _csv_rows(file) if kind == ".csv" else _tsv_rows(file))[1]
            return list(json.loads(next(line for line in file if not line.isspace())))
    except (_RowError, ValueError, StopIteration, TypeError, *BROKEN):
        return []


def lacks_field(path: Path, names: Sequence[str], *, max_unpacked: float | None = None) -> bool:
    """Whether the first row of a file can be read and lacks all fields of these names."""
    fields = first_fields(path, max_unpacked=max_unpacked)
    return bool(fields) and not has_field(fields, names)


def has_field(fields: Sequence[str], names: Sequence[str]) -> bool:
    """Whether one of the fields has one of these names, ignoring case."""
    return bool(_alike(fields, names))


def _kind(path: Path) -> str:
    name = plain_name(path).lower()
    if not name.endswith(PLAIN):
        raise ValueError(f"{path} has an unsupported format: its name must end in {', '.join(PLAIN)}, or with .gz etc.")
    return Path(name).suffix


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


class _RowError(Exception):
    """An error in the row that begins on a line."""

    def __init__(self, line: int, message: str):
        super().__init__(message)
        self.line = line


def _tsv_rows(file: BinaryIO) -> Numbered:
    lines = ((number, line.removesuffix(b"\n").removesuffix(b"\r")) for number, line in enumerate(file, start=1))
    return _without_blank_lines((number, line.split(b"\t") if line else []) for number, line in lines)


def _without_blank_lines(rows: Numbered) -> Numbered:
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


def _csv_rows(file: BinaryIO) -> Numbered:
    line = 1
    limit = csv.field_size_limit(sys.maxsize)
    try:
        # The csv module reads text; bytes that are not UTF-8 go through it as lone surrogates, and come out unchanged.
        with io.TextIOWrapper(file, encoding="utf-8", errors="surrogateescape", newline="") as text:
            reader = csv.reader(text, strict=True)

            def rows() -> Numbered:
                nonlocal line
                for cells in reader:
                    # The csv module gives no cell for a blank line, and an empty one for quotes.
                    yield line, [cell.encode("utf-8", errors="surrogateescape") for cell in cells]
                    line = reader.line_num + 1

            yield from _without_blank_lines(rows())
    except csv.Error as error:
        raise _RowError(line, f"the row is not CSV ({error}): a quote is missing, or the file is cut short.") from error
    finally:
        csv.field_size_limit(limit)


def _chosen_cells(
    path: Path,
    rows: Numbered,
    wanted: Wanted,
    columns: Sequence[str] | None,
    on_broken: Callable[[int], None] | None,
) -> Numbered:
    with closing(rows):
        if columns is None:
            line, columns = _header(path, rows)
            try:
                names = find_names(columns, wanted)
            except ValueError as error:
                raise _RowError(line, f"the first line must name the columns, and {error}") from error
        else:
            names = [names[0] for names in wanted.values()]
        places = [columns.index(name) for name in names]
        for line, cells in rows:
            if len(cells) != len(columns):
                if on_broken is not None:
                    on_broken(line)
                    continue
                shown = b" ".join(cells).decode("utf-8", errors="backslashreplace")[:60]
                raise _RowError(
                    line,
                    f"{len(cells)} fields where {len(columns)} are wanted ({', '.join(columns)}), beginning {shown!r}:"
                    " the row is broken, the file is cut short, or of another kind.",
                )
            yield line, [cells[place] for place in places]


def _first_cells(path: Path, rows: Numbered) -> tuple[int, list[str]]:
    line, header = next(rows, (1, []))
    if not header:
        raise ValueError(f"{path} is empty: it must begin with a header line, or the file is cut short.")
    return line, [cell.decode("utf-8", errors="backslashreplace") for cell in header]


def _header(path: Path, rows: Numbered) -> tuple[int, list[str]]:
    line, columns = _first_cells(path, rows)
    if twice := sorted({column for column in columns if columns.count(column) > 1}):
        raise _RowError(line, f"the header names {', '.join(twice)} twice: give each column a name of its own.")
    return line, columns


def _chosen_values(file: BinaryIO, wanted: Wanted, may_be_null: str | None) -> Numbered:
    names: list[str] = []
    for number, line in enumerate(file, start=1):
        if line.isspace():
            continue
        try:
            row = json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise _RowError(
                number, f"not JSON ({error}): expected one object per line; the file is cut short or of another kind."
            ) from error
        if not isinstance(row, dict):
            raise _RowError(number, f"{line[:60]!r} is not a JSON object: expected one object per line.")
        try:
            names = names or find_names(list(row), wanted)
            if missing := [name for name in names if name not in row]:
                raise ValueError(f"the field {missing[0]!r} is missing, which the first row has.")
            fields = all_as_bytes([row[name] for name in names], names, wanted, may_be_null)
        except ValueError as error:
            raise _RowError(number, str(error)) from error
        yield number, fields


def find_names(columns: Sequence[str], wanted: Wanted) -> list[str]:
    """Find the one name of each wanted field.

    Raises:
        ValueError: None of the names of a field is present, or several are.
    """
    found = []
    for option, names in wanted.items():
        flag, there = f"--{option.replace('_', '-')}", _alike(columns, names)
        if len(there) != 1:
            came = f"both {there[0]!r} and {there[1]!r}" if there else f"no {' or '.join(map(repr, names))}"
            shown = ", ".join(repr(column[:40]) for column in columns[:12])
            raise ValueError(f"there is {came} among the fields {shown}: name the right one with {flag}.")
        found += there
    if len({*found}) < len(found):
        flags = ", ".join(f"--{option.replace('_', '-')}" for option in wanted)
        raise ValueError(f"{flags} name one field twice ({', '.join(found)}): name one for each.")
    return found


def _alike(columns: Sequence[str], names: Sequence[str]) -> list[str]:
    """Find the columns of these names, ignoring case; a name that matches exactly takes precedence."""
    if len(names) == 1 and names[0] in columns:
        return [*names]
    folded = {name.casefold() for name in names}
    return [column for column in columns if column.casefold() in folded]


def all_as_bytes(
    values: Sequence[object], names: Sequence[str], wanted: Wanted, may_be_null: str | None
) -> list[bytes]:
    """Convert the values of a row as `as_bytes` does; null becomes empty where allowed.

    Args:
        values: The values of the wanted fields.
        names: Their names in the file.
        wanted: The fields.
        may_be_null: The name in `wanted` of the field that may be null.

    Raises:
        ValueError: One is neither a text nor a number.
    """
    return [
        b"" if value is None and option == may_be_null else as_bytes(value, name)
        for value, name, option in zip(values, names, wanted, strict=True)
    ]


def as_bytes(value: object, name: str) -> bytes:
    """Convert a JSON value to the form that it would have in a tsv file; the numbers 1 and 1.0 are both 1.

    Raises:
        ValueError: It is neither a text nor a number.
    """
    if isinstance(value, str):
        try:
            return value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(f"{name} holds half a character ({error.reason}): correct the text.") from error
    if isinstance(value, bool):
        return b"true" if value else b"false"
    if isinstance(value, float) and value.is_integer():
        return str(int(value)).encode()
    if isinstance(value, (int, float)) and value == value:
        return str(value).encode()
    raise ValueError(f"{name} is {str(value)[:60]}; expected a text or a number.")
