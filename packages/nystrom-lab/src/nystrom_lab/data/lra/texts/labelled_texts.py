"""Samples being prepared: texts in a scratch file, a few numbers for each in memory.

A text is cut to its first `max_length` bytes. A label is a word or a number, stripped of white space. If all are
numbers, equal values such as 1 and 1.0 are one class, which is reported, and classes are in numerical order; otherwise
each label is a class, and classes are in alphabetical order. A number is written as 12, -0.5 or 1e2.
"""

import hashlib
import sys
from array import array
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nystrom.checks import check_at_least
from nystrom.temporary import temporary_file
from nystrom_lab.data.sources.source import NUMBER, LabelledSample, Source, check_any_seed, check_share
from nystrom_lab.data.store.prepared_folder import holds, new_folder
from nystrom_lab.data.store.token_files import SPLITS, read_facts, write_pieces

MOST_CLASSES = 256


class Gathered:
    """Samples of a source.

    Args:
        scratch: An open file for the texts.
        texts: Texts per sample.
        max_length: Bytes to keep of each text.
        seed: Decides the hashes.
    """

    def __init__(self, scratch: Any, *, texts: int, max_length: int, seed: int):
        self._scratch, self._texts, self._max_length, self._key = scratch, texts, max_length, str(seed).encode()
        self._ends, self._sequences = array("q", [0]), array("q")
        self._hashes, self._labels, self._splits, self._ranks = array("Q"), array("H"), array("B"), array("q")
        self._known: dict[bytes, int] = {}
        self._codes: dict[str, int] = {}
        self._cut = array("B")

    def add(self, row: LabelledSample) -> None:
        """Add a sample."""
        if not all(row.texts):
            raise ValueError(f"{row.place}: a text is empty: fill it in, or leave such rows out with --skip-empty.")
        self._labels.append(self._code(row))
        digests = []
        for text in row.texts:
            self._cut.append(len(text) > self._max_length)
            cut = text[: self._max_length]
            digests.append(hashlib.blake2b(cut, digest_size=16, key=self._key).digest())
            self._sequences.append(self._store(cut, digests[-1]))
        digest = hashlib.blake2b(b"".join(digests), digest_size=8).digest()
        self._hashes.append(int.from_bytes(digest, "little"))
        self._splits.append(SPLITS.index(row.split))
        self._ranks.append(row.rank)

    def _code(self, row: LabelledSample) -> int:
        try:
            label = row.label.decode("utf-8").strip()
        except UnicodeDecodeError as error:
            raise ValueError(f"{row.place}: the label {row.label[:40]!r} is not UTF-8.") from error
        if not label:
            raise ValueError(f"{row.place}: the label is empty: give every text a label.")
        code = self._codes.setdefault(label, len(self._codes))
        if code >= MOST_CLASSES:
            raise ValueError(
                f"{row.place}: the label {label[:40]!r} makes more than {MOST_CLASSES} classes: name the field of the"
                " labels with --label-field."
            )
        return code

    def _store(self, text: bytes, digest: bytes) -> int:
        """Write a text and return its number; if samples have several texts, equal ones are written once."""
        if (number := self._known.get(digest)) is not None:
            return number
        number = len(self._ends) - 1
        if self._texts > 1:
            self._known[digest] = number
        self._scratch.write(text)
        self._ends.append(self._ends[-1] + len(text))
        return number

    def classes(self) -> tuple[list[str], NDArray[np.uint8]]:
        """The names of the classes, and the class of each sample."""
        named = _class_of_each(self._codes)
        names = [*dict.fromkeys(named.values())]
        place = np.array([names.index(named[label]) for label in self._codes], dtype=np.uint8)
        return names, place[np.array(self._labels, dtype=np.int64)]

    def joined(self) -> list[str]:
        """A clause for each class with several labels."""
        spelt: dict[str, list[str]] = {}
        for label, name in _class_of_each(self._codes).items():
            spelt.setdefault(name, []).append(label)
        return [
            f"the labels {', '.join(map(repr, sorted(same)))} are one class" for same in spelt.values() if len(same) > 1
        ]

    def splits(self) -> NDArray[np.uint8]:
        """The split of each sample in the source."""
        return np.array(self._splits, dtype=np.uint8)

    def hashes(self) -> NDArray[np.uint64]:
        """A hash of each sample's bytes and the seed."""
        return np.array(self._hashes, dtype=np.uint64)

    def truncated(self, numbers: NDArray[np.int64]) -> int:
        """How many texts of these samples were truncated."""
        return int(np.array(self._cut).reshape(-1, self._texts)[numbers].sum())

    def also_among(self, numbers: NDArray[np.int64], others: NDArray[np.int64]) -> int:
        """How many of some samples have the same bytes as one of the others."""
        hashes = self.hashes()
        return int(np.isin(hashes[numbers], hashes[others]).sum())

    def write(self, folder: Path, split: str, numbers: NDArray[np.int64], labels: NDArray[np.uint8]) -> None:
        """Write the samples of these numbers as a split."""
        numbers = numbers[np.argsort(np.array(self._ranks, dtype=np.int64)[numbers], kind="stable")]
        which = np.array(self._sequences, dtype=np.int64).reshape(-1, self._texts)[numbers]
        members = None
        if self._texts > 1:
            shape = which.shape
            which, members = np.unique(which, return_inverse=True)
            members = members.reshape(shape)
        ends = np.array(self._ends, dtype=np.int64)
        starts, stops = ends[which.ravel()], ends[which.ravel() + 1]
        offsets = np.concatenate([np.zeros(1, dtype=np.int64), (stops - starts).cumsum()])
        self._scratch.flush()
        written = np.memmap(self._scratch, dtype=np.uint8, mode="r")
        pieces = (written[start:stop] for start, stop in zip(starts.tolist(), stops.tolist(), strict=True))
        write_pieces(folder, split, pieces, offsets, labels[numbers], members)


