"""The splits for fine-tuning, derived from those that a user has.

- Train, validation and test are used as they come, if they come. The model chosen on validation is evaluated on test.
- For a test split without labels, such as GLUE's own, predictions are written. It becomes "submission".
- No validation split: it takes a tenth of the training texts, or `val_share`. If `val_share` is given although there is
  a validation split, and the test split has no labels, the validation split becomes the test.
- No training split but a validation split with labels, as for tasks whose training file is too large to keep: eight
  tenths of it become train, one validation, one test; where there is a test split with labels, nine and one. The result
  then is not that of the published split, and says so.

All draws use a fixed seed, so runs with any seed share their data; see `nystrom_lab.data.sources.held_out`. Equal
texts, or pairs, stay in the same split, so no training text is evaluated.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from nystrom_lab.data.language.labelled.glue import LabelledTask
from nystrom_lab.data.language.labelled.rows import decoded, spoilt_rows
from nystrom_lab.data.sources.held_out import SHARE, check_share, digest_of, hash_of, hold_out
from nystrom_lab.data.sources.labelled_files import find_labelled_texts
from nystrom_lab.data.sources.labels import LabelKind, check_known, counted, own_classes, to_float
from nystrom_lab.data.sources.source import Source

_SEED = 0


class TextSplit(NamedTuple):
    """The texts of a split, or the first of each pair, the second ones, and the labels: class indices or numbers."""

    texts: list[str]
    pairs: list[str] | None
    labels: list[int] | list[float] | None

    def rows(self) -> list[tuple[str, ...]]:
        """The texts, or the pairs."""
        return list(zip(self.texts, *(() if self.pairs is None else (self.pairs,)), strict=True))

    def taken(self, rows: Sequence[int]) -> "TextSplit":
        """Some of the rows."""
        return TextSplit(*([column[row] for row in rows] if column is not None else None for column in self))  # pyright: ignore[reportArgumentType]


@dataclass
class LabelledData:
    """The texts for a fine-tuning.

    Attributes:
        splits: "train" and "validation"; "test" if it has labels; "validation_mismatched" and "test_mismatched" (MNLI)
            likewise; "submission" and "submission_mismatched" for tests without labels.
        classes: Names of the classes; None for numbers.
        remarks: Notices for the user about the splits; a clause each.
        published: Whether all splits are the published ones.
    """

    splits: dict[str, TextSplit]
    classes: tuple[str, ...] | None
    remarks: list[str] = field(default_factory=list)
    published: bool = True

    def summary(self) -> str:
        """The sizes of the splits, and the classes with the rows of each in the splits that have labels."""
        sizes = ", ".join(f"{name} {len(split.texts):,}" for name, split in self.splits.items())
        if self.classes is None:
            return f"{sizes}; the labels are numbers."
        counts = Counter(label for split in self.splits.values() for label in split.labels or ())
        return f"{sizes}; {counted(self.classes, [counts[index] for index in range(len(self.classes))])}."

    def fingerprint(self) -> str:
        """A checksum of all texts and labels."""
        digest = hashlib.sha256()
        for name, split in self.splits.items():
            digest.update(f"{name} {len(split.texts)}\0".encode())
            for text in (*split.texts, *(split.pairs or ()), *map(str, split.labels or ())):
                digest.update(text.encode("utf-8", errors="surrogatepass") + b"\0")
        return digest.hexdigest()[:16]


def read_labelled(
    data: Sequence[Path],
    task: LabelledTask,
    *,
    own: bool = False,
    kind: LabelKind = "auto",
    val_share: float | None = None,
) -> LabelledData:
    """Read the splits of a task.

    Args:
        own: Whether the data are a user's own, whose labels define the classes.
        kind: Kind of the labels of own data; "auto" means numbers if any label is not an integer.
        val_share: Share of the training texts to hold out for validation.

    Raises:
        ValueError: Broken data, no training split, or labels outside the classes; the line is named.
    """
    check_share("val_share", SHARE if val_share is None else val_share)
    source = find_labelled_texts(data, task, strict=own)
    read = dict(_read(source, task, own=own))
    where = ", ".join(map(str, data))
    classes = _own_classes(source, read, kind) if own else task.classes
    splits: dict[str, TextSplit] = {}
    for name, rows in read.items():
        if rows.spoilt:
            source.remarks.append(spoilt_rows(f"{where}, {name}", rows.spoilt))
        labels = None if name in source.unlabelled else _labels(rows, task, classes)
        target = name.replace("test", "submission") if labels is None else name
        splits[target] = TextSplit(rows.texts, None if task.pairs is None else rows.pairs, labels)
    labelled = _complete(LabelledData(splits, classes, source.remarks), where, val_share)
    _check_apart(labelled, where)
    return labelled


@dataclass
class _Rows:
    """The rows of a split, and the place of the first row of each label."""

    texts: list[str] = field(default_factory=list)
    pairs: list[str] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    places: dict[str, str] = field(default_factory=dict)
    spoilt: list[int] = field(default_factory=list)


def _read(source: Source, task: LabelledTask, *, own: bool) -> Iterator[tuple[str, _Rows]]:
    """The rows of each split; those of a user need texts, where they are learned from or scored."""
    splits = {split: _Rows() for split in source.splits}
    for row in source.rows():
        rows = splits[row.split]
        if own and row.split not in source.unlabelled:
            row.check_texts()
        first, *second = decoded(row.texts, len(rows.texts), rows.spoilt)
        rows.texts.append(first)
        rows.pairs.extend(second)
        rows.labels.append(row.label)
        rows.places.setdefault(row.label, row.place)
    yield from splits.items()


def _own_classes(source: Source, read: Mapping[str, _Rows], kind: LabelKind) -> tuple[str, ...] | None:
    """The classes of a user's own data, in their order; None for numbers."""
    rows = read.get("train") or read.get("validation")
    if rows is None:
        return ()
    if source.classes is not None and kind != "numbers":
        return source.classes
    return own_classes(rows.places, rows=len(rows.texts), kind=kind)


