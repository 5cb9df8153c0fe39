"""Commands on models in folders: fill in masks, convert, export."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, asdict, dataclass
from itertools import groupby
from json import dumps
from operator import itemgetter
from pathlib import Path
from typing import Literal

from nystrom.command_options import ConvertOptions, ExportOptions, taking
from nystrom_lab.cli.arguments import arguments_of, positional
from nystrom_lab.cli.method_options import arguments_with_method


def fill_masks(words: list[str]) -> None:
    """Fill in the masks of texts."""
    fill_mask(**arguments_of(fill_mask, words, "fill-mask", text=positional(fill_mask, "text")))


def convert_model(words: list[str]) -> None:
    """Convert a BERT or RoBERTa, or lengthen a model."""
    source = positional(ConvertOptions, "source")
    asked = arguments_with_method(ConvertOptions, words, "convert", default="nystrom", flat=True, source=source)
    from nystrom.integrations.convert import convert

    print(convert(**asked))


def export_model(words: list[str]) -> None:
    """Write a model as ONNX."""
    asked = arguments_of(ExportOptions, words, "export", folder=positional(ExportOptions, "folder"))
    from nystrom.models.export.onnx_program import export

    print(export(**asked))


@dataclass(frozen=True)
class FillMaskOptions:
    """Options of `nystrom fill-mask`.

    Attributes:
        text: The text, with one or more masks.
        model: Folder of a masked language model with its tokenizer, in this library's format or the published one.
        file: A file with one text per line, instead of `text`; - reads standard input.
        top_k: Words per mask.
        json: Print one JSON object per word instead of tables.
        batch_size: Lines per batch; affects only speed and memory.
        device: Device; "auto" uses a GPU if there is one.
    """

    text: str | None = None
    _: KW_ONLY
    model: str
    file: Path | None = None
    top_k: int = 5
    json: bool = False
    batch_size: int = 16
    device: Literal["auto", "cpu", "cuda"] = "auto"


@taking(FillMaskOptions)
def fill_mask(asked: FillMaskOptions) -> None:
    """Fill in the [MASK] of a text, or of each line of a file.

    Raises:
        ValueError: Both a text and a file, or neither, or a file that is missing or not UTF-8 text.
    """
    text, file = asked.text, asked.file
    if (text is None) == (file is None):
        raise ValueError(
            "fill-mask takes either a text or --file: name a text, a file of texts, or --file - for stdin."
        )
    if file is not None and str(file) != "-" and not file.is_file():
        raise ValueError(f"file is {file}, which is not a file; - reads standard input.")
    from transformers.utils import logging

    from nystrom.models.fill_mask import MaskFiller
    from nystrom_lab.report.table import Table, print_table

    logging.disable_progress_bar()
    filler = MaskFiller(asked.model, top_k=asked.top_k, batch_size=asked.batch_size, device=asked.device)
    with _lines(text, file, filler.check) as lines:
        fillings = (asdict(filling) for filling in filler.fill(lines))
        if asked.json:
            for filling in fillings:
                print(dumps(filling, ensure_ascii=False))
            return
        for (line, mask), those in groupby(fillings, key=itemgetter("line", "mask")):
            heads = ["", "word", "probability", "text"]
            shown = [[str(each["rank"]), each["token"], f"{each['probability']:.2%}", each["text"]] for each in those]
            print_table(Table(f"line {line}, mask {mask}", heads, shown))
            print()


@contextmanager
def _lines(text: str | None, file: Path | None, check: Callable[[Iterable[str]], int]) -> Iterator[Iterable[str]]:
    """Lines from where they are, with a bar on stderr for those of a file; a file is looked through first."""
    from nystrom.progress import Progress

    if text is not None:
        yield [text]
    elif file is None or str(file) == "-":
        yield Progress("fill-mask", unit="lines", shown=not sys.stdout.isatty()).over(sys.stdin)
    else:
        with file.open(encoding="utf-8") as opened:
            try:
                total = check(opened)
            except UnicodeDecodeError as error:
                raise ValueError(f"{file} is not UTF-8 text ({error}).") from error
            opened.seek(0)
            yield Progress("fill-mask", total, unit="lines", shown=not sys.stdout.isatty()).over(opened)