def _class_of_each(labels: Collection[str]) -> dict[str, str]:
    """The class of each label, in the order of the classes."""
    values = {label: _number(label) for label in labels}
    of_value: dict[Decimal, list[str]] = {}
    for label, value in values.items():
        if value is not None:
            of_value.setdefault(value, []).append(label)
    if None not in values.values():
        # A class is named the shortest way that its number is written.
        shortest = {value: min(same, key=lambda name: (len(name), name)) for value, same in of_value.items()}
        return {label: shortest[value] for value in sorted(of_value) for label in of_value[value]}
    if twice := next((same for same in of_value.values() if len(same) > 1), None):
        raise ValueError(
            f"the labels {twice[0]!r} and {twice[1]!r} are one number, among others that are words: write them alike."
        )
    return {label: label for label in sorted(labels)}


def _number(label: str) -> Decimal | None:
    """A label as a number; 1_1 and digits of other scripts, which Python would also read, count as words."""
    try:
        value = Decimal(label if NUMBER.fullmatch(label) else "nan")
    except InvalidOperation:
        return None
    return value if value.is_finite() else None


SHARE = 0.1


@dataclass(frozen=True)
class HeldOut:
    """How missing splits are created: shares of the training texts, a tenth for None, and the seed of the draw.

    Raises:
        ValueError: A share or the seed is impossible.
    """

    val_share: float | None
    test_share: float | None
    seed: int

    def __post_init__(self) -> None:
        check_any_seed(self.seed)
        for flag, share in (("--val-share", self.val_share), ("--test-share", self.test_share)):
            check_share(flag, SHARE if share is None else share)
        if (self.val_share or 0.0) + (self.test_share or 0.0) >= 1:
            raise ValueError(
                f"--val-share {self.val_share} and --test-share {self.test_share} leave nothing to train on: reduce "
                "them."
            )

    def shares(self, there: Collection[str]) -> dict[str, float]:
        """The share of the training texts for each split that is not there.

        Raises:
            ValueError: There is no train, or there is a split for which a share was given.
        """
        if "train" not in there:
            raise ValueError(f"there are texts for {' and '.join(there)} but none for training: add some.")
        shares = {}
        for split, share in (("test", self.test_share), ("val", self.val_share)):
            if split not in there:
                shares[split] = SHARE if share is None else share
            elif share is not None:
                raise ValueError(
                    f"--{split}-share is {share}, but the source has a {split} split of its own: leave it out."
                )
        return shares

    def draw(
        self, splits: NDArray[np.uint8], hashes: NDArray[np.uint64], there: Collection[str]
    ) -> Mapping[str, NDArray[np.int64]]:
        """The indices of the samples of each split, in ascending order, where the source has the splits `there`.

        Args:
            splits: For each sample its split in the source, as an index into `SPLITS`.
            hashes: A random number for each sample, equal for equal samples.
            there: The splits that the source has.
        """
        splits = splits.copy()
        train = np.flatnonzero(splits == SPLITS.index("train"))
        ranked = train[np.argsort(hashes[train], kind="stable")]
        sorted_hashes = hashes[ranked]
        start, end = 0, 0.0
        for split, share in self.shares(there).items():
            end += share * ranked.size
            stop = max(round(end), start)
            # Equal samples stay together.
            while 0 < stop < ranked.size and sorted_hashes[stop] == sorted_hashes[stop - 1]:
                stop += 1
            splits[ranked[start:stop]] = SPLITS.index(split)
            start = stop
        return {split: np.flatnonzero(splits == place) for place, split in enumerate(SPLITS)}


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
) -> Path:
    """Prepare a data set of so many texts a sample from a source; the other arguments are those of `prepare_text`.

    Raises:
        ValueError: The source is broken (the location is named), or `to` is in use or cannot be written.
    """
    to = Path(to).expanduser().resolve()
    check_at_least("--max-length", max_length, 1)
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
        temporary_file(partial / "texts") as file,
        file.open("w+b") as scratch,
    ):
        gathered = Gathered(scratch, texts=texts, max_length=max_length, seed=held_out.seed)
        skipped = _gather(gathered, source.rows(), skip_empty)
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
