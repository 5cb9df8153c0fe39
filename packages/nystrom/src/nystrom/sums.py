"""Sizes and SHA-256 sums of the files of a folder, in its `complete.json`: written last, and checked before use."""

import hashlib
from pathlib import Path

from nystrom.input_files import open_input, read_input
from nystrom.json_files import parse_json

SUMS, CARD = "complete.json", "README.md"


def sha256(path: Path) -> str:
    """The SHA-256 sum of a file's content."""
    with open_input(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_sums(folder: Path) -> dict[str, tuple[int, str | None]]:
    """The recorded size and sum of each file; earlier versions wrote only sizes.

    Raises:
        OSError: There is no record.
        ValueError: It is damaged.
    """
    try:
        written = parse_json(read_input(folder / SUMS))
        return {name: (size, None) if isinstance(size, int) else (size[0], size[1]) for name, size in written.items()}
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise ValueError(f"{SUMS} is damaged") from error


def find_fault(folder: Path, *, of: Path | None = None, besides: tuple[str, ...] = ()) -> str:
    """The fault of the recorded files of a folder; "" if they are unchanged.

    Files outside of it, which a record of an earlier version may list, are left out, and names that end in one of
    `besides`.

    Args:
        of: The folder with the record, of which this one is a copy; None for itself.
    """
    try:
        written = read_sums(of or folder)
        for name, (size, digest) in written.items():
            if name.startswith("../") or name.endswith(besides):
                continue
            if (folder / name).stat().st_size != size or digest not in (None, sha256(folder / name)):
                return f"{name} is damaged"
    except (FileNotFoundError, NotADirectoryError) as error:
        return f"{Path(error.filename).name} is missing"
    except ValueError as error:
        return str(error)
    return "" if written else f"{SUMS} is empty"


def check_sums(folder: Path) -> None:
    """Raise ValueError if a recorded file of a folder was changed or is missing; one without a record passes."""
    if (folder / SUMS).is_file() and (fault := find_fault(folder)):
        raise ValueError(
            f"model {folder}: {fault}. Restore it from a copy, or train it again; if you changed it yourself, remove "
            f"{folder / SUMS}."
        )
