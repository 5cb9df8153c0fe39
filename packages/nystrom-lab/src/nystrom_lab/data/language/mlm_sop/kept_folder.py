"""The folder of finished work, which survives an interruption: the same command continues from it.

A data set `mlm` is built with the help of `.mlm.XXXXXXXXXXXX.kept` beside its place, where X is a hash of everything
that determines the data. It is locked while a process works with it. When the data set is complete its files are
removed, and those of other settings for the same place; a file that is not of this work stays.
"""

import hashlib
import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from nystrom.whole_files import check_no_link
from nystrom_lab.data.store.header import DataSettings
from nystrom_lab.data.store.prepared_folder import cannot_be_made
from nystrom_lab.whole_folders import remove_files

# A block, a finished shard, and what a killed process was writing.
_FILE = re.compile(r"\.?[0-9]{6}(-[0-9]{6}\.npz|\.finished)(\.[0-9a-f]{8}\.partial)?")


@contextmanager
def kept_folder(to: Path, settings: DataSettings) -> Iterator[Path]:
    """Give the folder of finished work, which is removed when the block ends without an error.

    Raises:
        ValueError: It cannot be created or is a link, or another process is using it.
    """
    digest = hashlib.sha256(json.dumps(dict(settings), sort_keys=True).encode()).hexdigest()[:12]
    folder = to.parent / f".{to.name}.{digest}.kept"
    check_no_link(folder)
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(_mark(folder), blocking=False)
        lock.acquire()
        folder.mkdir(exist_ok=True)
    except Timeout as error:
        raise ValueError(f"{to} is being made by another process: wait for it, or name another folder.") from error
    except OSError as error:
        raise cannot_be_made(to, error) from error
    try:
        yield folder
    except BaseException as error:
        # A mistake in the texts or the settings is one again with the same command.
        if any(folder.glob("*.npz")) and not isinstance(error, ValueError):
            print(f"notice: finished work is kept in {folder}; the same command continues from it.", file=sys.stderr)
        else:
            _remove(folder)
        raise
    else:
        _remove(folder)
        _remove_others(to)
    finally:
        lock.release()


def _mark(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")


def _remove(folder: Path) -> None:
    with suppress(OSError):
        remove_files(folder, [file.name for file in folder.iterdir() if _FILE.fullmatch(file.name)])
    _mark(folder).unlink(missing_ok=True)


def _remove_others(to: Path) -> None:
    named = re.compile(rf"\.{re.escape(to.name)}\.[0-9a-f]{{12}}\.kept")
    for folder in [path for path in to.parent.iterdir() if named.fullmatch(path.name) and path.is_dir()]:
        try:
            with FileLock(_mark(folder), blocking=False):
                _remove(folder)
        except (Timeout, OSError):
            # Another process is at work with it, or it is another user's.
            continue
