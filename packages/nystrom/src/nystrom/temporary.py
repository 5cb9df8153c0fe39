"""Temporary files and folders beside what they become, and the removal of those that killed processes left.

A file or folder `data` is made as `.data.XXXXXXXX.partial` in the same folder, where X are random hexadecimal digits.
It is created exclusively (O_EXCL), so nothing that exists is written to, and no symbolic link is followed. A file is
locked while it is in use; a folder has an empty file beside it, of the same name plus `.lock`, that is locked.

The lock ends with the process, however that ends. So the next process that makes something for the same name removes
what is not locked and belongs to the same user. On systems without locks leftovers stay.
"""

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

if sys.platform != "win32":
    import fcntl

_LOCK = ".lock"


@contextmanager
def temporary_file(path: Path) -> Iterator[Path]:
    """Yield an empty file beside `path`, which is removed at the end unless it was renamed.

    Raises:
        OSError: The file cannot be created.
    """
    remove_leftovers(path)
    partial, lock = _made(path)
    try:
        with naming(path, partial):
            yield partial
    finally:
        partial.unlink(missing_ok=True)
        _close(lock)


@contextmanager
def temporary_folder(path: Path, mode: int = 0o777) -> Iterator[Path]:
    """Yield an empty folder beside `path`, of a mode less the umask; removed at the end unless it was renamed.

    Raises:
        OSError: The folder cannot be created.
    """
    remove_leftovers(path)
    mark, lock = _made(path, _LOCK)
    folder = mark.with_suffix("")
    try:
        folder.mkdir(mode)
        try:
            with naming(path, folder):
                yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        mark.unlink(missing_ok=True)
        _close(lock)


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Yield an empty folder in TMPDIR that only this user may read, for files that nobody keeps; errors name TMPDIR."""
    place = tempfile.gettempdir()
    with temporary_folder(Path(place, "nystrom"), 0o700) as folder, naming(f"TMPDIR={place}", folder):
        yield folder


@contextmanager
def naming(known: object, partial: Path) -> Iterator[None]:
    """Let errors name what a user knows in place of a temporary file or folder, which is gone when they are read."""
    try:
        yield
    except Exception as error:
        old, new = str(partial), str(known)
        error.args = tuple(part.replace(old, new) if isinstance(part, str) else part for part in error.args)
        for name in ("filename", "filename2"):
            # None must stay unset: once set to None, it is shown.
            if old in str(file := getattr(error, name, None)):
                setattr(error, name, str(file).replace(old, new))
        raise


def remove_leftovers(path: Path) -> None:
    """Remove what killed processes of this user left while they were making `path`; what is in use stays."""
    if sys.platform == "win32":
        return
    begun = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{8}}\.partial({re.escape(_LOCK)})?")
    with suppress(OSError):
        for entry in [entry for entry in os.scandir(path.parent) if begun.fullmatch(entry.name)]:
            # Skipped: files of another user, not regular, in use, or gone in the meantime.
            with suppress(OSError):
                _remove_unlocked(Path(entry.path))


if sys.platform != "win32":

    def _remove_unlocked(path: Path) -> None:
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            status = os.fstat(file)
            if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if path.suffix == _LOCK:
                    # rmtree removes nothing through a link in the folder's place.
                    shutil.rmtree(path.with_suffix(""), ignore_errors=True)
                path.unlink()
        finally:
            os.close(file)


def _made(path: Path, suffix: str = "") -> tuple[Path, int | None]:
    """A new, empty file beside a path, and the descriptor that holds its lock."""
    while True:
        partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial{suffix}")
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


def _close(lock: int | None) -> None:
    if lock is not None:
        os.close(lock)
