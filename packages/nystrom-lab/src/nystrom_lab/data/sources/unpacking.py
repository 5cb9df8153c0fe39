"""Compressed files, unpacked on the fly, up to a size limit.

A few megabytes can unpack to many gigabytes. The limit is 20 times the size of the file, and at least a gigabyte,
unless the caller allows more: texts shrink three to six times, pictures hardly at all.
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
from pathlib import Path
from typing import Any, BinaryIO, cast

from tqdm.utils import CallbackIOWrapper

from nystrom.progress import Progress

READ_AHEAD = 1 << 20
RATIO, AT_LEAST = 20, 10**9
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


class Limit:
    """The limit on the unpacked size of a file.

    Args:
        path: The compressed file.
        gigabytes: The limit; None for the default.

    Raises:
        ValueError: The limit is not positive.
    """

    def __init__(self, path: Path, gigabytes: float | None):
        if gigabytes is not None and not gigabytes > 0:
            raise ValueError(f"--max-unpacked is {gigabytes}; expected a positive number of gigabytes.")
        self.path = path
        self.bytes = max(RATIO * path.stat().st_size, AT_LEAST) if gigabytes is None else gigabytes * 1e9

    def check(self, size: int) -> None:
        """Raise ValueError if `size` bytes exceed the limit."""
        if size > self.bytes:
            raise ValueError(
                f"{self.path} has {self.path.stat().st_size} bytes and unpacks to more than {self.bytes / 1e9:g} GB:"
                " if you expect that, unpack it first, or allow more with --max-unpacked GIGABYTES of `nystrom data "
                "prepare` and `nystrom tokenizer train`."
            )


@contextmanager
def open_unpacked(path: Path, *, max_unpacked: float | None = None, progress: bool = False) -> Iterator[BinaryIO]:
    """Open a file and unpack it on the fly; its name determines how.

    Args:
        path: File.
        max_unpacked: Gigabytes that it may unpack to; None for the default.
        progress: Say how much of it was read.

    Raises:
        ValueError: The file does not exist, or unpacks to more than the limit.
    """
    if not path.is_file():
        raise ValueError(f"{path} does not exist or is not a file: name the file to read.")
    unpack = UNPACK.get(path.suffix.lower())
    bar = Progress(path.name, path.stat().st_size, unit="B", shown=progress)
    with path.open("rb", buffering=READ_AHEAD) as raw, bar:
        counted = CallbackIOWrapper(bar.update, raw, "read")
        limit = Limit(path, max_unpacked)
        if unpack is None:
            limit.bytes = float("inf")
        unpacked = counted if unpack is None else unpack(counted)
        yield cast("BinaryIO", io.BufferedReader(_Limited(unpacked, limit), READ_AHEAD))


class _Limited(io.RawIOBase):
    """A stream that raises an error when it exceeds the limit."""

    def __init__(self, source: Any, limit: Limit):
        self._source, self._limit, self._size = source, limit, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        piece = self._source.read(len(buffer))
        self._size += len(piece)
        self._limit.check(self._size)
        buffer[: len(piece)] = piece
        return len(piece)


def member_content(path: Path, archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    """Read a regular file of an archive.

    Raises:
        ValueError: The file is sparse: its holes are not in the archive, and so not counted by the limit.
    """
    if member.issparse():
        raise ValueError(f"{path}, {member.name} is a sparse file, which is not supported: pack it without holes.")
    content = archive.extractfile(member)
    assert content is not None, "a plain file has content"
    return content.read()


def unreadable(path: Path, error: Exception, place: str = "") -> Exception:
    """The error for a file that is truncated or damaged; disk errors are kept."""
    if isinstance(error, OSError) and error.errno is not None:
        return error
    return ValueError(f"{path} cannot be unpacked{place} ({error}): it is cut short or damaged, fetch it again.")
