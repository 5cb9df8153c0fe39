"""One command at a time in a folder."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from nystrom.whole_files import check_folder


@contextmanager
def alone(to: Path, command: str, seconds: float = 0) -> Iterator[None]:
    """Lock the folder, so that two commands do not write the same runs or rows; the lock ends with the process.

    Args:
        to: The folder; created if missing.
        command: The command that works there, for the message.
        seconds: How long to wait for another one.

    Raises:
        ValueError: The folder cannot be written, or another process has locked it.
    """
    check_folder(to)
    lock = FileLock(to / ".lock", timeout=seconds)
    try:
        lock.acquire()
    except Timeout:
        raise ValueError(f"{to} is in use by another {command}: wait for it, or choose another folder.") from None
    try:
        yield
    finally:
        lock.release()
