"""Folders that are created atomically, and leftovers of killed processes; see `nystrom.whole_files` for files.

A folder `data` is first created as `.data.XXXXXXXX.partial` in the same parent folder, where X are random hexadecimal
digits. A file of the same name plus `.lock` is locked during the work. The lock ends with the process, however that
ends. So a folder whose lock file exists but is not locked is a leftover, and may be removed.
"""

import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from nystrom.whole_files import sync


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
    """Yield an empty folder, which replaces `to` and its contents at the end, if nothing failed.

    Raises:
        OSError: The folder cannot be written.
    """
    remove_leftovers(to)
    with partial_folder(to) as partial:
        yield partial
        for path in (*partial.rglob("*"), partial):
            sync(path)
        if to.exists():
            shutil.rmtree(to)
        partial.replace(to)


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
