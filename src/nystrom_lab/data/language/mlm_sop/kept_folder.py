"""The folder of finished work, which survives an interruption: the same command continues from it.

A data set `mlm` is built with the help of `.mlm.XXXXXXXXXXXX.kept` beside its place, where X is a hash of everything
that determines the data. It is locked while a process works with it. When the data set is complete it is removed, and
with it those of other settings for the same place.
"""

import hashlib
import json
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from nystrom_lab.data.store.header import DataSettings


@contextmanager
def kept_folder(to: Path, settings: DataSettings) -> Iterator[Path]:
    """Give the folder of finished work, which is removed when the block ends without an error.

    Raises:
        ValueError: It cannot be created, or another process is using it.
    """
    digest = hashlib.sha256(json.dumps(dict(settings), sort_keys=True).encode()).hexdigest()[:12]
    folder = to.parent / f".{to.name}.{digest}.kept"
    mark = folder.with_name(f"{folder.name}.lock")
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(mark, blocking=False)
        lock.acquire()
        folder.mkdir(exist_ok=True)
    except Timeout as error:
        raise ValueError(f"{to} is being made by another process: wait for it, or name another folder.") from error
    except OSError as error:
        raise ValueError(
            f"{to} cannot be made ({error.strerror}: {error.filename}): name a folder inside one you may write to."
        ) from error
    try:
        yield folder
    except BaseException as error:
        # A mistake in the texts or the settings is one again with the same command.
        if any(folder.glob("*.npz")) and not isinstance(error, ValueError):
            print(f"notice: finished work is kept in {folder}; the same command continues from it.", file=sys.stderr)
        else:
            shutil.rmtree(folder, ignore_errors=True)
            mark.unlink(missing_ok=True)
        raise
    else:
        shutil.rmtree(folder, ignore_errors=True)
        mark.unlink(missing_ok=True)
        _remove_others(to)
    finally:
        lock.release()


def _remove_others(to: Path) -> None:
    named = re.compile(rf"\.{re.escape(to.name)}\.[0-9a-f]{{12}}\.kept")
    for folder in [path for path in to.parent.iterdir() if named.fullmatch(path.name) and path.is_dir()]:
        mark = folder.with_name(f"{folder.name}.lock")
        try:
            with FileLock(mark, blocking=False):
                shutil.rmtree(folder, ignore_errors=True)
                mark.unlink(missing_ok=True)
        except (Timeout, OSError):
            # Another process is at work with it, or it is another user's.
            continue
