"""SHA-256 of files and folders, with a bar where it takes long."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm


def sha256(path: Path, *, progress: bool = False) -> str:
    """Digest the content of a file."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file, _bar(path.name, path.stat().st_size, progress) as bar:
        while piece := file.read(1 << 20):
            digest.update(piece)
            bar.update(len(piece))
    return digest.hexdigest()


def sha256_of_splits(files: Mapping[str, Path], *, progress: bool = False) -> dict[str, str]:
    """Digest the file of each split.

    Raises:
        ValueError: Two splits have the same file, or files of the same content.
    """
    digests = {split: sha256(path, progress=progress) for split, path in files.items()}
    for split, digest in digests.items():
        if (same := next(other for other, known in digests.items() if known == digest)) != split:
            raise ValueError(
                f"{files[same]} and {files[split]} are the same file, so {same} and {split} would hold the same"
                " samples: put the right one in place, or take one away where a split may be missing."
            )
    return digests


def sha256_of_files(folder: Path, paths: Sequence[Path], *, progress: bool = False) -> str:
    """Digest the names, within a folder, and the contents of files."""
    digest = hashlib.sha256()
    sizes = [path.stat().st_size for path in paths]
    with _bar(folder.name, sum(sizes), progress) as bar:
        for path, size in zip(paths, sizes, strict=True):
            digest.update(f"{path.relative_to(folder).as_posix()}\n{size}\n".encode())
            with path.open("rb", buffering=0) as file:
                while piece := file.read(1 << 20):
                    digest.update(piece)
            bar.update(size)
    return digest.hexdigest()


def _bar(name: str, size: int, progress: bool) -> "tqdm[Any]":
    return tqdm(total=size, desc=f"{name}, checksum", unit="B", unit_scale=True, delay=1, disable=not progress)
