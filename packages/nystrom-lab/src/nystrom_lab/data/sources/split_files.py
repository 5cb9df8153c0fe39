"""Splits of users' labelled texts, and their rows; used by all tasks.

    train.tsv   dev.tsv.xz   test.jsonl                    also valid, validation, val, eval
    dev_matched.tsv   validation_mismatched.parquet        MNLI; the matched split is "validation"
    train-00000-of-00002.parquet                           parts of one split, read in their order

A name is, or ends in, that of its split. A file by itself whose name says none holds training texts. The splits of a
folder that Hugging Face datasets saved have the same names.

`labelled_files` reads their rows.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from nystrom_lab.data.sources.arrow_files import is_saved_dataset, saved_parts
from nystrom_lab.data.sources.row_files import RowsPart, endings, is_row_file, plain_name

SPLITS = ("train", "validation", "validation_mismatched", "test", "test_mismatched")
_NAMES = {"train": "train", "test": "test"} | dict.fromkeys(("val", "valid", "validation", "dev", "eval"), "validation")
_PART = re.compile(r"-\d+-of-\d+$")


def split_of(name: str) -> str | None:
    """The split that a name indicates, as in train, basic_val, reviews.test or dev_matched; None if there is none."""
    *_, last = words = re.split(r"[._-]", _PART.sub("", name.lower()))
    if last in ("matched", "mismatched"):
        split = _NAMES.get(words[-2]) if len(words) > 1 else None
        split = f"{split}_mismatched" if split and last == "mismatched" else split
    else:
        split = _NAMES.get(last)
    return split if split in SPLITS else None


def find_splits(data: Sequence[Path], *, strict: bool) -> tuple[dict[str, list[RowsPart]], list[str]]:
    """Find the parts of each split.

    Args:
        data: A folder of files of rows, or one that Hugging Face datasets saved; or one or several files.
        strict: Whether the name of each file of rows in a folder must indicate a split; otherwise such files are
            skipped.

    Returns:
        The parts of each split, in the order of `SPLITS`, and the names of those that indicate none.

    Raises:
        ValueError: A file or folder does not exist, cannot be read, has an unsupported format, or indicates no split;
            or two are the same split without being parts of it.
    """
    parts, over = _saved(data[0]) if len(data) == 1 and is_saved_dataset(data[0]) else _files(data, strict)
    return {split: parts[split] for split in SPLITS if split in parts}, over


def _saved(folder: Path) -> tuple[dict[str, list[RowsPart]], list[str]]:
    parts: dict[str, list[RowsPart]] = {}
    over: list[str] = []
    for name, part in saved_parts(folder).items():
        split = split_of(name)
        if split is None:
            over.append(name)
        elif split in parts:
            raise ValueError(f"{parts[split][0]} and {part} are both {split}: save one of them.")
        else:
            parts[split] = [part]
    if not parts:
        raise ValueError(
            f"{folder} holds the splits {', '.join(over)}, and none of them is train, validation or test: save it with "
            "these names."
        )
    return parts, over


def _files(data: Sequence[Path], strict: bool) -> tuple[dict[str, list[RowsPart]], list[str]]:
    if not data:
        raise ValueError("data is missing: name a folder, or files, with --data.")
    for path in data:
        if not path.exists():
            raise ValueError(f"data is {path}, which does not exist.")
    folders = [path for path in data if path.is_dir()]
    if folders and len(data) > 1:
        raise ValueError(f"data names {len(data)} things, one of them the folder {folders[0]}: name it alone.")
    parts: dict[str, list[RowsPart]] = {}
    over: list[str] = []
    for path in files_in(folders[0]) if folders else data:
        if not is_read(path):
            raise ValueError(f"data is {path}, which has an unsupported format: {endings()}.")
        split = split_of(Path(plain_name(path)).stem)
        if split is None and len(data) == 1 and not folders:
            split = "train"
        if split is not None:
            parts.setdefault(split, []).append(path)
        elif strict or not folders:
            raise ValueError(
                f"{path} names no split: its name must end in train, val or test (or dev), as in train{path.suffix}; a "
                "file by itself holds training texts, whatever its name."
            )
        else:
            over.append(path.name)
    for split, files in parts.items():
        if len(files) > 1 and not all(_PART.search(Path(plain_name(Path(str(file)))).stem) for file in files):
            raise ValueError(f"{files[0]} and {files[1]} are both {split}: name a folder that has one of them.")
    if not parts:
        raise ValueError(
            f"{', '.join(map(str, data))} holds no file of a split: expected train, dev and test as in GLUE's folders, "
            f"ending in {endings()}."
        )
    return parts, over


def files_in(folder: Path) -> list[Path]:
    """The files of rows in a folder, in the order of their names."""
    return [path for path in sorted(folder.iterdir()) if path.is_file() and is_read(path)]


def is_read(path: Path) -> bool:
    """Whether a file is not hidden and holds rows, judging by its name."""
    return not path.name.startswith(".") and is_row_file(path)
