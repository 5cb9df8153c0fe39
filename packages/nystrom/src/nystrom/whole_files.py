"""The only writer of files, atomically: a file gets its name only when it is complete and on disk.

A file `rows.csv` is written as `.rows.csv.XXXXXXXX.partial` in the same folder, where X are random hexadecimal digits.
The temporary file is created exclusively (O_EXCL), so an existing file or symbolic link is never written through. Then
the file is synced to disk and renamed. If anything fails, the temporary file is removed, and an existing file is
unchanged.

A killed process leaves its temporary file behind. It is locked while it is written, and the lock ends with the process;
so the next writer of the same file removes leftovers of the same user that are not locked. On systems without locks
they stay.
"""

import errno
import os
import re
import secrets
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

if sys.platform != "win32":
    import fcntl

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class NotWritten(OSError):
    """A file could not be written; the message names it and says what to do, and `filename` and `strerror` are set."""

    def __str__(self) -> str:
        # With `filename` and `strerror` set, the text of OSError would be a bare error number.
        return self.args[0]


@contextmanager
def whole_file(path: Path, *, new: bool = False) -> Iterator[Path]:
    """Yield the path of an empty temporary file to write to; at the end it becomes `path`, if nothing failed.

    Args:
        path: The file; an existing one is replaced, keeping its permissions.
        new: Refuse to replace an existing file.

    Raises:
        ValueError: The file exists, with `new`.
        NotWritten: The file cannot be created, or the disk is full; other errors of the block are passed on.
    """
    path = Path(path)
    if new:
        check_new(path)
    remove_leftovers(path)
    try:
        partial, lock = _made(path)
    except OSError as error:
        raise _not_written(path, error) from error
    try:
        try:
            yield partial
        # Libraries raise errors of their own for a full disk, such as RuntimeError in torch.
        except Exception as error:
            if _is_full(error):
                raise _not_written(path, error) from error
            raise
        try:
            _put(partial, path, new=new)
        except OSError as error:
            raise _not_written(path, error) from error
    finally:
        partial.unlink(missing_ok=True)
        if lock is not None:
            os.close(lock)


@contextmanager
def whole_bytes(path: Path, *, new: bool = False) -> Iterator[BinaryIO]:
    """Open a byte stream, which becomes the file at the end. See `whole_file`."""
    with whole_file(path, new=new) as partial, partial.open("wb") as file:
        yield file


def write_whole(path: Path, content: str | bytes, *, new: bool = False) -> None:
    """Write text, as UTF-8, or bytes. See `whole_file`."""
    with whole_bytes(path, new=new) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def put_new(file: Path, path: Path) -> None:
    """Give a finished file of the same file system another name, unless that is taken.

    Raises:
        ValueError: The name is taken.
        NotWritten: It cannot be given.
    """
    try:
        _put(file, path, new=True)
    except OSError as error:
        raise _not_written(path, error) from error


def check_folder(folder: Path) -> None:
    """Create a folder if it is missing; ValueError if no file can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"{folder} cannot be written ({error.strerror}): choose another folder.") from error


def check_new(path: Path) -> None:
    """Raise ValueError if a path exists, be it as a broken link."""
    if os.path.lexists(path):
        raise _is_there(path)


def check_no_link(path: Path) -> None:
    """Raise ValueError if a path that will be written to is a symbolic link."""
    if path.is_symlink():
        raise ValueError(
            f"{path} is a symbolic link, which is not written through: remove the link, or choose another name."
        )


def remove_leftovers(path: Path) -> None:
    """Remove temporary files that killed processes of this user left behind; files being written stay."""
    if sys.platform == "win32":
        return
    begun = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{8}}\.partial")
    with suppress(OSError):
        for entry in [entry for entry in os.scandir(path.parent) if begun.fullmatch(entry.name)]:
            # Skipped: files of another user, not regular, still being written, or gone in the meantime.
            with suppress(OSError):
                _remove_unlocked(entry.path)


if sys.platform != "win32":

    def _remove_unlocked(path: str) -> None:
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            status = os.fstat(file)
            if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(path)
        finally:
            os.close(file)


def _made(path: Path) -> tuple[Path, int | None]:
    """A new, empty file beside a path, and the descriptor that holds its lock."""
    while True:
        partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
        try:
            file = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            continue
        if sys.platform == "win32":
            # Windows cannot rename an open file.
            os.close(file)
            return partial, None
        # Without locks, no process takes the file for a leftover either.
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        # Before it was locked, another process may have taken it for a leftover.
        if os.fstat(file).st_nlink:
            return partial, file
        os.close(file)


def _put(partial: Path, path: Path, *, new: bool) -> None:
    """Sync a file to disk, and rename it."""
    if path.is_file():
        shutil.copymode(path, partial)
    sync(partial)
    if new:
        try:
            # Unlike a rename, a link fails if the name is taken.
            os.link(partial, path)
        except FileExistsError:
            raise _is_there(path) from None
        except OSError:
            # The file system has no hard links.
            check_new(path)
            os.replace(partial, path)
    else:
        os.replace(partial, path)
    if sys.platform != "win32":
        # The file already has its name; some file systems cannot sync a folder.
        with suppress(OSError):
            sync(path.parent)


def sync(path: Path) -> None:
    """Sync a file, or the names in a folder, to disk."""
    place = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(place)
    finally:
        os.close(place)


def _is_there(path: Path) -> ValueError:
    return ValueError(f"{path} already exists and is not overwritten: choose another name, or remove it first.")


def _is_full(error: Exception) -> bool:
    """Whether an error says that the disk is full, without naming a file."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in NO_SPACE and not isinstance(error, NotWritten)
    return os.strerror(errno.ENOSPC) in str(error)


def _not_written(path: Path, error: Exception) -> NotWritten:
    why = error.strerror if isinstance(error, OSError) and error.strerror else os.strerror(errno.ENOSPC)
    made = NotWritten(
        f"{path} cannot be written ({why}): free space, or choose another place; nothing was overwritten."
    )
    made.errno = error.errno if isinstance(error, OSError) and error.errno else errno.ENOSPC
    made.strerror, made.filename = why, str(path)
    return made
