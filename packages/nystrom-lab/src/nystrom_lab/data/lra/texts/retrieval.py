"""Retrieval of the Long Range Arena: does one paper cite the other? Or pairs of a user's own texts.

A sample is two documents, each its first `max_length` bytes, token = byte + 1 and 0 for padding. A document that is in
many pairs of a split is stored once.

The official files are new_aan_pairs.train.tsv, .eval.tsv and .test.tsv: a pair a line, without a header, the fields
label, id1, id2, text1 and text2 between tabs, quotes being letters; 147,086 / 18,090 / 17,437 pairs. Labels are 0 and
1, also written 0.0 and 1.0. Texts are taken byte for byte, as the official pipeline does, also where they are written
as Python literals, as in b'...'.

Source: Tay et al. (2021), arXiv:2011.04006; the files are in
https://storage.googleapis.com/long-range-arena/lra_release.gz, folder tsv_data.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from nystrom.checks import check_at_least
from nystrom_lab.data.lra.facts import published_files
from nystrom_lab.data.lra.texts.labelled_texts import HeldOut, prepare_texts
from nystrom_lab.data.lra.texts.linked_documents import find_linked, linked_source
from nystrom_lab.data.sources.columns import TextColumns, own_columns
from nystrom_lab.data.sources.labelled_files import find_arena_texts, labelled_files
from nystrom_lab.data.sources.row_files import COMPRESSED, endings
from nystrom_lab.data.sources.source import LabelledRow, Source
from nystrom_lab.data.store.split import ByteSplit
from nystrom_lab.data.store.token_files import open_members

TASK = "retrieval"
OFFICIAL = {
    split: f"new_aan_pairs.{name}.tsv" for split, name in (("train", "train"), ("val", "eval"), ("test", "test"))
}
RETRIEVAL_COUNTS = {"train": 147_086, "val": 18_090, "test": 17_437}
COLUMNS = TextColumns(texts=("text1",), pairs=("text2",), headless=("label", "id1", "id2", "text1", "text2"))
LABELS = {"0": "0", "1": "1", "0.0": "0", "1.0": "1"}


def prepare_retrieval(
    source: Path,
    to: Path,
    *,
    max_length: int = 4000,
    text_field: str | None = None,
    pair_field: str | None = None,
    label_field: str | None = None,
    val_share: float | None = None,
    test_share: float | None = None,
    seed: int = 0,
    skip_empty: bool = False,
    check_counts: bool = True,
) -> Path:
    """Prepare labelled pairs of texts: the papers of the Long Range Arena, or your own.

    Args:
        source: The folder of new_aan_pairs.train.tsv, .eval.tsv and .test.tsv, or the release around it; your own .csv,
            .tsv or .jsonl file, may be compressed, or .parquet file; a folder with such files named train, val and
            test; a folder saved by Hugging Face datasets; or one with a file of documents (id, text) and one of links
            (two ids), which become linked pairs and as many others, see `nystrom_lab.data.lra.texts.linked_documents`.
        to: Folder to create. If it already holds this data set, it is reused.
        max_length: Bytes to keep of each text.
        text_field: Column or field of the first texts. Default: text1, Source1, sentence1, question1, premise, question
            or "#1 String", ignoring case.
        pair_field: Column or field of the second texts. Default: text2, Source2, sentence2, question2, hypothesis,
            sentence or "#2 String".
        label_field: Column or field of the labels. Default: label, class, Target, sentiment, gold_label, is_duplicate,
            Quality or score.
        val_share: Share of the training pairs that becomes val where the source has none; a tenth if not given. For
            documents and links it is the share of the documents.
        test_share: The same for test.
        seed: Decides which pairs those are.
        skip_empty: Leave out pairs with an empty text, and count them; otherwise they are an error.
        check_counts: Incomplete official files are an error; otherwise they are a warning.

    Returns:
        The folder, ready for `Retrieval`.

    Raises:
        ValueError: The source is missing or broken (file and line are named), a setting is impossible, or `to` is in
            use or cannot be written.
    """
    check_at_least("--max-length", max_length, 1)
    held_out = HeldOut(val_share=val_share, test_share=test_share, seed=seed)
    columns = own_columns(pairs=True, label_field=label_field, text_field=text_field, pair_field=pair_field)
    source = Path(source).expanduser()
    if source.is_dir() and (files := find_linked(source)) is not None:
        shares = {"val_share": val_share, "test_share": test_share}
        pairs = linked_source(files, max_length=max_length, seed=seed, **shares)
        # The shares are those of documents, and used.
        held_out = HeldOut(seed=seed)
    else:
        pairs = find_pairs(source, columns)
    return prepare_texts(
        pairs,
        to,
        task=TASK,
        texts=2,
        max_length=max_length,
        held_out=held_out,
        skip_empty=skip_empty,
        check_counts=check_counts,
    )


def find_pairs(source: Path, columns: TextColumns) -> Source:
    """Recognise a file or folder, or raise ValueError if it has an unsupported format or lacks an official file."""
    if official := published_files(source, OFFICIAL, folder="tsv_data", endings=("", *COMPRESSED)):
        return _official_source(official)
    if (own := find_arena_texts(source, columns)) is not None:
        return own
    came = "holds no readable pairs" if source.is_dir() else "has an unsupported format"
    raise ValueError(
        f"{source} {came if source.exists() else 'does not exist'}: name the folder of {', '.join(OFFICIAL.values())} "
        "(in tsv_data of https://storage.googleapis.com/long-range-arena/lra_release.gz), a file of pairs that ends in "
        f"{endings()}, a folder with such files named train, val and test or documents and links, or one "
        "saved by Hugging Face datasets."
    )


def _official_source(files: dict[str, Path]) -> Source:
    plain = labelled_files({split: [path] for split, path in files.items()}, COLUMNS, kind="official files")

    def rows() -> Iterator[LabelledRow]:
        for row in plain.rows():
            if (label := LABELS.get(row.label)) is None:
                raise ValueError(
                    f"{row.place}: the label is {row.label[:40]!r}: it must be 0 or 1, so the file is damaged."
                )
            yield row._replace(label=label)

    return replace(plain, rows=rows, published=RETRIEVAL_COUNTS)


class Retrieval(ByteSplit):
    """One split of prepared pairs: `input_ids` (byte + 1), one array for each of two documents, and `labels`.

    The two are of different lengths; padded to one they make the (2, tokens) that a pair classifier takes.
    """

    task: ClassVar[str] = TASK

    def __init__(self, folder: Path, split: str):
        super().__init__(folder, split)
        self._pairs = open_members(self.folder, split, task=self.task)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sample's longer document."""
        return np.diff(self._samples.offsets)[self._pairs].max(axis=1, initial=0)

    def _input_ids(self, index: int) -> Any:
        first, second = self._pairs[index].tolist()
        return self._tokens(first), self._tokens(second)
