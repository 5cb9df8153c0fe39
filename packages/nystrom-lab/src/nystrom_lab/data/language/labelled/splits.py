"""The splits for fine-tuning, derived from those that a user has.

- Train, validation and test are used as they come, if they come. The model chosen on validation is evaluated on test.
- For a test split without labels, such as GLUE's own, predictions are written. It becomes "submission".
- No validation split: it takes a tenth of the training texts, or `val_share`. If `val_share` is given although there is
  a validation split, and the test split has no labels, the validation split becomes the test.
- No training split but a validation split with labels, as for tasks whose training file is too large to keep: eight
  tenths of it become train, one validation, one test; where there is a test split with labels, nine and one. The result
  then is not that of the published split, and says so.

All draws use a fixed seed, so runs with any seed share their data. Equal texts, or pairs, stay in the same split, so no
training text is evaluated.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from nystrom_lab.data.language.labelled.glue import LabelledTask
from nystrom_lab.data.language.labelled.rows import SplitRows, read_rows
from nystrom_lab.data.sources.acl_imdb import find_imdb
from nystrom_lab.data.sources.source import NUMBER, check_share
from nystrom_lab.data.sources.split_files import find_splits

LabelKind = Literal["auto", "classes", "numbers"]
_SHARE, _SEED = 0.1, 0
_MOST_CLASSES = 1000


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
    check_share("val_share", _SHARE if val_share is None else val_share)
    rows, remarks = _read(data, task, strict=own)
    for name in ("validation", "validation_mismatched"):
        if name in rows and rows[name].labels is None:
            raise ValueError(f"{rows[name].places(0)}: the {name} split has no labels: name one that has.")
    classes = _own_classes(rows, kind) if own else task.classes
    splits: dict[str, TextSplit] = {}
    for name, read in rows.items():
        remarks += read.remarks
        labels = None if read.labels is None else _labels(read, task, classes)
        target = name.replace("test", "submission") if labels is None else name
        splits[target] = TextSplit(read.texts, read.pairs, labels)
    where = ", ".join(map(str, data))
    data_of = _complete(LabelledData(splits, classes, remarks), where, val_share)
    _check_apart(data_of, where)
    return data_of


def _read(data: Sequence[Path], task: LabelledTask, *, strict: bool) -> tuple[dict[str, SplitRows], list[str]]:
    """The rows of each split, and remarks on files."""
    if len(data) == 1 and (imdb := find_imdb(data[0])) is not None:
        parts: dict[str, SplitRows] = {}
        for row in imdb.rows():
            part = parts.setdefault(row.split, SplitRows([], None, [], lambda _: str(data[0])))
            part.texts.append(row.texts[0].decode("utf-8", errors="replace"))
            assert part.labels is not None
            part.labels.append(row.label.decode())
        return parts, []
    files, passed = find_splits(data, strict=strict)
    remarks = [f"{', '.join(passed)} is not a split and is skipped"] if passed else []
    return {
        name: read_rows(parts, task, may_lack_labels=name.startswith("test")) for name, parts in files.items()
    }, remarks


def _own_classes(rows: dict[str, SplitRows], kind: LabelKind) -> tuple[str, ...] | None:
    """The classes of a user's own data, in their order; None for numbers."""
    source = rows.get("train") or rows.get("validation")
    if source is None or source.labels is None:
        return ()
    if source.classes is not None and kind != "numbers":
        return source.classes
    words = {*source.labels}
    numbers = [_number(word) for word in words]
    numeric = all(number is not None for number in numbers)
    broken = any(not float(number or 0).is_integer() for number in numbers)
    if kind == "auto" and broken and not numeric:
        row = next(row for row, word in enumerate(source.labels) if _number(word) is None)
        raise ValueError(
            f"{source.places(row)}: the label is {source.labels[row]!r}, and others are numbers: leave the row out, or "
            "use --labels classes, if each is the name of a class."
        )
    if kind == "numbers" or (kind == "auto" and broken):
        return None
    if numeric and len(words) > len({*numbers}):
        spelt = sorted(word for word, number in zip(words, numbers, strict=True) if numbers.count(number) > 1)
        raise ValueError(
            f"{source.places(0)}: the labels {', '.join(map(repr, spelt[:4]))} are equal numbers: write one."
        )
    if len(words) == 1:
        raise ValueError(
            f"{source.places(0)}: the only label is {words.pop()!r} (rows: {len(source.labels)}): add rows of another, "
            "or name another column with --label-field."
        )
    if len(words) > _MOST_CLASSES:
        way = ": use --labels numbers, if they are numbers." if numeric else ": name the column with --label-field."
        raise ValueError(f"{source.places(0)}: the labels have {len(words)} values, more than {_MOST_CLASSES}{way}")
    return tuple(sorted(words, key=lambda word: (_number(word) or 0.0, word) if numeric else (0.0, word)))


