"""Prose as token numbers: from the user's files, or from the reference of the Python language that Python carries."""

import hashlib
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from nystrom.tasks.sources.documents import CHECKED, check_text, whole_characters
from nystrom.tasks.sources.unpacking import BROKEN, open_unpacked, unreadable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Characters that are read: enough for every study, so that a corpus of gigabytes is not.
_ENOUGH = 2_000_000


class Prose(NamedTuple):
    """Running text.

    Attributes:
        name: What it is, with a checksum of what was read.
        text: The text.
    """

    name: str
    text: str


def read_prose(files: Sequence[Path]) -> Prose:
    """Read running text, compressed or not.

    Args:
        files: Files in UTF-8; none means the reference of the Python language (`pydoc_data.topics`).

    Raises:
        ValueError: A file is missing, empty, damaged or no text.
    """
    if not files:
        from pydoc_data.topics import topics

        text, name = "\n\n".join(topics[key] for key in sorted(topics)), f"reference of Python {_python()}"
    else:
        parts = [_read(file) for file in files]
        text, name = "\n\n".join(parts), " ".join(file.name for file in files)
    text = text[:_ENOUGH]
    return Prose(f"{name} (sha256 {hashlib.sha256(text.encode()).hexdigest()[:12]})", text)


def tokens_of(prose: Prose, tokenizer: "PreTrainedTokenizerBase") -> Int[Tensor, " tokens"]:
    """All tokens of a text, without special tokens."""
    # By paragraphs: a tokenizer is slow on very long texts, and warns about those beyond its model's length.
    paragraphs = [part for part in prose.text.split("\n") if part.strip()]
    encoded: Any = tokenizer(paragraphs, add_special_tokens=False, truncation=False, verbose=False)
    return torch.tensor([number for paragraph in encoded["input_ids"] for number in paragraph])


def windows_of(
    tokens: Int[Tensor, " tokens"], *, length: int, windows: int, name: str
) -> Int[Tensor, "windows length"]:
    """Windows of consecutive tokens, spread evenly over a text.

    Args:
        tokens: The text.
        length: Tokens n of a window.
        windows: How many.
        name: What the text is called.

    Raises:
        ValueError: The text has fewer than length * windows tokens.
    """
    count = len(tokens)
    if count < length * windows:
        raise ValueError(
            f"the texts ({name}) have {count} tokens; expected at least {length * windows}, for {windows} x "
            f"{length}: name more or longer files with --texts."
        )
    step = (count - length) // max(1, windows - 1)
    return torch.stack([tokens[i * step : i * step + length] for i in range(windows)])


def _read(file: Path) -> str:
    try:
        with open_unpacked(file) as stream:
            content = stream.read(_ENOUGH)
        check_text(file, content[:CHECKED])
        # The cut may be inside a character.
        text = content[: whole_characters(content) if len(content) == _ENOUGH else None].decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{file} is no text in UTF-8 ({error.reason} at byte {error.start}): name files of text."
        ) from None
    except BROKEN as error:
        raise unreadable(file, error) from error
    if not text.strip():
        raise ValueError(f"{file} is empty: name a file of prose.")
    return text


def _python() -> str:
    return ".".join(platform.python_version_tuple()[:2])
