"""One grid at a time in a folder."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from nystrom.measure.rows import check_folder


@contextmanager
def alone(to: Path) -> Iterator[None]:
    """Lock the folder, so that two grids do not write the same runs; the system unlocks it when the process ends.

    Raises:
        ValueError: The folder cannot be written, or another grid has it.
    """
    check_folder(to)
    lock = FileLock(to / ".lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise ValueError(f"{to} is in use by another `nystrom lra run`: wait for it, or take another folder.") from None
    try:
        yield
    finally:
        lock.release()
