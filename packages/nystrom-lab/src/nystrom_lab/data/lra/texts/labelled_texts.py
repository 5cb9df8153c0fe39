"""Labelled texts as a data set of the arena: texts in a scratch file, a few numbers for each in memory.

A text is cut to its first `max_length` bytes. The label is read as `nystrom_lab.data.sources.labels` says.
"""

import sys
from array import array
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nystrom.checks import check_at_least
from nystrom.temporary import temporary_file
from nystrom_lab.data.sources.held_out import SHARE, check_any_seed, check_share, digest_of, hash_of, hold_out
from nystrom_lab.data.sources.labels import check_known, counted, own_classes
from nystrom_lab.data.sources.source import LabelledRow, Source
from nystrom_lab.data.store.prepared_folder import holds, new_folder
from nystrom_lab.data.store.token_files import SPLITS, read_facts, write_pieces


class Gathered:
    """Samples of a source.

    Args:
        scratch: An open file for the texts.
        texts: Texts per sample.
        max_length: Bytes to keep of each text.
        seed: Decides the hashes.
    """

    def __init__(self, scratch: Any, *, texts: int, max_length: int, seed: int):
        self._scratch, self._texts, self._max_length, self._seed = scratch, texts, max_length, seed
        self._ends, self._sequences = array("q", [0]), array("q")
        self._hashes, self._labels, self._splits, self._ranks = array("Q"), array("I"), array("B"), array("q")
        self._known: dict[bytes, int] = {}
        self._codes: dict[str, int] = {}
        self._places: dict[str, str] = {}
        self._scored: dict[str, str] = {}
        self._cut = array("B")

    def add(self, row: LabelledRow) -> None:
        """Add a sample."""
        row.check_texts()
        self._labels.append(self._codes.setdefault(row.label, len(self._codes)))
        (self._places if row.split == "train" else self._scored).setdefault(row.label, row.place)
        digests = []
        for text in row.texts:
            self._cut.append(len(text) > self._max_length)
            cut = text[: self._max_length]
            digests.append(digest_of(cut, self._seed))
            self._sequences.append(self._store(cut, digests[-1]))
        self._hashes.append(hash_of(digests))
        self._splits.append(SPLITS.index(row.split))
        self._ranks.append(row.rank)

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

    def classes(self) -> tuple[list[str], NDArray[np.unsignedinteger]]:
        """The names of the classes, and the class of each sample.

        Raises:
            ValueError: The labels are none, see `own_classes`; or no training sample has one of them.
        """
        names = own_classes(self._places, rows=self._splits.count(SPLITS.index("train")))
        if names is None:
            label = next(label for label in self._places if not float(label).is_integer())
            raise ValueError(
                f"{self._places[label]}: the labels are numbers such as {label!r}, and training on bytes learns "
                "classes: name these by words or whole numbers, or predict numbers with `nystrom finetune`."
            )
        check_known(self._scored, names)
        index = np.array([names.index(label) for label in self._codes], dtype=np.min_scalar_type(len(names) - 1))
        return [*names], index[np.array(self._labels, dtype=np.int64)]

    def draw(self, shares: Mapping[str, float]) -> dict[str, NDArray[np.int64]]:
        """The samples of each split, in ascending order; those of the shares are held out from the training samples."""
        splits = np.array(self._splits, dtype=np.uint8)
        numbers = {split: np.flatnonzero(splits == index) for index, split in enumerate(SPLITS)}
        if shares:
            train = numbers["train"]
            numbers |= {split: train[rows] for split, rows in hold_out(self.hashes()[train], shares).items()}
        return numbers

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

    def write(self, folder: Path, split: str, numbers: NDArray[np.int64], labels: NDArray[np.unsignedinteger]) -> None:
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


