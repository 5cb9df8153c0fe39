"""One measurement is one row; rows live in CSV files.

A row says what was measured (study, quantity, method, value, unit, spread), at which sizes, on what (device, dtype),
with what (torch version, commit) and how (command, seed, date). A missing measurement has the value NaN and a note that
says why, and so has one that overflowed to infinity; without the note such a row can be neither made nor read. In a
file None is an empty cell and NaN is `nan`; numbers are written in full, so that reading gives back what was written.

A file has one header: the columns that all rows have, then one for each further fact, such as `layer` or `task`, that
one of its rows has; other rows leave it empty. `pandas.read_csv` takes such a file as it is. Rows are appended in
groups, by any number of processes: each locks the file while it replaces it by a longer one, so a killed process leaves
only complete groups. If the last line has no line end, reading and appending raise an error that names file and line.

No writer loses a row of another measurement: `append_rows` keeps all, `write_rows` replaces only rows that are measured
anew with the same settings, and a command whose file holds one setting refuses that of another first (`rows_so_far`).

Needs the standard library only, so that tables and plots of rows need no torch.
"""

import csv
import datetime
import functools
import importlib.metadata
import io
import math
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, BinaryIO

from nystrom.input_files import read_input
from nystrom.whole_files import check_folder, write_whole

if sys.platform != "win32":
    import fcntl


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement.

    Attributes:
        study: Name of the study, such as "efficiency"; `nystrom reproduce` fills in its own.
        quantity: Measured quantity, such as "forward time".
        method: The method that was measured, such as "nystrom-64".
        value: The number; NaN if it was not measured.
        unit: Unit, such as "ms"; "" for a pure number.
        low: Lower end of the spread; None if there is none. The study defines the spread.
        high: Upper end of the spread.
        repeats: Number of measurements.
        n: Number of tokens; None if not applicable.
        m: Landmarks, features or other size of the method; None if not applicable.
        dtype: Such as "float32".
        seed: Seed of the random inputs; None if nothing was drawn.
        device: Name of the processor or accelerator; without one, that of this machine's processor.
        torch: Version of torch; "" if it is not installed.
        commit: Short hash of the checkout that holds the package, "+dirty" where tracked files were changed; ""
            outside of git.
        date: Day of the measurement, ISO 8601, UTC.
        command: The command that measured it; without one, that which started this process, without local paths.
        note: Why it was not measured, or is not finite; otherwise "".
        facts: Further facts by name, such as {"b": "1", "layer": "3"}, stored in columns of their own. Values become
            text; those that are None or "" are left out.

    Raises:
        ValueError: A fact has the name of another column, or a number is not finite and no note says why.
    """

    study: str = ""
    quantity: str
    method: str
    value: float
    unit: str = ""
    low: float | None = None
    high: float | None = None
    repeats: int = 1
    n: int | None = None
    m: int | None = None
    dtype: str = "float32"
    seed: int | None = None
    # The fields below default to this machine and the current date.
    device: str = field(default_factory=lambda: cpu_name())
    torch: str = field(default_factory=lambda: _torch_version())
    commit: str = field(default_factory=lambda: _commit())
    date: str = field(default_factory=lambda: datetime.datetime.now(datetime.UTC).date().isoformat())
    command: str = field(default_factory=lambda: started_as())
    note: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self):
        if taken := [name for name in self.facts if name in HEADER]:
            raise ValueError(
                f"fact {taken[0]!r} of a row is a column of its own; expected none of {', '.join(HEADER)}."
            )
        numbers = [("value", self.value), ("low", self.low), ("high", self.high)]
        for name, number in () if self.note else numbers:
            if number is not None and not math.isfinite(number):
                raise ValueError(
                    f"{name} of {self.quantity} of {self.method} is {number}, and note is empty: what was measured is "
                    "not finite, so it is no result; a row that was not measured says why in its note."
                )
        stated = {name: str(value) for name, value in self.facts.items() if value not in (None, "")}
        object.__setattr__(self, "facts", stated)
        object.__setattr__(self, "value", float(self.value))

    @property
    def words(self) -> str:
        """The facts in words, such as "b=1 h=8 d=64"."""
        return " ".join(f"{name}={value}" for name, value in self.facts.items())

    def fact(self, name: str) -> str:
        """A fact; "" if the row does not have it."""
        return self.facts.get(name, "")

    def with_facts(self, **facts: Any) -> "Row":
        """The row with facts added or replaced; None removes one."""
        return replace(self, facts={**self.facts, **facts})


HEADER = tuple(each.name for each in fields(Row) if each.name != "facts")
_NUMBERS = {"value": float, "low": float, "high": float, "repeats": int, "n": int, "m": int, "seed": int}
_OPTIONAL = ("low", "high", "n", "m", "seed")


def append_rows(path: Path, rows: Iterable[Row]) -> None:
    """Append rows to a CSV file, all or none; the file and its folder are created if missing.

    Many processes may append to a file at once, also on machines that share it if locks work there; on Windows only
    one.

    Raises:
        ValueError: The file has another header or ends in the middle of a line, or its folder cannot be written.
    """
    path = Path(path).resolve()
    check_folder(path.parent)
    new = list(rows)
    with _held(path) as file:
        before = file.read()
        columns = _columns(path, before) if before else HEADER
        wanted = _columns_of(new, columns)
        if not before or len(wanted) > len(columns):
            write_whole(path, _text([*(_parsed(path, before) if before else ()), *new], wanted))
        else:
            write_whole(path, before + _lines(new, columns))


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write rows as a CSV file, after those of other measurements that it holds; its folder is created if missing.

    Rows that differ only in their numbers, torch version, commit, date and note are of one measurement. Only one
    process at a time may write so to a file.

    Raises:
        ValueError: The file is damaged or no file of rows, or its folder cannot be written.
    """
    path, new = Path(path), list(rows)
    check_folder(path.parent)
    known = {_measurement(row) for row in new}
    old = read_rows(path) if os.path.lexists(path) else []
    those = [*(row for row in old if _measurement(row) not in known), *new]
    write_whole(path, _text(those, _columns_of(those, HEADER)))


