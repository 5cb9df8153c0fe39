"""One measurement is one row; rows live in CSV files.

A row says what was measured (study, quantity, method, value, unit, spread), at which sizes, on what (device, dtype),
with what (torch version, commit) and how (command, seed, date). What was not measured has the value NaN and a note that
says why. In a file None is an empty cell and NaN is `nan`; numbers are written in full, so that reading gives back what
was written.

A file has one header. Rows are appended a group at a time, by any number of processes: each holds a lock on the file
while it replaces it by a longer one, so that a process that is killed leaves whole groups. For a last line without an
end, reading and appending raise an error that names file and line.

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
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import BinaryIO

from nystrom.whole_files import check_folder, write_whole

if sys.platform != "win32":
    import fcntl


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        study: Name of the study, such as "efficiency".
        quantity: What was measured, such as "forward time".
        method: What it was measured of, such as "nystrom-64".
        value: The number; NaN where it was not measured.
        unit: Its unit, such as "ms"; "" for a pure number.
        low: Lower end of the spread; None where there is none. The study says which spread it is.
        high: Upper end of the spread.
        repeats: Number of measurements.
        n: Tokens; None where there are none.
        m: Landmarks, features or another size that the method names; None where there is none.
        sizes: The other sizes, such as "b=1 h=8 d=64".
        dtype: Such as "float32".
        seed: Of the random inputs; None where nothing was drawn.
        device: Name of the processor or accelerator.
        torch: Version of torch; "" where it is not installed.
        commit: Short hash of the checkout that holds the package, "+dirty" where tracked files were changed; ""
            outside of git.
        date: Day of the measurement, ISO 8601, UTC.
        command: What measured it.
        note: Why it was not measured; otherwise "".
    """

    study: str
    quantity: str
    method: str
    value: float
    unit: str
    low: float | None
    high: float | None
    repeats: int
    n: int | None
    m: int | None
    sizes: str
    dtype: str
    seed: int | None
    device: str
    torch: str
    commit: str
    date: str
    command: str
    note: str


HEADER = tuple(field.name for field in fields(Row))
_HEADER_LINE = f"{','.join(HEADER)}\n".encode()
_NUMBERS = {"value": float, "low": float, "high": float, "repeats": int, "n": int, "m": int, "seed": int}
_OPTIONAL = ("low", "high", "n", "m", "seed")


def new_row(
    *,
    study: str,
    quantity: str,
    method: str,
    value: float,
    unit: str,
    device: str,
    low: float | None = None,
    high: float | None = None,
    repeats: int = 1,
    n: int | None = None,
    m: int | None = None,
    sizes: str = "",
    dtype: str = "float32",
    seed: int | None = None,
    command: str | None = None,
    note: str = "",
) -> Row:
    """Make a row, and fill in the version of torch, the commit and the date.

    Args:
        study: See `Row` for this and all that follow.
        value: The number; NaN where it was not measured, with a note.
        device: Name of the processor or accelerator; `cpu_name()` for this machine's processor.
        command: What measured it; None means the command that started this process, without the machine's folders.
        note: Why it was not measured.

    Raises:
        ValueError: A value of NaN without a note.
    """
    if math.isnan(value) and not note:
        raise ValueError(
            f"value of {quantity} of {method} is NaN and note is empty: say in note why it was not measured."
        )
    return Row(
        study=study,
        quantity=quantity,
        method=method,
        value=float(value),
        unit=unit,
        low=low,
        high=high,
        repeats=repeats,
        n=n,
        m=m,
        sizes=sizes,
        dtype=dtype,
        seed=seed,
        device=device,
        torch=_torch_version(),
        commit=_commit(),
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        command=started_as() if command is None else command,
        note=note,
    )


def append_rows(path: Path, rows: Iterable[Row]) -> None:
    """Append rows to a CSV file, all or none of them; the file and its folder are made where they are missing.

    Many processes may append to a file at once, on machines that share it too where locks work there; on Windows one.

    Raises:
        ValueError: The file has another header or ends in the middle of a line, or its folder cannot be written.
    """
    path = Path(path).resolve()
    check_folder(path.parent)
    text = _lines(rows)
    with _held(path) as file:
        before = file.read()
        if before:
            _check_ends(path, before)
        write_whole(path, (before or _HEADER_LINE) + text)


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write rows as a CSV file, in place of those that are there; its folder is made where it is missing.

    Raises:
        ValueError: Its folder cannot be written.
    """
    check_folder(Path(path).parent)
    write_whole(Path(path), _HEADER_LINE + _lines(rows))


def _lines(rows: Iterable[Row]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([_cell(value) for value in astuple(row)] for row in rows)
    return text.getvalue().encode()


@contextmanager
def _held(path: Path) -> Iterator[BinaryIO]:
    """Open a file for as long as no other process holds it; an empty one is made where it is missing."""
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
    """Read the rows of a CSV file that `append_rows` wrote.

    Raises:
        ValueError: The file is missing, foreign or cut off; the message names the file and the line.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path} is not a file; expected a CSV file of rows.")
    content = path.read_bytes()
    _check_ends(path, content)
    reader = csv.reader(io.StringIO(content.decode(errors="replace"), newline=""))
    next(reader)
    try:
        return [_row(cells, f"{path}, line {reader.line_num}") for cells in reader]
    except csv.Error as error:
        raise ValueError(f"{path}, line {reader.line_num} is not CSV ({error}): delete that line.") from error


def check_rows(path: Path) -> None:
    """Check, before the work, that rows can be written to a file: its folder, and that it is new or holds rows.

    Raises:
        ValueError: They cannot; the message names the folder, or the file and the line.
    """
    check_folder(path.parent)
    if os.path.lexists(path):
        read_rows(path)


def started_as() -> str:
    """The command that started this process: the program's name, and its arguments without the machine's folders."""
    program = Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "python"
    # `python -m nystrom_lab` and `torchrun -m nystrom_lab` are the same command.
    program = "nystrom" if program == "__main__.py" else program
    words = []
    for word in sys.argv[1:]:
        name, equals, value = word.rpartition("=")
        words.append(name + equals + (Path(value).name if os.path.isabs(value) else value))
    return shlex.join([program, *words])


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


def _check_ends(path: Path, content: bytes) -> None:
    """Raise an error for the content of a file with another header, and for one whose last line has no end."""
    first = content.partition(b"\n")[0].decode("utf-8", errors="replace").rstrip("\r")
    if next(csv.reader([first]), []) != list(HEADER):
        raise ValueError(
            f"{path}, line 1 is {first[:80]!r}; expected the header {','.join(HEADER)}: "
            "it is no file of rows, or one of another version. Choose another file."
        )
    if not content.endswith(b"\n"):
        lines = content.count(b"\n") + 1
        raise ValueError(f"{path}, line {lines} has no end: writing it was interrupted. Delete that line and go on.")


def _cell(value: object) -> str:
    return "" if value is None else repr(value) if isinstance(value, float) else str(value)


def _row(cells: list[str], place: str) -> Row:
    if len(cells) != len(HEADER):
        raise ValueError(f"{place} has {len(cells)} cells; expected {len(HEADER)}: delete that line.")
    values: dict[str, str | float | int | None] = {}
    for name, cell in zip(HEADER, cells, strict=True):
        try:
            optional = cell == "" and name in _OPTIONAL
            values[name] = None if optional else _NUMBERS[name](cell) if name in _NUMBERS else cell
        except ValueError as error:
            raise ValueError(f"{place} has {name} = {cell!r}; expected a number: delete that line.") from error
    return Row(**values)  # pyright: ignore[reportArgumentType]
