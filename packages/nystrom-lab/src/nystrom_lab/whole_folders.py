"""Folders that are created atomically: filled under a temporary name (`nystrom.temporary`), and renamed.

A file or folder that already has the name is never removed. If it holds the same files (by the sums in `complete.json`,
see `nystrom.sums`) it stays as it is, with all that a user has added; otherwise it is renamed to `data-before`.
"""

import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from nystrom.sums import CARD, SUMS, find_fault, read_sums, sha256
from nystrom.temporary import temporary_folder
from nystrom.whole_files import share_weights, sync, write_whole


@contextmanager
def whole_folder(to: Path) -> Iterator[Path]:
    """Yield an empty folder; at the end it gets a `complete.json`, and becomes `to` as in `put_in_place`.

    Raises:
        OSError: The folder cannot be written.
    """
    with temporary_folder(to) as partial:
        yield partial
        share_weights(partial)
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
        # A folder that is not empty stays.
        with suppress(OSError):
            os.rmdir(inside)


def _free_name(path: Path) -> Path:
    """A name beside a path that nothing has yet."""
    names = (path.with_name(f"{path.name}-before{'' if i == 1 else f'-{i}'}") for i in count(1))
    return next(name for name in names if not os.path.lexists(name))


def files_in(folder: Path) -> set[str]:
    """The files and links in a folder, and in the folders inside, except the record."""
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
