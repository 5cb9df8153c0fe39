"""Retrieval of the Long Range Arena: does one paper cite the other? Or pairs of a user's own texts.

A sample is two documents, each its first `max_length` bytes, token = byte + 1 and 0 for padding. A document that stands
in many pairs of a split is stored once.

The official files are new_aan_pairs.train.tsv, .eval.tsv and .test.tsv: a pair a line, without a header, the fields
label, id1, id2, text1 and text2 between tabs, quotes being letters; 147,086 / 18,090 / 17,437 pairs. Labels are 0 and
1, also written 0.0 and 1.0. Texts are taken byte for byte, as the official pipeline does, also where they stand as
Python literals, as in b'...'.

Source: Tay et al. (2021), arXiv:2011.04006; the files are in
https://storage.googleapis.com/long-range-arena/lra_release.gz, folder tsv_data.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from nystrom.tasks.lra.texts.labelled_texts import Source, prepare_texts
from nystrom.tasks.sources.row_files import COMPRESSED, Wanted, is_row_file
from nystrom.tasks.sources.split_files import endings, files_of_folder, is_saved_dataset, row_source, saved_source
from nystrom.tasks.store.byte_split import ByteSplit
from nystrom.tasks.store.gathered_texts import Row
from nystrom.tasks.store.held_out import HeldOut

TASK = "retrieval"
OFFICIAL = {
    split: f"new_aan_pairs.{name}.tsv" for split, name in (("train", "train"), ("val", "eval"), ("test", "test"))
}
PUBLISHED = {"train": 147_086, "val": 18_090, "test": 17_437}
COLUMNS = ("label", "id1", "id2", "text1", "text2")
# Where the official files lie inside of the release.
INSIDE = ("", "tsv_data", "lra_release/tsv_data", "lra_release/lra_release/tsv_data")
FIELDS = {
    "label_field": ("label", "Target"),
    "first_field": ("text1", "Source1", "sentence1"),
    "second_field": ("text2", "Source2", "sentence2"),
}
LABELS = {b"0": b"0", b"1": b"1", b"0.0": b"0", b"1.0": b"1"}


def prepare_retrieval(
    source: Path,
    to: Path,
    *,
    max_length: int = 4000,
    first_field: str | None = None,
    second_field: str | None = None,
    label_field: str | None = None,
    val_share: float | None = None,
    test_share: float | None = None,
    seed: int = 0,
    skip_empty: bool = False,
    check_counts: bool = True,
    progress: bool = True,
) -> Path:
    """Prepare labelled pairs of texts: the papers of the Long Range Arena, or your own.

    Args:
        source: The folder of new_aan_pairs.train.tsv, .eval.tsv and .test.tsv, or the release around it; a .csv, .tsv
            or .jsonl file of your own, also compressed; a folder with such files named train, val and test; or a folder
            saved by Hugging Face datasets.
        to: Folder to make. If it already holds this data set it is used as it is.
        max_length: Bytes that are kept of a text.
        first_field: Column or field of the first texts; if not given, one of text1, Source1 and sentence1.
        second_field: Column or field of the second texts; if not given, one of text2, Source2 and sentence2.
        label_field: Column or field of the labels; if not given, one of label and Target.
        val_share: Share of the training pairs that becomes val where the source has none; a tenth if not given.
        test_share: The same for test.
        seed: Decides which pairs those are.
        skip_empty: Leave out pairs with an empty text, and count them, rather than refuse them.
        check_counts: Refuse official files that are not complete rather than warn.
        progress: Show a progress bar.

    Returns:
        The folder, ready for `Retrieval`.

    Raises:
        ValueError: The source is missing or broken (file and line are named), a setting is impossible, or `to` is taken
            or cannot be written.
    """
    held_out = HeldOut(val_share=val_share, test_share=test_share, seed=seed)
    given = {"label_field": label_field, "first_field": first_field, "second_field": second_field}
    wanted = {option: FIELDS[option] if name is None else (name,) for option, name in given.items()}
    return prepare_texts(
        find_pairs(Path(source).expanduser(), wanted, progress=progress),
        to,
        task=TASK,
        texts=2,
        max_length=max_length,
        held_out=held_out,
        skip_empty=skip_empty,
        check_counts=check_counts,
        progress=progress,
    )


def find_pairs(source: Path, wanted: Wanted, *, progress: bool = False) -> Source:
    """Tell what a file or folder is, with a bar for checksums that take long.

    Raises:
        ValueError: Nothing that is read, or an official file is missing.
    """
    if source.is_file() and is_row_file(source):
        if source.name in OFFICIAL.values():
            raise ValueError(f"{source} is one of three official files: name their folder, {source.parent}.")
        return row_source({"train": source}, wanted, kind="a file of rows", progress=progress)
    if source.is_dir():
        if official := _official_files(source):
            return _official_source(official, progress)
        if is_saved_dataset(source):
            return saved_source(source, wanted, progress=progress)
        if files := files_of_folder(source):
            return row_source(files, wanted, progress=progress)
    came = "holds no pairs that are read" if source.is_dir() else "is of no kind that is read"
    raise ValueError(
        f"{source} {came if source.exists() else 'is not there'}: name the folder of {', '.join(OFFICIAL.values())} (in"
        " tsv_data of https://storage.googleapis.com/long-range-arena/lra_release.gz), a file of pairs that ends in"
        f" {endings()}, a folder with such files named train, val and test, or one saved by Hugging Face datasets."
    )


def _official_files(source: Path) -> dict[str, Path]:
    """Find the three official files, also compressed; none where there is not one of them."""
    for folder in (source / inside for inside in INSIDE):
        found = {
            split: path
            for split, name in OFFICIAL.items()
            for path in (folder / (name + ending) for ending in ("", *COMPRESSED))
            if path.is_file()
        }
        if missing := [name for split, name in OFFICIAL.items() if split not in found]:
            if found:
                raise ValueError(f"{folder} lacks {', '.join(missing)}: take all three official files.")
            continue
        return found
    return {}


def _official_source(files: dict[str, Path], progress: bool) -> Source:
    plain = row_source(
        files,
        {"label_field": ("label",), "first_field": ("text1",), "second_field": ("text2",)},
        kind="official files",
        columns=COLUMNS,
        progress=progress,
    )

    def rows(progress: bool) -> Iterator[Row]:
        for row in plain.rows(progress):
            if (label := LABELS.get(row.label)) is None:
                raise ValueError(
                    f"{row.place}: the label is {row.label[:40]!r}: it must be 0 or 1, so the file is damaged."
                )
            yield row._replace(label=label)

    return replace(plain, rows=rows, published=PUBLISHED)


class Retrieval(ByteSplit):
    """One split of prepared pairs: `input_ids` (byte + 1), one array for each of two documents, and `labels`.

    The two are of different lengths; padded to one they make the (2, tokens) that a pair classifier takes.
    """

    task: ClassVar[str] = TASK

    def __getitem__(self, index: int) -> dict[str, Any]:
        index = self._checked(index)
        first, second = self._pairs[index].tolist()
        return {"input_ids": (self._tokens(first), self._tokens(second)), "labels": int(self.labels[index])}

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The number of tokens of each sample's longer document."""
        return np.diff(self._samples.offsets)[self._pairs].max(axis=1, initial=0)

    @property
    def _pairs(self) -> NDArray[np.int64]:
        assert self._members is not None, "pairs are always written with members"
        return self._members
