"""SHA-256 of files and folders."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from nystrom.progress import Progress
from nystrom.sums import sha256


def sha256_of_splits(files: Mapping[str, Path], *, progress: bool = False) -> dict[str, str]:
    """Hash the file of each split.

    Args:
        files: File of each split.
        progress: Say how far it is.

    Raises:
        ValueError: Two splits have the same file, or files with the same content.
    """
    known: dict[str, str] = {}
    for split, path in Progress("checksums", len(files), unit="files", shown=progress).over(files.items()):
        if (same := known.setdefault(sha256(path), split)) != split:
            raise ValueError(
                f"{files[same]} and {path} are the same file, so {same} and {split} would hold the same samples: put"
                " the right one in place, or leave one out where a split may be missing."
            )
    return {split: digest for digest, split in known.items()}


def sha256_of_files(folder: Path, paths: Sequence[Path], *, progress: bool = False) -> str:
    """Digest the names, within a folder, and the contents of files, and say how far it is."""
    digest = hashlib.sha256()
    what = f"{folder.name}, checksums"
    for path in Progress(what, len(paths), unit="files", shown=progress).over(paths):
        digest.update(f"{path.relative_to(folder).as_posix()}\n{path.stat().st_size}\n".encode())
        with path.open("rb", buffering=0) as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()
