"""Compressed files and archives, unpacked on the fly, up to a size limit.

A few megabytes can unpack to many gigabytes. The limit is 20 times the size of the file, and at least a gigabyte: texts
shrink three to six times, pictures hardly at all. Whoever expects more unpacks the file first.

A line has a limit of its own, since it is in memory as a whole, several times.
"""

import bz2
import gzip
import io
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, cast

from tqdm.utils import CallbackIOWrapper

from nystrom.input_files import check_regular, open_input
from nystrom.progress import Progress

READ_AHEAD = 1 << 20
RATIO, AT_LEAST = 20, 10**9
LONGEST = 20_000_000
BROKEN = (EOFError, OSError, lzma.LZMAError, zlib.error, tarfile.TarError, zipfile.BadZipFile)


def _by_pyarrow(file: BinaryIO, *, codec: str) -> Any:
    import pyarrow

    return pyarrow.CompressedInputStream(file, codec)


# pyarrow 26.0.1 refuses the zeros that pad some .gz files, and reads no .xz.
UNPACK: dict[str, Callable[[Any], Any]] = {
    ".gz": gzip.open,
    ".tgz": gzip.open,
    ".xz": lzma.open,
    ".bz2": bz2.open,
    ".zst": partial(_by_pyarrow, codec="zstd"),
    ".lz4": partial(_by_pyarrow, codec="lz4"),
}


def check_unpacked(path: Path, size: int) -> None:
    """Raise ValueError if a compressed file may not unpack to this many bytes."""
    packed = path.stat().st_size
    if size > (limit := max(RATIO * packed, AT_LEAST)):
        raise ValueError(
            f"{path} has {packed} bytes and unpacks to more than {limit / 1e9:g} GB: if you expect that, unpack "
            "it first."
        )


@contextmanager
def open_unpacked(path: Path) -> Iterator[BinaryIO]:
    """Open a file and unpack it on the fly; its name determines how.

    Raises:
        ValueError: The file does not exist, or unpacks to more than the limit.
    """
    check_regular(path)
    if not path.is_file():
        raise ValueError(f"{path} does not exist or is not a file: name the file to read.")
    unpack = UNPACK.get(path.suffix.lower())
    with open_input(path, buffering=READ_AHEAD) as raw, Progress(path.name, path.stat().st_size, unit="B") as bar:
        counted = CallbackIOWrapper(bar.update, raw, "read")
        stream = _Limited(counted, None) if unpack is None else _Limited(unpack(counted), path)
        yield cast("BinaryIO", io.BufferedReader(stream, READ_AHEAD))


def lines_of(path: Path, file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """The lines of a file, with their numbers from 1; ValueError for one beyond the limit."""
    for number in count(1):
        if not (line := file.readline(LONGEST + 1)):
            return
        if len(line) > LONGEST:
            raise too_long(path, number)
        yield number, line


def too_long(path: Path, number: int) -> ValueError:
    """The error for a row, beginning on this line, that is longer than the limit."""
    return ValueError(
        f"{path}, line {number}: the row has more than {LONGEST / 1e6:g} MB: cut its text into several rows, or add "
        "the line end or the quote that is missing."
    )


class _Limited(io.RawIOBase):
    """A stream that raises an error when it exceeds the limit of a compressed file, if it is one."""

    def __init__(self, source: Any, packed: Path | None):
        self._source, self._packed, self._size = source, packed, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        piece = self._source.read(len(buffer))
        self._size += len(piece)
        if self._packed is not None:
            check_unpacked(self._packed, self._size)
        buffer[: len(piece)] = piece
        return len(piece)


def members_of(path: Path) -> Iterator[tuple[tarfile.TarInfo, Callable[[], bytes]]]:
    """The members of a tar archive, each with the function that reads it before the next; nothing comes to disk.

    Raises:
        ValueError: The archive is cut short or damaged; or a file is sparse, whose holes the limit does not count.
    """
    try:
        with open_unpacked(path) as file, tarfile.open(fileobj=file, mode="r|") as archive:
            for member in archive:
                yield member, partial(_content, path, archive, member)
            # To the very end, where the checksum of the compression is.
            while file.read(READ_AHEAD):
                pass
    except BROKEN as error:
        raise unreadable(path, error) from error


def _content(path: Path, archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    if member.issparse():
        raise ValueError(f"{path}, {member.name} is a sparse file, which is not supported: pack it without holes.")
    content = archive.extractfile(member)
    assert content is not None, "a plain file has content"
    try:
        return content.read()
    except BROKEN as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: Exception, place: str = "") -> Exception:
    """The error for a file that is truncated or damaged; disk errors are kept."""
    if isinstance(error, OSError) and error.errno is not None:
        return error
    return ValueError(f"{path} cannot be unpacked{place} ({error}): it is cut short or damaged, fetch it again.")
