"""The IMDB reviews of Maas et al. (2011) as they are published: the folder aclImdb, or its archive.

A review is a file such as train/pos/0_9.txt, named by its number and its stars. There are 12,500 in each of train/neg,
train/pos, test/neg and test/pos. Reviews come in the order of class and number, from the folder and from the archive.
The 50,000 of train/unsup have no classes and are skipped, unless the caller wants them. The archive is read as a
stream and nothing is unpacked to disk.

Source: https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz
"""

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

from nystrom.input_files import read_input
from nystrom.progress import Progress
from nystrom.sums import sha256
from nystrom_lab.data.sources.source import LabelledRow, Source
from nystrom_lab.data.sources.unpacking import members_of
from nystrom_lab.data.store.prepared_folder import sha256_of_files

IMDB_COUNTS = {"train": 25_000, "test": 25_000}
PARTS = tuple(f"{split}/{label}" for split in IMDB_COUNTS for label in ("neg", "pos"))
UNLABELLED = "train/unsup"
REVIEW = re.compile(r"(\d{1,9})_\d+\.txt")
ARCHIVES = (".tar.gz", ".tgz", ".tar")
ARCHIVE, FOLDER = "aclImdb_v1.tar.gz", "aclImdb"


def is_acl_imdb(folder: Path) -> bool:
    """Whether a folder is aclImdb, or a part of it."""
    return any((folder / part).is_dir() for part in PARTS)


def find_imdb(source: Path, *, unlabelled: bool = False) -> Source | None:
    """The reviews of the archive, of the folder, or of the folder in a folder; None if they are not there.

    Args:
        unlabelled: Also read the reviews without classes, where they are there.

    Raises:
        ValueError: A part is missing, or holds a file that is not a review.
    """
    if source.is_file() and source.name.lower().endswith(ARCHIVES):
        parts = (*PARTS, UNLABELLED) if unlabelled else PARTS
        return _source("aclImdb, archive", lambda: sha256(source), lambda: _members(source, parts))
    folders = [folder for folder in (source, source / FOLDER) if is_acl_imdb(folder)]
    return _of_folder(folders[0], unlabelled) if folders else None


def _of_folder(folder: Path, unlabelled: bool) -> Source:
    if missing := [part for part in PARTS if not (folder / part).is_dir()]:
        raise ValueError(f"{folder} lacks {', '.join(missing)}: unpack {ARCHIVE} again, or name the archive.")
    parts = (*PARTS, UNLABELLED) if unlabelled and (folder / UNLABELLED).is_dir() else PARTS
    paths = [path for part in parts for path in _reviews(folder / part)]

    def rows() -> Iterator[LabelledRow]:
        for path in Progress(folder.name, len(paths), unit="files").over(paths):
            yield _row(str(path), path.parent.parent.name, path.parent.name, path.name, read_input(path))

    return _source("aclImdb, folder", lambda: sha256_of_files(folder, paths), rows)


def _source(kind: str, digest: Callable[[], str], rows: Callable[[], Iterator[LabelledRow]]) -> Source:
    return Source(
        kind,
        lambda: {"source_sha256": digest()},
        ("train", "test"),
        rows,
        published=IMDB_COUNTS,
        equal_classes=True,
        val_is_test=True,
    )


def _reviews(folder: Path) -> list[Path]:
    names = [name for name in os.listdir(folder) if not name.startswith(".")]
    for name in names:
        _number(str(folder / name), name)
    return [folder / name for name in sorted(names)]


def _number(place: str, name: str) -> int:
    if not (match := REVIEW.fullmatch(name)):
        raise ValueError(
            f"{place} is not a review: their names are NUMBER_STARS.txt. Name a folder without it, or the archive."
        )
    return int(match[1])


def _row(place: str, split: str, label: str, name: str, text: bytes) -> LabelledRow:
    # All of neg before all of pos, each by number.
    rank = _number(place, name) + (10**9 if label == "pos" else 0)
    return LabelledRow(place, split, label, (text,), rank)


def _members(archive: Path, parts: tuple[str, ...]) -> Iterator[LabelledRow]:
    seen: set[str] = set()
    for member, read in members_of(archive):
        path = PurePosixPath(member.name)
        place = f"{archive}, {member.name}"
        if path.is_absolute() or ".." in path.parts:
            raise ValueError(f"{place} is outside the archive's folder: this is not the published archive.")
        *_, split, label, name = ("", "", *path.parts)
        if f"{split}/{label}" not in parts or member.isdir() or name.startswith("."):
            continue
        if not member.isfile():
            raise ValueError(f"{place} is a link: this is not the published archive.")
        if f"{split}/{label}/{name}" in seen:
            raise ValueError(f"{place} is in the archive twice: this is not the published archive.")
        seen.add(f"{split}/{label}/{name}")
        yield _row(place, split, label, name, read())