@dataclass(frozen=True)
class HeldOut:
    """How missing splits are created: shares of the training texts, a tenth for None, and the seed of the draw.

    Raises:
        ValueError: A share or the seed is impossible.
    """

    val_share: float | None = None
    test_share: float | None = None
    seed: int = 0

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
    # If val is test by rule, a share for val breaks the rule on purpose.
    val_is_test = source.val_is_test and held_out.val_share is None
    shares = held_out.shares((*source.splits, "val") if val_is_test else source.splits)
    settings = {"origin": source.kind, "max_length": max_length, "seed": held_out.seed, "skip_empty": skip_empty}
    settings |= {f"{split}_share": share for split, share in shares.items()}
    settings |= source.settings()
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
        skipped = 0
        for row in source.rows():
            if skip_empty and not all(row.texts):
                skipped += 1
            else:
                gathered.add(row)
        names, labels = gathered.classes()
        splits = gathered.draw(shares)
        if val_is_test:
            splits["val"] = splits["test"]
        remarks = [*source.remarks, *_unlearned(names, labels, splits)]
        if skipped:
            remarks.append(f"{skipped:,} rows have an empty text and are left out")
        differences = _differences(source, splits, labels, names, shares)
        _raise_for_differences(source.kind, differences if check_counts else [])
        for split in SPLITS:
            gathered.write(partial, split, splits[split], labels)
        truncated = {split: gathered.truncated(splits[split]) for split in SPLITS}
        facts |= {"classes": names, "encoding": ENCODING, "truncated": truncated, "skipped": skipped}
        facts |= {"val": _origin("val", val_is_test, shares), "test": _origin("test", False, shares)}
        facts |= {"differences": differences, "remarks": remarks}
        own = ["test"] if val_is_test else ["val", "test"]
        facts["also_in_train"] = {split: gathered.also_among(splits[split], splits["train"]) for split in own}
        counts = np.bincount(labels, minlength=len(names)).tolist()
    _summarize({split: splits[split].size for split in SPLITS}, counted(names, counts), facts, max_length)
    return to


def _summarize(samples: Mapping[str, int], classes: str, facts: Mapping[str, Any], max_length: int) -> None:
    """Print what a user should know of the data before training on them."""
    sizes = ", ".join(f"{split} {count:,}" for split, count in samples.items())
    print(f"{sizes}; {classes}.", file=sys.stderr)
    if cut := sum(facts["truncated"].values()):
        print(f"{cut:,} texts were cut to their first {max_length:,} bytes.", file=sys.stderr)
    for remark in facts["remarks"]:
        print(f"notice: {remark}.", file=sys.stderr)
    for split, count in facts["also_in_train"].items():
        if count:
            print(f"warning: {count:,} of {samples[split]:,} samples of {split} are also in train.", file=sys.stderr)
    for difference in facts["differences"]:
        print(f"warning: {difference}.", file=sys.stderr)


def _origin(split: str, val_is_test: bool, shares: Mapping[str, float]) -> str:
    if split == "val" and val_is_test:
        return "the test split once more, as in the official task: what is chosen on val is chosen on the test"
    if split in shares:
        return f"drawn from the training texts, share {shares[split]}"
    return "of the source"


def _unlearned(
    names: list[str], labels: NDArray[np.unsignedinteger], splits: Mapping[str, NDArray[np.int64]]
) -> list[str]:
    """A notice where all texts of some classes were drawn for another split.

    Raises:
        ValueError: A split is empty, or fewer than two classes are left.
    """
    if empty := [split for split, numbers in splits.items() if not numbers.size]:
        raise ValueError(f"{empty[0]} has none of the {labels.size} samples: add texts.")
    trained = np.bincount(labels[splits["train"]], minlength=len(names))
    missing = [name for name, count in zip(names, trained, strict=True) if not count]
    if len(missing) > len(names) - 2:
        raise ValueError(f"no training text has the label {missing[0]!r}, after the draw: add texts of that class.")
    return [f"no training text has a label of {len(missing)} of the {len(names)} classes"] if missing else []


def _differences(
    source: Source,
    splits: Mapping[str, NDArray[np.int64]],
    labels: NDArray[np.unsignedinteger],
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
