"""Sources of labelled texts that any user may hold: files of rows, and folders that Hugging Face datasets saved.

A single file of rows holds training texts. In a folder of them the name says the split: it is, or ends in, train;
val, valid, validation, dev or eval; test. `row_files` reads them. A folder that `Dataset.save_to_disk` or
`DatasetDict.save_to_disk` wrote is read by `saved_arrow`.

A test split without labels, such as those of GLUE, is left out; then the validation split is the test, if there is
one, and validation texts are drawn from the training texts.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from tqdm import tqdm

from nystrom_lab.data.sources.row_files import (
    COMPRESSED,
    PLAIN,
    Wanted,
    is_row_file,
    lacks_field,
    plain_name,
    read_fields,
)
from nystrom_lab.data.sources.saved_arrow import SavedPart, saved_parts
from nystrom_lab.data.sources.source import LabelledSample, Source
from nystrom_lab.data.store.checksums import sha256_of_files, sha256_of_splits
from nystrom_lab.data.store.header import SPLITS

Rows = TypeVar("Rows")

SPLIT_NAMES = {"train": "train", "val": "val", "valid": "val", "validation": "val", "dev": "val", "eval": "val"}
SPLIT_NAMES |= {"test": "test"}


def split_of(name: str) -> str | None:
    """Give the split that a name says, as in train, basic_val or reviews.test."""
    return SPLIT_NAMES.get(re.split(r"[._-]", name.lower())[-1])


def row_source(
    files: Mapping[str, Path],
    wanted: Wanted,
    *,
    kind: str = "files of rows",
    columns: Sequence[str] | None = None,
    max_unpacked: float | None = None,
    progress: bool = False,
) -> Source:
    """Make a source of one file for each split.

    Args:
        files: File of each split.
        wanted: The fields: the label, then the texts; see `read_fields`.
        kind: What the files are, in words.
        columns: Names of the columns where the files have no header.
        max_unpacked: Gigabytes that a compressed file may unpack to; see `unpacking`.
        progress: Show a bar for checksums that take long.

    Raises:
        ValueError: Two files are the same.
    """
    remarks: tuple[str, ...] = ()
    if columns is None and len(files) > 1 and "test" in files:
        label = next(iter(wanted.values()))
        if lacks_field(files["test"], label, max_unpacked=max_unpacked):
            files, remarks = _without_test(files)
    digests = sha256_of_splits(files, progress=progress)

    def rows(progress: bool) -> Iterator[LabelledSample]:
        for split, path in files.items():
            empty = True
            for line, (label, *texts) in read_fields(
                path, wanted, columns=columns, max_unpacked=max_unpacked, progress=progress
            ):
                empty = False
                yield LabelledSample(f"{path}, line {line}", split, label, tuple(texts))
            if empty:
                raise ValueError(f"{path} holds no rows: it is cut short, fetch or make it again.")

    settings = {f"{split}_sha256": digest for split, digest in digests.items()}
    settings |= {option: " or ".join(names) for option, names in wanted.items()}
    return Source(kind=kind, settings=settings, splits=tuple(files), rows=rows, remarks=remarks)


def _without_test(parts: Mapping[str, Rows]) -> tuple[dict[str, Rows], tuple[str, ...]]:
    """Leave a test split without labels out, and take the validation split in its place."""
    kept = dict(parts)
    remarks = [f"{kept.pop('test')} has no labels and is left out"]
    if "val" in kept:
        kept["test"] = kept.pop("val")
        remarks.append(f"{kept['test']} is the test split, and validation texts are drawn from the training texts")
    return kept, tuple(remarks)


def files_of_folder(folder: Path) -> dict[str, Path]:
    """Find the file of each split in a folder; none where it holds no files of rows.

    Raises:
        ValueError: A file's name says no split, or two files are of the same.
    """
    files: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or not path.is_file() or not is_row_file(path):
            continue
        split = split_of(Path(plain_name(path)).stem)
        if split is None:
            raise ValueError(
                f"{path} names no split: its name must end in train, val or test (as in train{path.suffix}); name the"
                " file itself if it holds all texts, or a folder without it."
            )
        if split in files:
            raise ValueError(f"{files[split]} and {path} are both {split}: name a folder that has one of them.")
        files[split] = path
    return {split: files[split] for split in SPLITS if split in files}


def saved_source(folder: Path, wanted: Wanted, *, progress: bool = False) -> Source:
    """Make a source of a folder that `save_to_disk` wrote; splits of other names, such as unsupervised, are left out.

    Raises:
        ValueError: pyarrow is not installed, or cannot read the folder.
    """
    parts = saved_parts(folder)
    known: dict[str, SavedPart] = {}
    for name, part in parts.items():
        if (split := SPLIT_NAMES.get(name)) is not None:
            if split in known:
                raise ValueError(
                    f"{folder} has {known[split].split} and {name}, which are both {split}: save one of them."
                )
            known[split] = part
    left_out = sorted({*parts} - {part.split for part in known.values()})
    remarks = (f"splits left out: {', '.join(left_out)}",) if left_out else ()
    if "test" in known and len(known) > 1 and _is_unlabelled(known["test"], wanted):
        known, more = _without_test(known)
        remarks += more
    splits = tuple(split for split in SPLITS if split in known)

    def rows(progress: bool) -> Iterator[LabelledSample]:
        for split in splits:
            part = known[split]
            field, *_ = part.find(wanted)
            classes = part.classes.get(field)
            bar = tqdm(total=len(part), desc=part.split, unit=" rows", disable=not progress or None)
            with bar:
                for number, (label, *texts) in part.fields(wanted):
                    place = f"{part}, row {number}"
                    if classes is not None and label.decode() not in classes:
                        raise ValueError(
                            f"{place}: the label is {label.decode()}, which has no name: it marks a text without a "
                            "label."
                        )
                    yield LabelledSample(place, split, label, tuple(texts))
                    bar.update()

    paths = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("cache-"))
    settings = {"source_sha256": sha256_of_files(folder, paths, progress=progress)}
    settings |= {option: " or ".join(names) for option, names in wanted.items()}
    return Source(kind="Hugging Face datasets", settings=settings, splits=splits, rows=rows, remarks=remarks)


def _is_unlabelled(part: SavedPart, wanted: Wanted) -> bool:
    """Whether a saved split has no labels: none at all, or -1, which no class has, in its first row."""
    option, names = next(iter(wanted.items()))
    try:
        (field,) = part.find({option: names})
    except ValueError:
        return True
    _, (first,) = next(part.fields({option: names}), (0, [b""]))
    return field in part.classes and first == b"-1"


def endings() -> str:
    """The endings of files that are read, for messages."""
    return f"{', '.join(PLAIN)}, each also with {' or '.join(COMPRESSED)}"
