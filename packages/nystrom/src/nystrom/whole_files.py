"""The only writer of files, atomically: a file gets its name only when it is complete and on disk.

A file is written under a temporary name beside it (`nystrom.temporary`), synced to disk and renamed. If anything fails,
the temporary file is removed, and an existing file is unchanged.
"""

import errno
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from nystrom.temporary import temporary_file

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
        _check_free(path)
    with ExitStack() as stack:
        try:
            partial = stack.enter_context(temporary_file(path))
        except OSError as error:
            raise _not_written(path, error) from error
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
        with temporary_file(folder / "check"):
            pass
    except OSError as error:
        raise ValueError(f"{folder} cannot be written ({error.strerror}): choose another folder.") from error


def check_new(path: Path) -> None:
    """Check, before work, that a new file can be written.

    Raises:
        ValueError: The path exists, be it as a broken link, or as in `check_place`.
    """
    _check_free(path)
    check_place(path)


def check_fresh(to: Path) -> None:
    """Check, before work, that a new folder can be written.

    Raises:
        ValueError: Something would be overwritten: a file, a link, or a folder that is not empty; or as in
            `check_place`.
    """
    check_no_link(to)
    if to.is_dir():
        if any(to.iterdir()):
            raise ValueError(f"{to} is not empty: choose another folder.")
    elif to.exists():
        raise ValueError(f"{to} is a file: choose another name.")
    check_place(to)


def check_place(path: Path) -> None:
    """Check, before work, that a file or folder can get this path; missing folders around it are not created.

    Raises:
        ValueError: Nothing can be created there, or as in `check_replaceable`.
    """
    check_replaceable(path)
    around = next(folder for folder in path.parents if os.path.lexists(folder))
    try:
        with temporary_file(around / path.name):
            pass
    except OSError as error:
        raise ValueError(f"{path} cannot be written ({error.strerror}: {around}): choose another place.") from error


def check_replaceable(folder: Path) -> None:
    """Raise ValueError for a folder that no rename can exchange for another one."""
    here = Path.cwd()
    if folder.name == ".." or os.path.ismount(folder) or folder.resolve() in (here, *here.parents):
        raise ValueError(
            f"{folder} is a mount point, the current folder or one around it, and cannot be replaced: name a folder "
            "inside it."
        )


def check_no_link(path: Path) -> None:
    """Raise ValueError if a path that will be written to is a symbolic link."""
    if path.is_symlink():
        raise ValueError(
            f"{path} is a symbolic link, which is not written through: remove the link, or choose another name."
        )


def _check_free(path: Path) -> None:
    if os.path.lexists(path):
        raise _is_there(path)


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
            _check_free(path)
            os.replace(partial, path)
    else:
        os.replace(partial, path)
    if sys.platform != "win32":
        # The file already has its name; some file systems cannot sync a folder.
        with suppress(OSError):
            sync(path.parent)


def share_weights(folder: Path) -> None:
    """Let those who may read a folder read its weights, which safetensors 0.8 writes for their owner alone."""
    mode = folder.stat().st_mode & 0o666
    for file in folder.rglob("*.safetensors"):
        file.chmod(mode)


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
