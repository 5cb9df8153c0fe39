"""Files that a run could not write: one error for all libraries, which names the file and how to continue."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from nystrom.whole_files import NotWritten


@contextmanager
def written(path: Path, remedy: str) -> Iterator[None]:
    """Convert any failure to write a file to one kind of error.

    Args:
        path: The file or folder.
        remedy: What to do once it can be written.

    Raises:
        NotWritten: The system, torch or safetensors could not write it.
    """
    try:
        yield
    # torch raises RuntimeError when the disk is full.
    except (OSError, SafetensorError, RuntimeError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error).splitlines()[0]
        name = error.filename if isinstance(error, NotWritten) and error.filename else path
        raise NotWritten(f"{name} cannot be written ({why}): make room for it, then {remedy}.") from error
