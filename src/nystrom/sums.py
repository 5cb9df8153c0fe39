"""Sizes and SHA-256 sums of the files of a folder, in its `complete.json`: written last, and checked before use."""

import hashlib
import json
from pathlib import Path

from nystrom.whole_files import write_whole

SUMS = "complete.json"


def sha256(path: Path) -> str:
    """The SHA-256 sum of a file's content."""
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_sums(folder: Path, *others: str) -> None:
    """Record the files of a folder.

    Args:
        folder: The folder; all its files must be complete.
        *others: Further files, by their path from the folder, such as "../run.json".
    """
    # The card is for readers, who may edit it.
    names = [file.name for file in sorted(folder.iterdir()) if file.is_file() and file.name not in (SUMS, "README.md")]
    content = {name: [(folder / name).stat().st_size, sha256(folder / name)] for name in (*names, *others)}
    write_whole(folder / SUMS, json.dumps(content, indent=1) + "\n")


def find_fault(folder: Path) -> str:
    """What is wrong with the recorded files of a folder; "" if they are unchanged."""
    try:
        written = json.loads((folder / SUMS).read_text(encoding="utf-8"))
        for name, entry in written.items():
            # Earlier versions wrote only sizes.
            size, digest = (entry, None) if isinstance(entry, int) else entry
            if (folder / name).stat().st_size != size or digest not in (None, sha256(folder / name)):
                return (
                    f"{name} is not the file that this folder was written with" if "/" in name else f"{name} is damaged"
                )
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (ValueError, TypeError, AttributeError):
        return f"{SUMS} is damaged"
    return "" if written else f"{SUMS} is empty"


def check_sums(folder: Path) -> None:
    """Check the recorded files of a folder; a folder without a record, as from older versions, passes.

    Raises:
        ValueError: A file was changed or is missing.
    """
    if (folder / SUMS).is_file() and (fault := find_fault(folder)):
        raise ValueError(
            f"model {folder}: {fault}. Restore it from a copy, or train it again; if you changed it yourself, remove "
            f"{folder / SUMS}."
        )
