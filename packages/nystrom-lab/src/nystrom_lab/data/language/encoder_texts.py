"""A model from a folder, and running text as its inputs."""

import hashlib
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from nystrom.checks import check_at_least
from nystrom.integrations.bert_names import more_positions, positions_of
from nystrom.integrations.model_loader import load_model, read_model_config
from nystrom_lab.data.sources.corpora import find_corpora
from nystrom_lab.data.sources.documents import CHECKED, check_text, whole_characters
from nystrom_lab.data.sources.row_files import is_row_file
from nystrom_lab.data.sources.unpacking import BROKEN, open_unpacked, unreadable

T = TypeVar("T")
# Tokens of a text where neither the user nor the model says.
_LENGTH = 512


class Prose(NamedTuple):
    """Running text, and its name with a checksum of the text."""

    name: str
    text: str


def load_encoder(folder: Path, *, length: int | None = None, decoders: bool = False) -> PreTrainedModel:
    """Load an encoder with its head, ours or of transformers, for evaluation.

    Args:
        length: Tokens of the texts that it will read, see `check_length`.
        decoders: Whether a decoder without an encoder will do.

    Raises:
        ValueError: No folder of a model, one without safetensors, of a type that transformers does not know, one with
            a decoder, or weights that do not fit its config.json; or a length beyond its positions.
    """
    if not folder.is_dir():
        raise ValueError(f"model is {folder}, which is not a folder; expected one with config.json and safetensors.")
    config = read_model_config(folder)
    names = config.architectures or ()
    causal = any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in names)
    causal = causal or getattr(config, "is_decoder", False)
    if getattr(config, "is_encoder_decoder", False) or (causal and not decoders):
        raise ValueError(
            f"model {folder} is a {config.model_type!r} with a decoder, which is causal; expected an encoder such as "
            "BERT. For an encoder-decoder, inspect model.get_encoder() with nystrom.inspection.inspect_model."
        )
    if length is not None:
        check_length(length, config, folder)
    return load_model(folder, config=config)[0]


def check_length(length: int | None, config: Any, folder: object = "FOLDER") -> int:
    """The tokens of a text, special ones included; None means the model's positions, but at most 512.

    Raises:
        ValueError: It is below 8, or beyond the model's positions.
    """
    most = positions_of(config)
    if length is None:
        length = _LENGTH if most is None else min(most, _LENGTH)
    check_at_least("length", length, 8)
    if most is not None and length > most:
        raise ValueError(
            f"length is {length} but the model has {most} positions: take fewer, or "
            f"{more_positions(config, length, folder)}."
        )
    return length


def read_batches(
    prose: Prose,
    tokenizer: PreTrainedTokenizerBase,
    model: PreTrainedModel,
    *,
    length: int | None,
    num_texts: int,
) -> list[dict[str, Int[Tensor, "1 n"]]]:
    """Cut running text into inputs of one length, spread evenly over it, each with the tokenizer's special tokens.

    Raises:
        ValueError: The cases of `check_length`, or too little text.
    """
    check_at_least("num_texts", num_texts, 1)
    length = check_length(length, model.config)
    around: Sequence[int] = tokenizer("")["input_ids"]  # pyright: ignore[reportAssignmentType]
    half, inside = len(around) // 2, length - len(around)
    before, after = (torch.tensor(part, dtype=torch.long) for part in (around[:half], around[half:]))
    windows = windows_of(tokens_of(prose, tokenizer), length=inside, windows=num_texts, name=prose.name)
    return [{"input_ids": torch.cat([before, window, after])[None]} for window in windows]


def hold_out(batches: Sequence[T]) -> tuple[Sequence[T], Sequence[T]]:
    """The texts to choose by, and the last quarter, one at least, to measure the choice on; none of a single text."""
    held = max(1, len(batches) // 4) if len(batches) > 1 else 0
    return batches[: len(batches) - held], batches[len(batches) - held :]


def tokens_of(prose: Prose, tokenizer: PreTrainedTokenizerBase) -> Int[Tensor, " tokens"]:
    """All tokens of a text, without special tokens."""
    # Tokenize by paragraphs: a tokenizer is slow on very long texts, and warns about those beyond its model's length.
    paragraphs = [part for part in prose.text.split("\n") if part.strip()]
    encoded: Any = tokenizer(paragraphs, add_special_tokens=False, truncation=False, verbose=False)
    return torch.tensor([number for paragraph in encoded["input_ids"] for number in paragraph])


def windows_of(
    tokens: Int[Tensor, " tokens"], *, length: int, windows: int, name: str
) -> Int[Tensor, "windows length"]:
    """Windows of consecutive tokens, spread evenly over a text whose name is for errors.

    Raises:
        ValueError: The text has fewer than length * windows tokens.
    """
    count = len(tokens)
    if count < length * windows:
        raise ValueError(
            f"the texts ({name}) have {count} tokens; expected at least {length * windows}, for {windows} x "
            f"{length}: name more or longer files of texts."
        )
    step = (count - length) // max(1, windows - 1)
    return torch.stack([tokens[i * step : i * step + length] for i in range(windows)])


# Characters that are read: enough for every study, so that a corpus of gigabytes is not.
_ENOUGH = 2_000_000


def read_prose(files: Sequence[Path], *, most: int = _ENOUGH) -> Prose:
    """Read running text from UTF-8 files and files of rows, compressed or not, up to so many characters.

    Without files it is the Python language reference (`pydoc_data.topics`).

    Raises:
        ValueError: A file is missing, empty, damaged or not text.
    """
    if not files:
        from pydoc_data.topics import topics

        text, name = "\n\n".join(topics[key] for key in sorted(topics)), f"reference of Python {_python()}"
    else:
        parts = [_read(file, most) for file in files]
        text, name = "\n\n".join(parts), " ".join(file.name for file in files)
    text = text[:most]
    return Prose(f"{name} (sha256 {hashlib.sha256(text.encode()).hexdigest()[:12]})", text)


def _read(file: Path, most: int) -> str:
    if is_row_file(file):
        return _of_rows(file, most)
    try:
        with open_unpacked(file) as stream:
            content = stream.read(most)
        check_text(file, content[:CHECKED])
        # The cut may be inside a character.
        text = content[: whole_characters(content) if len(content) == most else None].decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text ({error.reason} at byte {error.start}): name text files.") from None
    except BROKEN as error:
        raise unreadable(file, error) from error
    if not text.strip():
        raise ValueError(f"{file} is empty: name a file of prose.")
    return text


def _of_rows(file: Path, most: int) -> str:
    """The texts of a file of rows, a blank line between them."""
    text = ""
    try:
        (corpus,), _ = find_corpora([file])
        for piece in corpus.pieces():
            text += ("\n\n" if piece.begins and text else "") + piece.text.decode("utf-8", errors="replace")
            if len(text) >= most:
                break
    except ValueError as error:
        # Commands that read prose have no option for the name of the field.
        problem = str(error).rpartition(":")[0] or error
        raise ValueError(f"{problem}: write the texts to a text file, a blank line between them.") from error
    return text


def _python() -> str:
    return ".".join(platform.python_version_tuple()[:2])
