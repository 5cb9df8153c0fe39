"""Files that a run could not write: one error that names the file and the way on, whatever library failed."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError


class NotWritten(OSError):
    """A file that could not be written, on a full disk for example; names it and says how to go on."""


@contextmanager
def written(path: Path, way_on: str) -> Iterator[None]:
    """Raise what keeps a file from being written as one kind of error.

    Args:
        path: The file or folder.
        way_on: What to do once it can be written.

    Raises:
        NotWritten: The system, torch or safetensors could not write it.
    """
    try:
        yield
    # torch raises RuntimeError where the disk is full.
    except (OSError, SafetensorError, RuntimeError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error).splitlines()[0]
        raise NotWritten(f"{path} cannot be written ({why}): make room for it, then {way_on}.") from error
