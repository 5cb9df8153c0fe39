"""Prepare labelled texts: classes, splits and files, for samples of one or several texts.

`gathered_texts` cuts each text to its first `max_length` bytes and stores bytes, and makes classes of the labels of all
splits: 2 to 256, each with training texts. The header has their names, how many texts were cut, left out, or are in
train as well, and where each split is from; a summary of it is printed.

The splits of a source are used; `held_out` creates missing ones, unless the source defines val as the test split.
"""

import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nystrom_lab.data.lra.texts.gathered_texts import Gathered
from nystrom_lab.data.lra.texts.held_out import HeldOut
from nystrom_lab.data.sources.source import LabelledSample, Source
from nystrom_lab.data.store.header import SPLITS, read_facts
from nystrom_lab.data.store.prepared_folder import holds, new_folder

ENCODING = "bytes of the text; a token is byte + 1, and 0 pads"


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
    """Prepare a data set from a source.

    Args:
        source: The source to read.
        to: Folder to create. If it already holds this data set, it is reused.
        task: Task.
        texts: Texts per sample.
        max_length: Bytes that are kept of a text.
        held_out: How missing splits are made.
        skip_empty: Leave out samples with an empty text; otherwise they are an error.
        check_counts: An incomplete published data set is an error; otherwise it is a warning.
        progress: Say how far it is.

    Raises:
        ValueError: The source is broken (the location is named), or `to` is in use or cannot be written.
    """
    to = Path(to).expanduser().resolve()
    check_length(max_length)
    # Where val is test by rule, a share for val breaks the rule on purpose.
    val_is_test = source.val_is_test and held_out.val_share is None
    there = (*source.splits, "val") if val_is_test else source.splits
    settings = {"origin": source.kind, "max_length": max_length, "seed": held_out.seed, "skip_empty": skip_empty}
    settings |= {f"{split}_share": share for split, share in held_out.shares(there).items()}
    settings |= source.settings
    if holds(to, task=task, settings=settings):
        differences = read_facts(to, task=task)["differences"] if check_counts else []
        _raise_for_differences(str(to), differences)
        return to
    facts: dict[str, Any] = {}
    with (
        new_folder(to, task=task, settings=settings, facts=facts) as partial,
        tempfile.TemporaryFile(dir=partial) as scratch,
    ):
        gathered = Gathered(scratch, texts=texts, max_length=max_length, seed=held_out.seed)
        skipped = _gather(gathered, source.rows(progress), skip_empty)
        names, labels = gathered.classes()
        splits = dict(held_out.draw(gathered.splits(), gathered.hashes(), there))
        if val_is_test:
            splits["val"] = splits["test"]
        _check_classes(names, labels, splits)
        shares = held_out.shares(there)
        differences = _differences(source, splits, labels, names, shares)
        _raise_for_differences(source.kind, differences if check_counts else [])
        for split in SPLITS:
            gathered.write(partial, split, splits[split], labels)
        truncated = {split: gathered.truncated(splits[split]) for split in SPLITS}
        facts |= {"classes": names, "encoding": ENCODING, "truncated": truncated, "skipped": skipped}
        facts |= {"val": _origin("val", val_is_test, shares), "test": _origin("test", False, shares)}
        facts |= {"differences": differences, "remarks": [*source.remarks, *gathered.joined()]}
        own = ["test"] if val_is_test else ["val", "test"]
        facts["also_in_train"] = {split: gathered.also_among(splits[split], splits["train"]) for split in own}
    _summarize({split: numbers.size for split, numbers in splits.items()}, facts, max_length)
    return to


def check_length(max_length: int) -> None:
    """Raise ValueError if no byte of a text would be kept."""
    if max_length < 1:
        raise ValueError(f"--max-length is {max_length}; expected at least 1 byte.")


def _summarize(samples: Mapping[str, int], facts: Mapping[str, Any], max_length: int) -> None:
    """Print what a user should know of the data before training on them."""
    counted = ", ".join(f"{split} {samples[split]:,}" for split in SPLITS)
    names = ", ".join(repr(name[:20]) for name in facts["classes"][:8]) + (", ..." if facts["classes"][8:] else "")
    print(f"{counted}; {len(facts['classes'])} classes: {names}.", file=sys.stderr)
    if cut := sum(facts["truncated"].values()):
        print(f"{cut:,} texts were cut to their first {max_length:,} bytes.", file=sys.stderr)
    for remark in facts["remarks"]:
        print(f"notice: {remark}.", file=sys.stderr)
    for split, count in facts["also_in_train"].items():
        if count:
            print(f"warning: {count:,} of {samples[split]:,} samples of {split} are also in train.", file=sys.stderr)
    for difference in facts["differences"]:
        print(f"warning: {difference}.", file=sys.stderr)


def _gather(gathered: Gathered, rows: Iterator[LabelledSample], skip_empty: bool) -> int:
    """Add all samples, and count those that are skipped."""
    skipped = 0
    for row in rows:
        if skip_empty and not all(row.texts):
            skipped += 1
        else:
            gathered.add(row)
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
        raise ValueError(f"{came}: expected texts of at least two classes.")
    for split, numbers in splits.items():
        if not numbers.size:
            raise ValueError(f"{split} gets none of the {labels.size} samples: add other texts, or use a larger share.")
    trained = np.bincount(labels[splits["train"]], minlength=len(names))
    if missing := [name for name, count in zip(names, trained, strict=True) if not count]:
        raise ValueError(
            f"no training text has the label {', '.join(map(repr, missing[:8]))} (all labels:"
            f" {', '.join(map(repr, names[:20]))}): correct the labels, or add training texts of that class."
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


def _raise_for_differences(what: str, differences: list[str]) -> None:
    if differences:
        raise ValueError(
            f"{what}: {'; '.join(differences)}: a file is truncated or wrong, fetch it again"
            " (or use it anyway with --no-check-counts)."
        )
