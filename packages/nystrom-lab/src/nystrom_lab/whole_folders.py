"""Folders that are created atomically, and leftovers of killed processes; see `nystrom.whole_files` for files.

A folder `data` is first created as `.data.XXXXXXXX.partial` in the same parent folder, where X are random hexadecimal
digits. A file of the same name plus `.lock` is locked during the work. The lock ends with the process, however that
ends. So a folder whose lock file exists but is not locked is a leftover, and may be removed.

What has the name of a new folder already is never removed. If it holds the same files (by the sums in `complete.json`,
see `nystrom.sums`) it stays as it is, with whatever a user has added; otherwise it is renamed to `data-before`.
"""

import json
import os
import re
import secrets
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from filelock import FileLock, Timeout

from nystrom.sums import CARD, SUMS, find_fault, read_sums, sha256
from nystrom.whole_files import sync, write_whole


@contextmanager
def partial_folder(to: Path) -> Iterator[Path]:
    """Yield an empty folder next to `to`, which is removed at the end unless it was renamed.

    Raises:
        OSError: The folder cannot be created.
    """
    folder = to.parent / f".{to.name}.{secrets.token_hex(4)}.partial"
    mark = folder.with_name(f"{folder.name}.lock")
    folder.mkdir()
    try:
        with FileLock(mark):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        mark.unlink(missing_ok=True)


@contextmanager
def whole_folder(to: Path) -> Iterator[Path]:
    """Yield an empty folder; at the end it gets a `complete.json`, and becomes `to` as in `put_in_place`.

    Raises:
        OSError: The folder cannot be written.
    """
    remove_leftovers(to)
    with partial_folder(to) as partial:
        yield partial
        write_sums(partial)
        for path in (*partial.rglob("*"), partial):
            sync(path)
        put_in_place(partial, to)


def put_in_place(partial: Path, to: Path) -> None:
    """Rename a complete folder to `to`, unless that holds the same files; what else is there gets another name.

    Raises:
        OSError: It cannot be renamed; then all is as before.
    """
    if not os.path.lexists(to):
        partial.rename(to)
    elif not holds_same(to, partial):
        before = _free_name(to)
        to.rename(before)
        try:
            partial.rename(to)
        except OSError:
            before.rename(to)
            raise
        print(f"notice: what was in the place of {to} is kept as {before}.", file=sys.stderr, flush=True)


def remove_recorded(folder: Path) -> None:
    """Remove the files of a folder that its `complete.json` lists, in their size, and it if nothing else is in it."""
    written = read_sums(folder)
    names = [name for name in files_in(folder) if name in written]
    # The record last: an interrupted removal can go on.
    remove_files(folder, [*(name for name in names if (folder / name).lstat().st_size == written[name][0]), SUMS])


def remove_files(folder: Path, names: Iterable[str]) -> None:
    """Remove some files of a folder, and the folders that are empty then; nothing where it is a link."""
    if folder.is_symlink():
        return
    for name in names:
        (folder / name).unlink(missing_ok=True)
    for inside, _, _ in os.walk(folder, topdown=False):
        # One that is not empty stays.
        with suppress(OSError):
            os.rmdir(inside)


def remove_leftovers(to: Path) -> None:
    """Remove leftovers of killed processes that were creating `to`; folders still in progress stay.

    Raises:
        OSError: The folder around `to` cannot be read.
    """
    marked = re.compile(rf"\.{re.escape(to.name)}\.[0-9a-f]{{8}}\.partial\.lock")
    for mark in [path for path in to.parent.iterdir() if marked.fullmatch(path.name) and path.is_file()]:
        try:
            with FileLock(mark, blocking=False):
                folder = mark.with_suffix("")
                if folder.is_dir() and not folder.is_symlink():
                    shutil.rmtree(folder, ignore_errors=True)
                mark.unlink(missing_ok=True)
        except (Timeout, OSError):
            # The process that created it is still at work, or it belongs to another user.
            continue


def _free_name(path: Path) -> Path:
    """A name beside a path that nothing has yet."""
    names = (path.with_name(f"{path.name}-before{'' if i == 1 else f'-{i}'}") for i in count(1))
    return next(name for name in names if not os.path.lexists(name))


def files_in(folder: Path) -> set[str]:
    """The files and links in a folder, and in the folders inside, but for the record."""
    paths = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return {path.relative_to(folder).as_posix() for path in paths} - {SUMS}


def write_sums(folder: Path) -> None:
    """Record the files of a folder, and of the folders inside; all must be complete. Readers may edit the card."""
    names = sorted(files_in(folder) - {CARD})
    content = {name: [(folder / name).stat().st_size, sha256(folder / name)] for name in names}
    write_whole(folder / SUMS, json.dumps(content, indent=1) + "\n")


def holds_same(folder: Path, other: Path) -> bool:
    """Whether a folder holds the files that another one's record lists, unchanged."""
    try:
        return read_sums(folder) == read_sums(other) and not find_fault(folder)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
