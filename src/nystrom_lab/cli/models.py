"""Commands on models in folders: fill in masks, convert, export.

The rooms of models import torch and transformers as a whole, so that importing them registers the models. What the
command line asks for is therefore declared here, as functions that import those of the rooms when they are called; a
test holds the signatures equal.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import groupby
from json import dumps
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from nystrom_lab.cli.arguments import arguments_of, positional
from nystrom_lab.cli.method_options import arguments_with_method

if TYPE_CHECKING:
    from nystrom.integrations.convert import Conversion
    from nystrom.models.export.onnx_program import Exported


def fill_masks(words: list[str]) -> None:
    """Fill in the masks of texts."""
    fill_mask(**arguments_of(fill_mask, words, "fill-mask", text=positional(fill_mask, "text")))


def convert_model(words: list[str]) -> None:
    """Convert a BERT or RoBERTa, or lengthen a model."""
    source = positional(convert, "source")
    print(convert(**arguments_with_method(convert, words, "convert", default="nystrom", flat=True, source=source)))


def export_model(words: list[str]) -> None:
    """Write a model as ONNX."""
    print(export(**arguments_of(export, words, "export", folder=positional(export, "folder"))))


def fill_mask(
    text: str | None = None,
    *,
    model: str,
    file: Path | None = None,
    top_k: int = 5,
    json: bool = False,
    batch_size: int = 16,
    device: Literal["auto", "cpu", "cuda"] = "auto",
) -> None:
    """Fill in the [MASK] of a text, or of each line of a file.

    Args:
        text: The text; may hold several masks.
        model: Folder of a masked language model with its tokenizer, in this library's format or the published one.
        file: A file with one text per line in place of `text`; - reads standard input.
        top_k: Words per mask.
        json: Print one JSON object per word rather than tables.
        batch_size: Lines at a time; changes nothing but speed and memory.
        device: Where to run; "auto" takes a GPU if there is one.

    Raises:
        ValueError: Both a text and a file, or neither, or a file that is missing or no UTF-8 text.
    """
    if (text is None) == (file is None):
        raise ValueError(
            "fill-mask takes either a text or --file: name a text, a file of texts, or --file - for stdin."
        )
    if file is not None and str(file) != "-" and not file.is_file():
        raise ValueError(f"file is {file}, which is not a file; - reads standard input.")
    from dataclasses import asdict

    from transformers.utils import logging

    from nystrom.models.fill_mask import MaskFiller
    from nystrom_lab.report.table import Table, print_table

    logging.disable_progress_bar()
    filler = MaskFiller(model, top_k=top_k, batch_size=batch_size, device=device)
    with _lines(text, file, filler.check) as lines:
        fillings = (asdict(filling) for filling in filler.fill(lines))
        if json:
            for filling in fillings:
                print(dumps(filling, ensure_ascii=False))
            return
        for (line, mask), those in groupby(fillings, key=itemgetter("line", "mask")):
            heads = ["", "word", "probability", "text"]
            shown = [[str(each["rank"]), each["token"], f"{each['probability']:.2%}", each["text"]] for each in those]
            print_table(Table(f"line {line}, mask {mask}", heads, shown))
            print()


def convert(
    source: Path,
    to: Path,
    *,
    attention: str | None = None,
    options: Mapping[str, object] | None = None,
    num_landmarks: int | Literal["auto"] = "auto",
    plan: Path | None = None,
    conv_kernel_size: int | Literal["auto"] | None = "auto",
    max_position_embeddings: int | None = None,
    positions: Literal["repeat", "interpolate"] = "interpolate",
) -> "Conversion":
    """Make a Nyströmformer of a BERT or RoBERTa, or give a Nyströmformer another number of positions.

    Args:
        source: Folder of a BERT, RoBERTa, XLM-RoBERTa, CamemBERT or Nyströmformer: config.json, safetensors and, if
            there is one, its tokenizer.
        to: Folder for the new model; made, or empty.
        attention: Method, such as "near_far"; Nyström attention, or what a model of this library has, if not given.
        options: Options of the method. A model that gets near_far has the sizes of `near_far_sizes` for its longest
            input where they do not say others; a model that has it already keeps its own.
        num_landmarks: Landmarks m, of methods that have them; "auto" is 64, or what a Nyströmformer has.
        plan: File of a method for each layer, which `nystrom inspect --budget` writes, in place of one method for all.
        conv_kernel_size: Odd size of the skip convolution, None for none; "auto" is 33 with Nyström attention or a plan
            and none with another method, or what a Nyströmformer has, which cannot be changed.
        max_position_embeddings: The longest input, padding included; None is what the source has.
        positions: How more positions are made of the trained ones: "interpolate" in their table, or "repeat" it.

    Returns:
        What was mapped, left behind and started.

    Raises:
        ValueError: A source that cannot be read or represented, or options or a folder that do not fit.
    """
    from nystrom.integrations.convert import convert

    return convert(
        source,
        to,
        attention=attention,
        options=options,
        num_landmarks=num_landmarks,
        plan=plan,
        conv_kernel_size=conv_kernel_size,
        max_position_embeddings=max_position_embeddings,
        positions=positions,
    )


def export(
    folder: Path, to: Path, *, opset: int | None = None, token_type_ids: bool = False, check: bool = True
) -> "Exported":
    """Write the model of a folder as ONNX, for any batch and length.

    Args:
        folder: Where the model was saved, with config.json and model.safetensors.
        to: The file, such as model.onnx, which must not exist yet.
        opset: Version of ONNX, 18 to 22; None is what torch writes by default.
        token_type_ids: Also take segments; otherwise all tokens belong to the first.
        check: Run the file by onnxruntime, and compare it with the model.

    Raises:
        ValueError: A folder that cannot be read, or as for `export_onnx`.
        ArithmeticError: The file differs from the model.
    """
    from nystrom.models.export.onnx_program import export

    return export(folder, to, opset=opset, token_type_ids=token_type_ids, check=check)


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