def rows_so_far(path: Path, new: Row, last: str) -> list[Row]:
    """The rows of a file that a command goes on with; none if there is no file.

    Args:
        new: A row that the command would write.
        last: The argument that ends the command and may differ.

    Raises:
        ValueError: The file holds rows of another setting, is damaged, or is no file of rows.
    """
    rows = read_rows(path) if os.path.lexists(path) else []
    for row in rows:
        for name in ("study", "command", "dtype", "seed", "device", "torch"):
            came, wanted = getattr(row, name), getattr(new, name)
            if name == "command":
                came, wanted = (command.partition(f" --{last} ")[0] for command in (came, wanted))
            if came != wanted:
                raise other_setting(path, name, came, wanted)
    return rows


def other_setting(path: Path, name: str, came: object, wanted: object) -> ValueError:
    """The error to raise for a file with rows of another setting: what differs, there and now."""
    return ValueError(
        f"{path} holds rows of another setting: {name} is {came!r} there and {wanted!r} now. Name another folder in "
        "to, or move that file away to start again."
    )


def _measurement(row: Row) -> tuple[Row, tuple[tuple[str, str], ...]]:
    """The measurement of a row without its result."""
    bare = replace(row, value=0.0, low=None, high=None, torch="", commit="", date="", note="", facts={})
    return bare, tuple(sorted(row.facts.items()))


def _columns_of(rows: Iterable[Row], columns: Sequence[str]) -> tuple[str, ...]:
    """These columns, and one for each further fact of the rows."""
    return tuple(dict.fromkeys([*columns, *(name for row in rows for name in row.facts)]))


def _text(rows: Iterable[Row], columns: Sequence[str]) -> bytes:
    return _csv([columns]) + _lines(rows, columns)


def _lines(rows: Iterable[Row], columns: Sequence[str]) -> bytes:
    facts = columns[len(HEADER) :]
    return _csv([_cell(getattr(row, name)) for name in HEADER] + [row.fact(name) for name in facts] for row in rows)