def _labels(rows: _Rows, task: LabelledTask, classes: tuple[str, ...] | None) -> list[int] | list[float]:
    """Labels as class indices, or as numbers."""
    if classes is None:
        numbers = {label: to_float(label) for label in rows.places}
        if (wrong := next((label for label, number in numbers.items() if number is None), None)) is not None:
            raise ValueError(f"{rows.places[wrong]}: the label is {wrong!r}; expected a number.")
        return [numbers[label] or 0.0 for label in rows.labels]
    indices = {name: index for index, name in enumerate(classes)}
    if task.classes is not None:
        indices |= {str(index): index for index in range(len(classes))}
        indices |= {word: indices[name] for word, name in task.spellings.items()}
    check_known(rows.places, indices)
    return [indices[label] for label in rows.labels]


def _complete(labelled: LabelledData, where: str, val_share: float | None) -> LabelledData:
    """Create missing splits."""
    splits, remarks = dict(labelled.splits), list(labelled.remarks)
    if "train" not in splits:
        if "validation" not in splits:
            raise ValueError(
                f"{where} has no training split: expected a file named train, or a labelled one named dev, which is "
                "then split."
            )
        whole, shares = splits.pop("validation"), {"validation": val_share or SHARE}
        if "test" not in splits:
            shares["test"] = SHARE
        splits |= _drawn(whole, shares, where)
        counted = ", ".join(f"{name} {len(splits[name].texts):,}" for name in ("train", *shares))
        remarks.append(
            f"{where} has no training split: its {len(whole.texts):,} rows for validation become {counted}, which is "
            "not the published split"
        )
        return replace(labelled, splits=_ordered(splits), remarks=remarks, published=False)
    if "validation" in splits and val_share is None:
        return replace(labelled, splits=_ordered(splits))
    if "validation" in splits:
        if "test" in splits:
            raise ValueError(
                f"val_share is {val_share}, but {where} has validation and test with labels: leave it out."
            )
        splits["test"] = splits.pop("validation")
        if "validation_mismatched" in splits:
            splits["test_mismatched"] = splits.pop("validation_mismatched")
        remarks.append("the validation split is the test, since the test split has no labels")
    splits |= _drawn(splits["train"], {"validation": val_share or SHARE}, where)
    remarks.append(
        f"validation is {len(splits['validation'].texts):,} of the training texts, "
        f"{len(splits['train'].texts):,} are left"
    )
    return replace(labelled, splits=_ordered(splits), remarks=remarks, published=False)


def _check_apart(labelled: LabelledData, where: str) -> None:
    """Report texts that are both in training and evaluation, and raise if two splits are identical."""
    splits = labelled.splits
    learned = {*(splits["train"].labels or ())}
    if labelled.classes is not None and (missing := len(labelled.classes) - len(learned)):
        labelled.remarks.append(f"no training text has a label of {missing} of the {len(labelled.classes)} classes")
    train = {*splits["train"].rows()}
    for name, split in splits.items():
        if name == "train" or split.labels is None:
            continue
        if split.rows() == splits["train"].rows():
            raise ValueError(f"{where} has the same texts for training and as {name}: one of the files is a copy.")
        if both := sum(row in train for row in split.rows()):
            labelled.remarks.append(f"{both:,} of the {len(split.texts):,} texts of {name} are also training texts")


def _drawn(whole: TextSplit, shares: dict[str, float], where: str) -> dict[str, TextSplit]:
    """Parts drawn from a split, with the rest as "train"; each in the order of the file."""
    hashes = (hash_of(digest_of(text.encode(), _SEED) for text in row) for row in whole.rows())
    try:
        parts = hold_out(np.fromiter(hashes, dtype=np.uint64), shares)
    except ValueError as error:
        raise ValueError(f"{where} holds {error}") from error
    return {name: whole.taken(rows.tolist()) for name, rows in parts.items()}


def _ordered(splits: dict[str, TextSplit]) -> dict[str, TextSplit]:
    first = ("train", "validation", "validation_mismatched", "test", "test_mismatched")
    return {name: splits[name] for name in (*first, *sorted({*splits} - {*first})) if name in splits}
