"""Splits of users' labelled texts, and their rows; used by all tasks.

    train.tsv   dev.tsv.xz   test.jsonl                    also valid, validation, val, eval
    dev_matched.tsv   validation_mismatched.parquet        MNLI; the matched split is "validation"
    train-00000-of-00002.parquet                           parts of one split, read in their order

A name is, or ends in, that of its split. A file by itself whose name says none holds training texts. The splits of a
folder that Hugging Face datasets saved have the same names.

`row_files` reads the rows. Fine-tuning keeps them as words in memory
(`nystrom_lab.data.language.labelled`); the arena's tasks write them to disk as bytes, from a `labelled_source`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from nystrom_lab.data.sources.arrow_files import (
    SavedPart,
    arrow_fields,
    files_of_saved,
    find_columns,
    is_saved_dataset,
    saved_parts,
)
from nystrom_lab.data.sources.row_files import (
    RowsPart,
    endings,
    is_row_file,
    lacks_field,
    place_of,
    plain_name,
    read_fields,
)
from nystrom_lab.data.sources.source import LabelledSample, Source, Wanted
from nystrom_lab.data.store.prepared_folder import sha256_of_files, sha256_of_splits
from nystrom_lab.data.store.token_files import SPLITS as OF_ARENA

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
    found, over = _saved(data[0]) if len(data) == 1 and is_saved_dataset(data[0]) else _files(data, strict)
    return {split: found[split] for split in SPLITS if split in found}, over


def _saved(folder: Path) -> tuple[dict[str, list[RowsPart]], list[str]]:
    found: dict[str, list[RowsPart]] = {}
    over: list[str] = []
    for name, part in saved_parts(folder).items():
        split = split_of(name)
        if split is None:
            over.append(name)
        elif split in found:
            raise ValueError(f"{found[split][0]} and {part} are both {split}: save one of them.")
        else:
            found[split] = [part]
    if not found:
        raise ValueError(
            f"{folder} holds the splits {', '.join(over)}, and none of them is train, validation or test: save it with "
            "these names."
        )
    return found, over


def _files(data: Sequence[Path], strict: bool) -> tuple[dict[str, list[RowsPart]], list[str]]:
    if not data:
        raise ValueError("data is missing: name a folder, or files, with --data.")
    for path in data:
        if not path.exists():
            raise ValueError(f"data is {path}, which does not exist.")
    folders = [path for path in data if path.is_dir()]
    if folders and len(data) > 1:
        raise ValueError(f"data names {len(data)} things, one of them the folder {folders[0]}: name it alone.")
    found: dict[str, list[RowsPart]] = {}
    over: list[str] = []
    for path in _files_in(folders[0]) if folders else data:
        if not _is_read(path):
            raise ValueError(f"data is {path}, which has an unsupported format: {endings()}.")
        split = split_of(Path(plain_name(path)).stem)
        if split is None and len(data) == 1 and not folders:
            split = "train"
        if split is not None:
            found.setdefault(split, []).append(path)
        elif strict or not folders:
            raise ValueError(
                f"{path} names no split: its name must end in train, val or test (or dev), as in train{path.suffix}; a "
                "file by itself holds training texts, whatever its name."
            )
        else:
            over.append(path.name)
    for split, files in found.items():
        if len(files) > 1 and not all(_PART.search(Path(plain_name(Path(str(file)))).stem) for file in files):
            raise ValueError(f"{files[0]} and {files[1]} are both {split}: name a folder that has one of them.")
    if not found:
        raise ValueError(
            f"{', '.join(map(str, data))} holds no file of a split: expected train, dev and test as in GLUE's folders, "
            f"ending in {endings()}."
        )
    return found, over


def _files_in(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.iterdir()) if path.is_file() and _is_read(path)]


def _is_read(path: Path) -> bool:
    return not path.name.startswith(".") and is_row_file(path)


def own_source(source: Path, wanted: Wanted) -> Source | None:
    """A user's own file or folder as a source; None if it holds nothing readable.

    Args:
        source: A file of rows, a folder of them, or one that Hugging Face datasets saved.
        wanted: The fields: the label, then the texts.

    Raises:
        ValueError: Splits cannot be told apart; see `find_splits`.
    """
    if source.is_file() and _is_read(source):
        # Whatever its name: it is named alone.
        return labelled_source({"train": [source]}, wanted, kind="a file of rows")
    if not source.is_dir() or not (is_saved_dataset(source) or _files_in(source)):
        return None
    kind = "Hugging Face datasets" if is_saved_dataset(source) else "files of rows"
    parts, over = find_splits([source], strict=True)
    over += [split for split in parts if split.endswith("_mismatched")]
    named = {split.replace("validation", "val"): files for split, files in parts.items()}
    found = {split: named[split] for split in OF_ARENA if split in named}
    remarks = (f"splits left out: {', '.join(sorted(over))}",) if over else ()
    return labelled_source(found, wanted, kind=kind, remarks=remarks)


def labelled_source(
    parts: Mapping[str, Sequence[RowsPart]],
    wanted: Wanted,
    *,
    kind: str,
    columns: Sequence[str] | None = None,
    remarks: tuple[str, ...] = (),
) -> Source:
    """Make a source of the parts of each split, train, val or test; the arguments are those of `Source`, `read_fields`.

    A test split without labels, such as those of GLUE, is left out; then the validation split is the test, if there is
    one, and validation texts are drawn from the training texts.

    Raises:
        ValueError: Two files are the same.
    """
    found = dict(parts)
    if columns is None and len(found) > 1 and "test" in found and _is_unlabelled(found["test"][0], wanted):
        remarks += (f"{_named(found.pop('test'))} has no labels and is left out",)
        if "val" in found:
            found["test"] = found.pop("val")
            remarks += (
                f"{_named(found['test'])} is the test split, and validation texts are drawn from the training texts",
            )
    settings = _sums(found)
    settings |= {option: " or ".join(names) for option, names in wanted.items()}

    def rows() -> Iterator[LabelledSample]:
        for split, of_split in found.items():
            empty = True
            for part in of_split:
                classes = part.classes.get(find_columns(part, wanted)[0]) if isinstance(part, SavedPart) else None
                for number, (label, *texts) in read_fields(part, wanted, columns=columns):
                    empty, place = False, place_of(part, number)
                    if classes is not None and label.decode() not in classes:
                        raise ValueError(
                            f"{place}: the label is {label.decode()}, which has no name: it marks a text without a "
                            "label."
                        )
                    yield LabelledSample(place, split, label, tuple(texts))
            if empty:
                name = _named(of_split)
                raise ValueError(
                    f"{name} holds no rows below its header: add texts, or fetch it again if it was cut off."
                )

    return Source(kind=kind, settings=settings, splits=tuple(found), rows=rows, remarks=remarks)


def _named(parts: Sequence[RowsPart]) -> str:
    return ", ".join(map(str, parts))


def _is_unlabelled(part: RowsPart, wanted: Wanted) -> bool:
    """Whether a test split has no labels: no such field, or, in a saved data set, -1 in its first row."""
    option, names = next(iter(wanted.items()))
    if lacks_field(part, names):
        return True
    if not isinstance(part, SavedPart):
        return False
    (field,) = find_columns(part, {option: names})
    _, (first,) = next(arrow_fields(part, {option: names}), (0, [b""]))
    return field in part.classes and first == b"-1"


def _sums(parts: Mapping[str, Sequence[RowsPart]]) -> dict[str, str]:
    """The SHA-256 of the input: of a saved folder as a whole, of files by split."""
    saved = [part for of_split in parts.values() for part in of_split if isinstance(part, SavedPart)]
    if saved:
        folder = saved[0].folder
        return {"source_sha256": sha256_of_files(folder, files_of_saved(folder))}
    files = {split: [part for part in of_split if isinstance(part, Path)] for split, of_split in parts.items()}
    single = {split: paths[0] for split, paths in files.items() if len(paths) == 1}
    sums = sha256_of_splits(single)
    sums |= {split: sha256_of_files(paths[0].parent, paths) for split, paths in files.items() if split not in single}
    return {f"{split}_sha256": sums[split] for split in files}