def _labels(rows: SplitRows, task: LabelledTask, classes: tuple[str, ...] | None) -> list[int] | list[float]:
    """Labels as class indices, or as numbers."""
    assert rows.labels is not None
    if classes is None:
        numbers = [_number(word) for word in rows.labels]
        for row, number in enumerate(numbers):
            if number is None:
                raise ValueError(f"{rows.places(row)}: the label is {rows.labels[row]!r}; expected a number.")
        return [float(number or 0.0) for number in numbers]
    places = {name: place for place, name in enumerate(classes)}
    if task.classes is not None:
        places |= {str(place): place for place in range(len(classes))}
        places |= {word: places[name] for word, name in task.spellings.items()}
    try:
        return [places[word] for word in rows.labels]
    except KeyError:
        row = next(row for row, word in enumerate(rows.labels) if word not in places)
        raise ValueError(
            f"{rows.places(row)}: the label is {rows.labels[row]!r}, which is not one of the classes: expected one of "
            f"{', '.join(map(repr, list(places)[:20]))}."
        ) from None


def _number(word: str) -> float | None:
    """A label as a number; Python reads 1_1 as eleven, but here it is a class name."""
    number = float(word) if NUMBER.fullmatch(word) else math.inf
    return number if math.isfinite(number) else None


def _complete(found: LabelledData, where: str, val_share: float | None) -> LabelledData:
    """Create missing splits."""
    splits, remarks = dict(found.splits), list(found.remarks)
    if "train" not in splits:
        if "validation" not in splits:
            raise ValueError(
                f"{where} has no training split: expected a file named train, or a labelled one named dev, which is "
                "then split."
            )
        whole, shares = splits.pop("validation"), {"validation": val_share or _SHARE}
        if "test" not in splits:
            shares["test"] = _SHARE
        splits |= _drawn(whole, shares, where)
        counted = ", ".join(f"{name} {len(splits[name].texts):,}" for name in ("train", *shares))
        remarks.append(
            f"{where} has no training split: its {len(whole.texts):,} rows for validation become {counted}, which is "
            "not the published split"
        )
        return replace(found, splits=_ordered(splits), remarks=remarks, published=False)
    if "validation" in splits and val_share is None:
        return replace(found, splits=_ordered(splits))
    if "validation" in splits:
        if "test" in splits:
            raise ValueError(
                f"val_share is {val_share}, but {where} has validation and test with labels: leave it out."
            )
        splits["test"] = splits.pop("validation")
        if "validation_mismatched" in splits:
            splits["test_mismatched"] = splits.pop("validation_mismatched")
        remarks.append("the validation split is the test, since the test split has no labels")
    splits |= _drawn(splits["train"], {"validation": val_share or _SHARE}, where)
    remarks.append(
        f"validation is {len(splits['validation'].texts):,} of the training texts, "
        f"{len(splits['train'].texts):,} are left"
    )
    return replace(found, splits=_ordered(splits), remarks=remarks, published=False)


def _check_apart(found: LabelledData, where: str) -> None:
    """Report texts that are both in training and evaluation, and raise if two splits are identical."""
    splits = found.splits
    train = {*splits["train"].rows()}
    for name, split in splits.items():
        if name == "train" or split.labels is None:
            continue
        if split.rows() == splits["train"].rows():
            raise ValueError(f"{where} has the same texts for training and as {name}: one of the files is a copy.")
        if both := sum(row in train for row in split.rows()):
            found.remarks.append(f"{both:,} of the {len(split.texts):,} texts of {name} are also training texts")


def _drawn(whole: TextSplit, shares: dict[str, float], where: str) -> dict[str, TextSplit]:
    """Parts drawn from a split, with the rest as "train"; each in the order of the file."""
    numbers: dict[tuple[str, ...], int] = {}
    equal = np.array([numbers.setdefault(row, len(numbers)) for row in whole.rows()], dtype=np.int64)
    # All rows, in the order in which the different texts are drawn.
    places = np.empty(len(numbers), dtype=np.int64)
    places[np.random.default_rng(_SEED).permutation(len(numbers))] = np.arange(len(numbers))
    order, parts = np.argsort(places[equal], kind="stable"), {}
    for name, share in shares.items():
        size = max(1, round(share * len(whole.texts)))
        while 0 < size < len(order) and equal[order[size]] == equal[order[size - 1]]:
            size += 1
        parts[name], order = np.sort(order[:size]), order[size:]
    if not len(order):
        kinds = "" if len(numbers) == len(equal) else f", {len(numbers)} of them different (equal ones stay together)"
        raise ValueError(f"{where} holds {len(equal)} texts{kinds}: too few to draw {' and '.join(shares)} from them.")
    parts["train"] = np.sort(order)
    return {name: whole.taken(rows.tolist()) for name, rows in parts.items()}


def _ordered(splits: dict[str, TextSplit]) -> dict[str, TextSplit]:
    first = ("train", "validation", "validation_mismatched", "test", "test_mismatched")
    return {name: splits[name] for name in (*first, *sorted({*splits} - {*first})) if name in splits}
