"""Text of the Long Range Arena: IMDB reviews as bytes, or a user's own labelled texts in their place.

A sample is a text's first `max_length` bytes, token = byte + 1 and 0 for padding; a class is the place of the text's
label among all labels (neg 0, pos 1). Both papers take 4,000 bytes, the official settings 1,000.

The published IMDB has train and test. The official task takes its test split for validation as well, so 25,000 / 25,000
/ 25,000, and a checkpoint chosen on val is chosen on the test. This is kept, the header says so, and `val_share` draws
val from the training texts instead. A user's own texts have splits of their own, or `held_out` draws them.

Source: Tay et al. (2021), arXiv:2011.04006; Maas et al. (2011), https://ai.stanford.edu/~amaas/data/sentiment/.
"""

from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from nystrom_lab.data.lra.texts.labelled_texts import HeldOut, prepare_texts
from nystrom_lab.data.sources.acl_imdb import ARCHIVE, FOLDER, IMDB_COUNTS, find_imdb
from nystrom_lab.data.sources.columns import TextColumns, own_columns
from nystrom_lab.data.sources.labelled_files import find_arena_texts
from nystrom_lab.data.sources.row_files import endings
from nystrom_lab.data.sources.source import Source
from nystrom_lab.data.store.split import ByteSplit

TASK = "text"


def prepare_text(
    source: Path,
    to: Path,
    *,
    max_length: int = 4000,
    text_field: str | None = None,
    label_field: str | None = None,
    imdb: bool = False,
    val_share: float | None = None,
    test_share: float | None = None,
    seed: int = 0,
    skip_empty: bool = False,
    check_counts: bool = True,
) -> Path:
    """Prepare labelled texts: the IMDB reviews of the Long Range Arena, or your own.

    Args:
        source: The folder aclImdb or its archive aclImdb_v1.tar.gz; a .csv, .tsv or .jsonl file, may be compressed, or
            a .parquet file; a folder with such files named train, val and test; or a folder saved by Hugging Face
            datasets.
        to: Folder to create. If it already holds this data set, it is reused.
        max_length: Bytes to keep of each text.
        text_field: Column or field of the texts. Default: text, sentence, review, content or Source, ignoring case.
        label_field: Column or field of the labels. Default: label, class, Target, sentiment, gold_label, is_duplicate,
            Quality or score.
        imdb: The files hold the IMDB reviews, so val is the test split and the counts are checked; the folder aclImdb
            and its archive always do.
        val_share: Share of the training texts that becomes val where the source has none; a tenth if not given.
        test_share: The same for test.
        seed: Decides which texts those are.
        skip_empty: Leave out empty texts, and count them; otherwise they are an error.
        check_counts: Incomplete IMDB reviews are an error; otherwise they are a warning.

    Returns:
        The folder, ready for `Text`.

    Raises:
        ValueError: The source is missing or broken (file and line are named), a setting is impossible, or `to` is in
            use or cannot be written.
    """
    held_out = HeldOut(val_share=val_share, test_share=test_share, seed=seed)
    columns = own_columns(pairs=False, label_field=label_field, text_field=text_field)
    texts = find_texts(Path(source).expanduser(), columns)
    if imdb and not texts.published:
        if {*texts.splits} - {"val"} != {"train", "test"}:
            raise ValueError(f"--imdb is set, and the source has {', '.join(texts.splits)}: IMDB has train and test.")
        texts = replace(texts, published=IMDB_COUNTS, equal_classes=True, val_is_test="val" not in texts.splits)
    return prepare_texts(
        texts,
        to,
        task=TASK,
        texts=1,
        max_length=max_length,
        held_out=held_out,
        skip_empty=skip_empty,
        check_counts=check_counts,
    )


def find_texts(source: Path, columns: TextColumns) -> Source:
    """Recognise a file or folder, or raise ValueError if it has an unsupported format."""
    texts = find_imdb(source) or find_arena_texts(source, columns) or find_imdb(source / ARCHIVE)
    if texts is not None:
        return texts
    came = "holds no readable texts" if source.is_dir() else "has an unsupported format"
    raise ValueError(
        f"{source} {came if source.exists() else 'does not exist'}: name the folder {FOLDER} or the archive {ARCHIVE}"
        f" (IMDB, https://ai.stanford.edu/~amaas/data/sentiment/{ARCHIVE}), a file that ends in {endings()},"
        " a folder with such files named train, val and test, or one saved by Hugging Face datasets."
    )


class Text(ByteSplit):
    """One split of prepared texts: `input_ids` (byte + 1) and `labels` (the class)."""

    task: ClassVar[str] = TASK
