"""Which file holds which split, by the names that GLUE, Hugging Face and users give to files.

    train.tsv   dev.tsv.xz   test.jsonl                    also valid, validation, val, eval
    dev_matched.tsv   validation_mismatched.parquet        MNLI; the matched split is "validation"
    train-00000-of-00002.parquet                           parts of one split, read in their order

A file by itself whose name says no split holds training texts. The splits of a folder that Hugging Face datasets saved
have the same names.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from nystrom_lab.data.sources.parquet import SUFFIX
from nystrom_lab.data.sources.row_files import is_row_file, plain_name
from nystrom_lab.data.sources.saved_arrow import SavedPart, saved_parts
from nystrom_lab.data.sources.split_files import SPLIT_NAMES, endings

SPLITS = ("train", "validation", "validation_mismatched", "test", "test_mismatched")
_PART = re.compile(r"-\d+-of-\d+$")
_WORDS = {"train": "train", "val": "validation", "test": "test"}


def split_of_file(path: Path) -> str | None:
    """The split that a file's name says; None where it says none."""
    return _split_of(_PART.sub("", Path(plain_name(path)).stem.lower()))


def saved_splits(folder: Path) -> tuple[dict[str, SavedPart], list[str]]:
    """Find the splits of a folder that Hugging Face datasets saved, in the order of `SPLITS`.

    Returns:
        The splits, and the names of those that say none, such as unsupervised.

    Raises:
        ValueError: The folder cannot be read, holds no split, or two that are the same.
    """
    found: dict[str, SavedPart] = {}
    over: list[str] = []
    for name, part in saved_parts(folder).items():
        split = _split_of(name.lower())
        if split is None:
            over.append(name)
        elif split in found:
            raise ValueError(f"{found[split]} and {part} are both {split}: save one of them.")
        else:
            found[split] = part
    if not found:
        raise ValueError(
            f"{folder} holds the splits {', '.join(over)}, and none of them is train, validation or test: save it with "
            "these names."
        )
    return {split: found[split] for split in SPLITS if split in found}, over


def _split_of(stem: str) -> str | None:
    words = re.split(r"[._-]", stem)
    mismatched = words[-1] == "mismatched"
    if words[-1] in ("matched", "mismatched"):
        words.pop()
    split = SPLIT_NAMES.get(words[-1]) if words else None
    if split is None:
        return None
    name = f"{_WORDS[split]}_mismatched" if mismatched else _WORDS[split]
    return name if name in SPLITS else None


def files_of_splits(data: Sequence[Path], *, strict: bool) -> tuple[dict[str, list[Path]], list[Path]]:
    """Find the files of each split.

    Args:
        data: A folder, or one or several files.
        strict: Whether each file of rows in a folder must say a split; otherwise those that do not are passed over.

    Returns:
        The files of each split, in the order of `SPLITS`, and those that were passed over.

    Raises:
        ValueError: A file or folder is not there, of no kind that is read, or says no split; or two files are the same
            split without being parts of it.
    """
    if not data:
        raise ValueError("data is missing: name a folder, or files, with --data.")
    paths, over = list(data), []
    for path in paths:
        if not path.exists():
            raise ValueError(f"data is {path}, and there is no such file or folder.")
    folders = [path for path in paths if path.is_dir()]
    if folders:
        if len(paths) > 1:
            raise ValueError(f"data names {len(paths)} things, one of them the folder {folders[0]}: name it alone.")
        paths = [path for path in sorted(folders[0].iterdir()) if path.is_file() and _is_read(path)]
    found: dict[str, list[Path]] = {}
    for path in paths:
        if not _is_read(path):
            raise ValueError(f"data is {path}, which is of no kind that is read: {endings()}, or {SUFFIX}.")
        split = split_of_file(path)
        if split is None and len(paths) == 1 and not folders:
            split = "train"
        if split is None and (strict or not folders):
            raise ValueError(
                f"{path} names no split: its name must end in train, dev (or val) or test, as in train{path.suffix}; "
                "a file by itself holds training texts, whatever its name."
            )
        if split is None:
            over.append(path)
        else:
            found.setdefault(split, []).append(path)
    for split, files in found.items():
        if len(files) > 1 and not all(_PART.search(Path(plain_name(file)).stem) for file in files):
            raise ValueError(f"{files[0]} and {files[1]} are both {split}: name a folder that has one of them.")
    if not found:
        raise ValueError(
            f"{', '.join(map(str, data))} holds no file of a split: expected train, dev and test as in GLUE's folders, "
            f"ending in {endings()}, or {SUFFIX}."
        )
    return {split: found[split] for split in SPLITS if split in found}, over


def _is_read(path: Path) -> bool:
    return not path.name.startswith(".") and (is_row_file(path) or path.suffix.lower() == SUFFIX)
