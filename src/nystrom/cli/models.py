"""Commands on models in folders: fill in masks, convert, export."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from json import dumps
from pathlib import Path

from nystrom.cli.arguments import arguments_of, positional


def fill_masks(words: list[str]) -> None:
    """Fill in the masks of texts."""
    from dataclasses import asdict

    from nystrom.models.fill_mask import Device

    def fill_mask(
        text: str | None = None,
        *,
        model: str,
        file: Path | None = None,
        top_k: int = 5,
        json: bool = False,
        batch_size: int = 16,
        device: Device = "auto",
    ) -> None:
        """Fill in the [MASK] of a text, or of each line of a file.

        Args:
            text: The text; may hold several masks.
            model: Folder of a masked language model with its tokenizer, in this library's format or the published one.
            file: A file with one text per line in place of `text`; - reads standard input.
            top_k: Words per mask.
            json: Print one JSON object per word rather than tables.
            batch_size: Lines at a time; changes nothing but speed and memory.
            device: Where to run.
        """

    given = arguments_of(fill_mask, words, "fill-mask", text=positional(fill_mask, "text"))
    text, file, as_json = given.pop("text", None), given.pop("file", None), given.pop("json", False)
    if (text is None) == (file is None):
        raise ValueError(
            "fill-mask takes either a text or --file: name a text, a file of texts, or --file - for stdin."
        )
    if file is not None and str(file) != "-" and not file.is_file():
        raise ValueError(f"file is {file}, which is no file; - reads standard input.")

    from transformers.utils import logging

    from nystrom.models.fill_mask import MaskFiller
    from nystrom.report.fillings import print_fillings

    logging.disable_progress_bar()
    filler = MaskFiller(given.pop("model"), **given)
    with _lines(text, file, filler.check) as lines:
        fillings = (asdict(filling) for filling in filler.fill(lines))
        if not as_json:
            print_fillings(fillings)
            return
        for filling in fillings:
            print(dumps(filling, ensure_ascii=False))


@contextmanager
def _lines(text: str | None, file: Path | None, check: Callable[[Iterable[str]], int]) -> Iterator[Iterable[str]]:
    """Lines from where they are, with a bar on stderr for those of a file; a file is looked through first."""
    from tqdm import tqdm

    if text is not None:
        yield [text]
    elif file is None or str(file) == "-":
        yield tqdm(sys.stdin, unit=" lines", disable=sys.stdout.isatty() or None)
    else:
        with file.open(encoding="utf-8") as opened:
            try:
                total = check(opened)
            except UnicodeDecodeError as error:
                raise ValueError(f"{file} is no UTF-8 text ({error}).") from error
            opened.seek(0)
            yield tqdm(opened, unit=" lines", total=total, disable=sys.stdout.isatty() or None)


def convert_model(words: list[str]) -> None:
    """Convert a BERT or RoBERTa, or lengthen a model."""
    from nystrom.integrations.convert import convert

    print(convert(**arguments_of(convert, words, "convert", source=positional(convert, "source"))))


def export_model(words: list[str]) -> None:
    """Write a model as ONNX."""
    from nystrom.models.export.onnx_program import export

    print(export(**arguments_of(export, words, "export", folder=positional(export, "folder"))))