def _csv(lines: Iterable[Sequence[str]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue().encode()


@contextmanager
def _held(path: Path) -> Iterator[BinaryIO]:
    """Open and lock a file; an empty one is created if missing."""
    while True:
        with path.open("ab+") as file:
            if sys.platform != "win32":
                fcntl.flock(file, fcntl.LOCK_EX)
            # Another process may have replaced the file while this one waited.
            if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
                file.seek(0)
                yield file
                return


def read_rows(path: Path) -> list[Row]:
    """Read the rows of a CSV file written by `append_rows`.

    Raises:
        ValueError: The file is missing, not a file of rows, or truncated; the message names the file and the line.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path} is not a file; expected a CSV file of rows.")
    return _parsed(path, read_input(path))


def _parsed(path: Path, content: bytes) -> list[Row]:
    columns = _columns(path, content)
    reader = csv.reader(io.StringIO(content.decode(errors="replace"), newline=""))
    next(reader)
    try:
        return [_row(cells, columns, f"{path}, line {reader.line_num}") for cells in reader]
    except csv.Error as error:
        raise ValueError(f"{path}, line {reader.line_num} is not CSV ({error}): delete that line.") from error


def check_rows(path: Path) -> None:
    """Check, before the work, that rows can be written: the file is new or holds rows, in a writable folder.

    Raises:
        ValueError: They cannot; the message names the folder, or the file and the line.
    """
    check_folder(path.parent)
    if os.path.lexists(path):
        read_rows(path)


def started_as() -> str:
    """The command that started this process: the program's name, and its arguments without local paths."""
    started = Path(sys.argv[0]) if sys.argv and sys.argv[0] else Path("python")
    # `python -m nystrom_lab` and `torchrun -m nystrom_lab` are the same command; a tool is run by its path.
    program = ["nystrom" if started.name == "__main__.py" else started.name]
    program = ["python", f"tools/{started.name}"] if started.parent.name == "tools" else program
    words = []
    for word in sys.argv[1:]:
        name, equals, value = word.rpartition("=")
        words.append(name + equals + (Path(value).name if os.path.isabs(value) else value))
    return shlex.join([*program, *words])


def cpu_name() -> str:
    """The processor's name and how many of its cores this process may use, such as "AMD EPYC, 2 cores"."""
    return f"{_processor()}, {cores()} {'core' if cores() == 1 else 'cores'}"


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return " ".join(value.split())
    return platform.processor() or platform.machine() or "unknown processor"


@functools.cache
def _torch_version() -> str:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""


@functools.cache
def _commit() -> str:
    here = Path(__file__).resolve()

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(here.parent), *words], capture_output=True, text=True, timeout=30, check=True
        )
        return done.stdout.strip()

    try:
        # An installed copy may be inside somebody else's checkout, ignored there: that commit says nothing about it.
        git("ls-files", "--error-unmatch", here.name)
        return git("describe", "--always", "--exclude=*", "--dirty=+dirty")
    except (OSError, subprocess.SubprocessError):
        return ""


def _columns(path: Path, content: bytes) -> tuple[str, ...]:
    """The columns of a file of rows; raises for another header, and for an incomplete last line."""
    first = content.partition(b"\n")[0].decode("utf-8", errors="replace").rstrip("\r")
    try:
        columns = next(csv.reader([first]), [])
    except csv.Error:
        # The line is not text.
        columns = []
    if columns[: len(HEADER)] != list(HEADER) or len(set(columns)) < len(columns) or "" in columns:
        raise ValueError(
            f"{path}, line 1 is {first[:80]!r}; expected the header {','.join(HEADER)}, and columns of facts after it: "
            "it is not a file of rows, or one of another version. Choose another file."
        )
    if not content.endswith(b"\n"):
        lines = content.count(b"\n") + 1
        raise ValueError(f"{path}, line {lines} has no end: writing it was interrupted. Delete that line and continue.")
    return tuple(columns)


def _cell(value: object) -> str:
    return "" if value is None else repr(value) if isinstance(value, float) else str(value)


def _row(cells: list[str], columns: Sequence[str], place: str) -> Row:
    if len(cells) != len(columns):
        raise ValueError(f"{place} has {len(cells)} cells; expected {len(columns)}: delete that line.")
    values: dict[str, str | float | int | None] = {}
    for name, cell in zip(HEADER, cells, strict=False):
        try:
            optional = cell == "" and name in _OPTIONAL
            values[name] = None if optional else _NUMBERS[name](cell) if name in _NUMBERS else cell
        except ValueError as error:
            raise ValueError(f"{place} has {name} = {cell!r}; expected a number: delete that line.") from error
    further = zip(columns[len(HEADER) :], cells[len(HEADER) :], strict=True)
    try:
        return Row(**values, facts=dict(further))  # pyright: ignore[reportArgumentType]
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error
