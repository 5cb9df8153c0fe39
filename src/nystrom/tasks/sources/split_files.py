"""Sources of labelled texts that any user may hold: files of rows, and folders that Hugging Face datasets saved.

A single file of rows holds training texts. In a folder of them the name says the split: it is, or ends in, train;
val, valid, validation, dev or eval; test. `row_files` reads them. A folder that `Dataset.save_to_disk` or
`DatasetDict.save_to_disk` wrote is read by the package datasets, where that is installed.

A test split without labels, such as those of GLUE, is left out; then the validation split is the test, if there is
one, and validation texts are drawn from the training texts.
"""

import importlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from nystrom.tasks.sources.row_files import (
    COMPRESSED,
    PLAIN,
    Wanted,
    as_bytes,
    find_names,
    is_row_file,
    lacks_field,
    plain_name,
    read_fields,
)
from nystrom.tasks.sources.source import LabelledSample, Source
from nystrom.tasks.store.checksums import sha256_of_files, sha256_of_splits
from nystrom.tasks.store.header import SPLITS

Rows = TypeVar("Rows")

SPLIT_NAMES = {"train": "train", "val": "val", "valid": "val", "validation": "val", "dev": "val", "eval": "val"}
SPLIT_NAMES |= {"test": "test"}
SAVED = ("dataset_dict.json", "state.json")
AT_ONCE = 1000


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


def is_saved_dataset(folder: Path) -> bool:
    """Whether `save_to_disk` of the package datasets wrote a folder."""
    return any((folder / name).is_file() for name in SAVED)


def load_saved(folder: Path) -> Any:
    """Open a folder that `save_to_disk` wrote: its rows, or the rows of each split.

    Raises:
        ValueError: The package datasets is not installed, or cannot read the folder.
    """
    try:
        library: Any = importlib.import_module("datasets")
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{folder} was saved by Hugging Face datasets, which is not installed: pip install datasets, or save each"
            " split with its to_json as train.jsonl, val.jsonl and test.jsonl and name their folder."
        ) from error
    try:
        return library.load_from_disk(str(folder))
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{folder} cannot be read by datasets ({error}): save it again.") from error


def saved_source(folder: Path, wanted: Wanted, *, progress: bool = False) -> Source:
    """Make a source of a folder that `save_to_disk` wrote; splits of other names, such as unsupervised, are left out.

    Raises:
        ValueError: The package datasets is not installed, or cannot read the folder.
    """
    loaded = load_saved(folder)
    parts = dict(loaded) if hasattr(loaded, "keys") else {"train": loaded}
    known: dict[str, str] = {}
    for name in parts:
        if (split := SPLIT_NAMES.get(name)) is not None:
            if split in known:
                raise ValueError(f"{folder} has {known[split]} and {name}, which are both {split}: save one of them.")
            known[split] = name
    left_out = sorted({*parts} - {*known.values()})
    remarks = (f"splits left out: {', '.join(left_out)}",) if left_out else ()
    if "test" in known and len(known) > 1 and _is_unlabelled(parts[known["test"]], wanted):
        known, more = _without_test(known)
        remarks += more
    splits = tuple(split for split in SPLITS if split in known)

    def rows(progress: bool) -> Iterator[LabelledSample]:
        for split in splits:
            part = parts[known[split]]
            place = f"{folder}, {known[split]}"
            try:
                fields = find_names(part.column_names, wanted)
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from error
            # A feature with names for its numbers keeps them as the classes.
            label_names = getattr(part.features[fields[0]], "names", None)
            bar = tqdm(total=len(part), desc=known[split], unit=" rows", disable=not progress or None)
            with bar:
                number = 0
                for batch in part.iter(batch_size=AT_ONCE):
                    for values in zip(*(batch[field] for field in fields), strict=True):
                        number += 1
                        yield _saved_row(f"{place}, row {number}", split, values, fields, label_names)
                        bar.update()

    paths = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("cache-"))
    settings = {"source_sha256": sha256_of_files(folder, paths, progress=progress)}
    settings |= {option: " or ".join(names) for option, names in wanted.items()}
    return Source(kind="Hugging Face datasets", settings=settings, splits=splits, rows=rows, remarks=remarks)


def _is_unlabelled(part: Any, wanted: Wanted) -> bool:
    """Whether a saved split has no labels: none at all, or -1, which no class has, in its first row."""
    option, names = next(iter(wanted.items()))
    try:
        (field,) = find_names(part.column_names, {option: names})
    except ValueError:
        return True
    first = next(iter(part.iter(batch_size=1)), {field: [0]})
    return hasattr(part.features[field], "names") and first[field] == [-1]


def _saved_row(
    place: str, split: str, values: Sequence[object], fields: Sequence[str], label_names: Sequence[str] | None
) -> LabelledSample:
    label, *texts = values
    if label_names is not None:
        if not isinstance(label, int) or not 0 <= label < len(label_names):
            raise ValueError(f"{place}: the label is {label}, which has no name: it marks a text without a label.")
        label = label_names[label]
    try:
        label, *texts = (as_bytes(value, field) for value, field in zip([label, *texts], fields, strict=True))
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error
    return LabelledSample(place, split, label, tuple(texts))


def endings() -> str:
    """The endings of files that are read, for messages."""
    return f"{', '.join(PLAIN)}, each also with {' or '.join(COMPRESSED)}"
