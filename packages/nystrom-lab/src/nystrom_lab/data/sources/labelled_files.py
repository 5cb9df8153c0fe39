"""Labelled texts in users' files: their rows, each with its place.

A label in a row that lacks one is an error that names the line, except in a test split in which all rows lack it: no
such column, or nothing, -1 or "hidden" in each row. `labels` decides the meaning of the labels. In the column
gold_label of SNLI and MultiNLI, "-" marks a pair on which the annotators did not agree: such rows are left out and
counted.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from nystrom_lab.data.sources.acl_imdb import find_imdb
from nystrom_lab.data.sources.arrow_files import SavedPart, files_of_saved, is_saved_dataset
from nystrom_lab.data.sources.columns import GOLD_LABEL, TextColumns, has_field
from nystrom_lab.data.sources.labels import HIDDEN
from nystrom_lab.data.sources.row_files import RowsPart, first_fields, lacks_field, place_of, read_fields
from nystrom_lab.data.sources.source import LabelledRow, Source
from nystrom_lab.data.sources.split_files import files_in, find_splits, is_read
from nystrom_lab.data.store.prepared_folder import sha256_of_files, sha256_of_splits

_SHOWN = 5


def find_labelled_texts(data: Sequence[Path], columns: TextColumns, *, strict: bool) -> Source:
    """The labelled texts of a folder, or of files; `strict` and the errors are those of `find_splits`."""
    if len(data) == 1 and (imdb := find_imdb(data[0])) is not None:
        return imdb
    parts, passed = find_splits(data, strict=strict)
    source = labelled_files(parts, columns)
    if passed:
        source.remarks.append(f"{', '.join(passed)} is not a split and is skipped")
    return source


def find_arena_texts(path: Path, columns: TextColumns) -> Source | None:
    """A user's file or folder with the splits train, val and test; None if it holds nothing readable.

    A test split without labels is left out; then the validation split is the test, if there is one, and validation
    texts are drawn from the training texts.

    Raises:
        ValueError: Splits cannot be told apart; see `find_splits`.
    """
    if path.is_file() and is_read(path):
        # Whatever its name: it is named alone.
        return labelled_files({"train": [path]}, columns, kind="a file of rows")
    if not path.is_dir() or not (is_saved_dataset(path) or files_in(path)):
        return None
    parts, over = find_splits([path], strict=True)
    remarks = []
    if over := [*over, *(split for split in parts if split.endswith("_mismatched"))]:
        remarks.append(f"splits left out: {', '.join(sorted(over))}")
    named = {"train": "train", "validation": "val", "test": "test"}
    parts = {named[split]: files for split, files in parts.items() if split in named}
    if len(parts) > 1 and "test" in parts and _is_unlabelled(parts["test"], columns):
        remarks.append(f"{_named(parts.pop('test'))} has no labels and is left out")
        if "val" in parts:
            parts["test"] = parts.pop("val")
            remarks.append(
                f"{_named(parts['test'])} is the test split, and validation texts are drawn from the training texts"
            )
    source = labelled_files(parts, columns, kind="Hugging Face datasets" if is_saved_dataset(path) else "files of rows")
    source.remarks.extend(remarks)
    return source


def labelled_files(
    parts: Mapping[str, Sequence[RowsPart]], columns: TextColumns, *, kind: str = "files of rows"
) -> Source:
    """Make a source of the parts of each split; `kind` says what they are."""
    unlabelled = tuple(
        split for split, files in parts.items() if split.startswith("test") and _is_unlabelled(files, columns)
    )
    remarks: list[str] = []

    def settings() -> Mapping[str, str]:
        named = {option: names[0] for option, names in columns.wanted(labelled=True).items() if len(names) == 1}
        return _sums(parts) | named

    def rows() -> Iterator[LabelledRow]:
        for split, files in parts.items():
            yield from _rows(split, files, columns, labelled=split not in unlabelled, remarks=remarks)

    return Source(
        kind=kind,
        settings=settings,
        splits=tuple(parts),
        rows=rows,
        unlabelled=unlabelled,
        classes=next((_classes(files[0], columns) for files in parts.values()), None),
        remarks=remarks,
    )


def read_cells(
    part: RowsPart, columns: TextColumns, *, labelled: bool, on_broken: Callable[[int], None] | None = None
) -> Iterator[tuple[int, list[bytes]]]:
    """The label, unless there is none, and the texts of each row; see `read_fields`."""
    wanted, header = columns.wanted(labelled=labelled), None
    if _is_headless(part, columns):
        header = columns.headless
        wanted = {option: [name for name in names if name in header] for option, names in wanted.items()}
    try:
        yield from read_fields(
            part,
            wanted,
            columns=header,
            may_be_longer=columns.longer_rows,
            on_broken=on_broken if columns.broken_rows else None,
            may_be_null="label_field",
        )
    except ValueError as error:
        # The one hint that the reader of files cannot give.
        hint = " This task is on pairs of texts." if columns.pairs is not None and "-field" in str(error) else ""
        raise ValueError(f"{error}{hint}") from error


def _rows(
    split: str, parts: Sequence[RowsPart], columns: TextColumns, *, labelled: bool, remarks: list[str]
) -> Iterator[LabelledRow]:
    """The rows of a split."""
    broken: list[int] = []
    disputed: list[int] = []
    missing, has_labels, has_rows = "", False, False
    # The rows of a test are numbered where they are scored: none may be missing.
    on_broken = None if split.startswith("test") else broken.append
    for part in parts:
        classes = _classes(part, columns)
        voted = labelled and GOLD_LABEL in columns.labels and has_field(first_fields(part), [GOLD_LABEL])
        for number, cells in read_cells(part, columns, labelled=labelled, on_broken=on_broken):
            has_rows, place = True, place_of(part, number)
            label = _label(cells.pop(0), place) if labelled else ""
            if voted and label == "-":
                disputed.append(number)
                continue
            if labelled:
                missing = missing or ("" if label else place)
                has_labels = has_labels or bool(label)
                if missing and has_labels:
                    raise ValueError(
                        f"{missing}: the label is missing, but other rows have one: add it, or leave the row out."
                    )
                if classes is not None and label and label not in classes:
                    raise ValueError(
                        f"{place}: the label is {label!r}, which has no name: it marks a text without a label."
                    )
            yield LabelledRow(place, split, label, tuple(cells))
    name = _named(parts)
    if missing:
        raise ValueError(f"{missing}: no row has a label: name another column with --label-field.")
    if disputed and not has_labels:
        raise ValueError(f"{name}: all {len(disputed)} labels are '-', so no row is left: name another file.")
    if not has_rows:
        raise ValueError(f"{name} holds no rows below its header: add texts, or fetch it again if it was cut off.")
    for lines, why in ((broken, "lack fields"), (disputed, "have the label '-', so the annotators did not agree,")):
        if lines:
            shown = ", ".join(map(str, lines[:_SHOWN]))
            remarks.append(f"{len(lines):,} rows of {name} {why} and are left out (line {shown})")


def _label(cell: bytes, place: str) -> str:
    try:
        return cell.decode("utf-8").strip()
    except UnicodeDecodeError as error:
        raise ValueError(f"{place}: the label {cell[:40]!r} is not UTF-8.") from error


def _classes(part: RowsPart, columns: TextColumns) -> tuple[str, ...] | None:
    """The classes that a saved data set names, in their order."""
    named = part.classes if isinstance(part, SavedPart) else {}
    return next((classes for column, classes in named.items() if has_field([column], columns.labels)), None)


def _is_unlabelled(parts: Sequence[RowsPart], columns: TextColumns) -> bool:
    """Whether a test split has no labels.

    Raises:
        ValueError: Some of its parts have labels.
    """
    lacking = [part for part in parts if lacks_field(part, columns.labels) and not _is_headless(part, columns)]
    if lacking and len(lacking) < len(parts):
        others = [part for part in parts if part not in lacking]
        raise ValueError(f"{others[0]} has labels and {lacking[0]} has none, but both are parts of one split.")
    if lacking:
        return True
    came = False
    for part in parts:
        for number, (label, *_) in read_cells(part, columns, labelled=True):
            if _label(label, place_of(part, number)) not in HIDDEN:
                return False
            came = True
    return came


def _is_headless(part: RowsPart, columns: TextColumns) -> bool:
    """Whether a file of a published data set has no header row."""
    wanted = columns.wanted(labelled=True).values()
    if not isinstance(part, Path) or not all(has_field(columns.headless, names) for names in wanted):
        return False
    fields = first_fields(part, columns.headless)
    enough = len(fields) >= len(columns.headless) if columns.longer_rows else len(fields) == len(columns.headless)
    return not fields or (enough and not has_field(fields, columns.texts))


def _named(parts: Sequence[RowsPart]) -> str:
    return ", ".join(map(str, parts))


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
