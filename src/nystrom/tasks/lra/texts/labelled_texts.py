"""From labelled texts to a prepared folder: classes, splits and files, for one text a sample or several.

`gathered_texts` cuts each text to its first `max_length` bytes and stores bytes, and makes classes of the labels of all
splits: 2 to 256, each with training texts. The header tells their names, how many texts were cut or left out, and where
each split is from.

What a source has of train, val and test is used; `held_out` makes what it lacks, unless its own rule is that val is the
test split once more.
"""

import errno
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nystrom.tasks.store.gathered_texts import Gathered, Row
from nystrom.tasks.store.held_out import HeldOut
from nystrom.tasks.store.token_files import SPLITS, holds, new_folder, read_facts

ENCODING = "bytes of the text; a token is byte + 1, and 0 pads"


@dataclass(frozen=True)
class Source:
    """What a user holds.

    Attributes:
        kind: What it is, in words.
        settings: What decides its samples: the SHA-256 of its files, and the fields that are read.
        splits: The splits it has of its own.
        rows: Reads it, with a bar if told so.
        published: Samples of each split where the data set is a published one.
        equal_classes: Each class has the same number of samples in each split, as published.
        val_is_test: By its own rule, val is test.
        remarks: What else the header should tell.
    """

    kind: str
    settings: Mapping[str, str]
    splits: tuple[str, ...]
    rows: Callable[[bool], Iterator[Row]]
    published: Mapping[str, int] | None = None
    equal_classes: bool = False
    val_is_test: bool = False
    remarks: tuple[str, ...] = ()


def prepare_texts(
    source: Source,
    to: Path,
    *,
    task: str,
    texts: int,
    max_length: int,
    held_out: HeldOut,
    skip_empty: bool,
    check_counts: bool,
    progress: bool,
) -> Path:
    """Turn a source into a data set.

    Args:
        source: What to read.
        to: Folder to make. If it already holds this data set it is used as it is.
        task: Task.
        texts: Texts per sample.
        max_length: Bytes that are kept of a text.
        held_out: How missing splits are made.
        skip_empty: Leave out samples with an empty text rather than refuse them.
        check_counts: Refuse a published data set that is incomplete rather than warn.
        progress: Show a progress bar.

    Raises:
        ValueError: The source is broken (the place is named), or `to` is taken or cannot be written.
    """
    to = Path(to).expanduser().resolve()
    if max_length < 1:
        raise ValueError(f"max_length must be at least 1 byte, got {max_length}.")
    # Where val is test by rule, a share for val goes against the rule on purpose.
    val_is_test = source.val_is_test and held_out.val_share is None
    there = (*source.splits, "val") if val_is_test else source.splits
    settings = {"origin": source.kind, "max_length": max_length, "seed": held_out.seed, "skip_empty": skip_empty}
    settings |= {f"{split}_share": share for split, share in held_out.shares(there).items()}
    settings |= source.settings
    if holds(to, task=task, settings=settings):
        differences = read_facts(to, task=task)["differences"] if check_counts else []
        _refuse_differences(str(to), differences)
        print(f"{to} already holds this data set; it is used as it is.", file=sys.stderr)
        return to
    facts: dict[str, Any] = {}
    with (
        new_folder(to, task=task, settings=settings, facts=facts) as partial,
        tempfile.TemporaryFile(dir=partial) as scratch,
    ):
        gathered = Gathered(scratch, texts=texts, max_length=max_length, seed=held_out.seed)
        skipped = _gather(gathered, source.rows(progress), to, skip_empty)
        names, labels = gathered.classes()
        splits = dict(held_out.draw(gathered.splits(), gathered.hashes(), there))
        if val_is_test:
            splits["val"] = splits["test"]
        _check_classes(names, labels, splits)
        shares = held_out.shares(there)
        differences = _differences(source, splits, labels, names, shares)
        _refuse_differences(source.kind, differences if check_counts else [])
        for split in SPLITS:
            gathered.write(partial, split, splits[split], labels)
        truncated = {split: gathered.truncated(splits[split]) for split in SPLITS}
        facts |= {"classes": names, "encoding": ENCODING, "truncated": truncated, "skipped": skipped}
        facts |= {"val": _origin("val", val_is_test, shares), "test": _origin("test", False, shares)}
        facts |= {"differences": differences, "remarks": list(source.remarks)}
    for difference in differences:
        print(f"warning: {difference}.", file=sys.stderr)
    return to


def _gather(gathered: Gathered, rows: Iterator[Row], to: Path, skip_empty: bool) -> int:
    """Take all samples, and count those that are left out."""
    skipped = 0
    try:
        for row in rows:
            if skip_empty and not all(row.texts):
                skipped += 1
            else:
                gathered.add(row)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise OSError(f"{to} cannot be made ({error}): free space, or name a folder on another disk.") from error
        raise
    return skipped


def _origin(split: str, val_is_test: bool, shares: Mapping[str, float]) -> str:
    if split == "val" and val_is_test:
        return "the test split once more, as in the official task: what is chosen on val is chosen on the test"
    if split in shares:
        return f"drawn from the training texts, share {shares[split]}"
    return "of the source"


def _check_classes(names: list[str], labels: NDArray[np.uint8], splits: Mapping[str, NDArray[np.int64]]) -> None:
    if len(names) < 2:
        came = f"every text has the label {names[0]!r}" if names else "there are no texts"
        raise ValueError(f"{came}: texts of two classes are wanted at least.")
    for split, numbers in splits.items():
        if not numbers.size:
            raise ValueError(
                f"{split} gets none of the {labels.size} samples: add other texts, or take a larger share."
            )
    trained = np.bincount(labels[splits["train"]], minlength=len(names))
    if missing := [name for name, count in zip(names, trained, strict=True) if not count]:
        raise ValueError(
            f"no training text has the label {', '.join(map(repr, missing[:8]))} (all labels:"
            f" {', '.join(map(repr, names[:20]))}): mend the labels, or add training texts of that class."
        )


def _differences(
    source: Source,
    splits: Mapping[str, NDArray[np.int64]],
    labels: NDArray[np.uint8],
    names: list[str],
    shares: Mapping[str, float],
) -> list[str]:
    """Compare the counts with the published ones."""
    differences = []
    for split, wanted in (source.published or {}).items():
        drawn = sum(splits[other].size for other in shares) if split == "train" else 0
        came = splits[split].size + drawn
        if came != wanted:
            differences.append(f"{split} has {came} samples where {wanted} were published")
        elif source.equal_classes:
            parts = [split, *shares] if split == "train" else [split]
            counts = np.bincount(np.concatenate([labels[splits[part]] for part in parts]), minlength=len(names))
            if {*counts.tolist()} != {wanted // 2}:
                listed = ", ".join(f"{count} of {name!r}" for name, count in zip(names, counts, strict=True))
                differences.append(f"{split} has {listed} where {wanted // 2} of each of two classes were published")
    return differences


def _refuse_differences(what: str, differences: list[str]) -> None:
    if differences:
        raise ValueError(
            f"{what}: {'; '.join(differences)}: a file is cut short or another one, fetch it again"
            " (or take what is there with check_counts off, --no-check-counts)."
        )
