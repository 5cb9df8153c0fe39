"""Blocks: files that hold some documents as tokens. Processes write blocks in parallel.

A block is an uncompressed numpy archive with the tokens of its documents, end to end, how many tokens each has, whether
it is held out, and counts of skipped documents. It appears under its name when it is complete.

Whether a document is held out is decided by a hash of its words and the seed. So it does not depend on the document's
place, on white space, on other documents or on the number of processes, and equal documents are on the same side. The
pieces of a long document follow the first.
"""

import hashlib
import os
import zipfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nystrom.whole_files import whole_bytes
from nystrom_lab.data.sources.documents import PIECE, TextPiece

if TYPE_CHECKING:
    from tokenizers import Tokenizer

UNKNOWN = "<unk>"


class BlockPlan(NamedTuple):
    """How documents become a block.

    Attributes:
        tokenizer: The tokenizer as JSON.
        unknown: Token of an unknown word, if there is one.
        dtype: Type of the tokens.
        min_tokens: Documents with fewer tokens are skipped.
        held_out: Share of the documents that are held out.
        seed: Determines which.
    """

    tokenizer: str
    unknown: int | None
    dtype: type[np.unsignedinteger[Any]]
    min_tokens: int
    held_out: float
    seed: int


class Block(NamedTuple):
    """Documents as tokens.

    Attributes:
        tokens: Tokens of all documents, concatenated.
        lengths: Tokens of each document.
        held_out: Whether a document is held out.
        counts: Documents that were too short, documents with bytes that are not UTF-8, and bytes of the texts kept.
    """

    tokens: NDArray[np.unsignedinteger]
    lengths: NDArray[np.int64]
    held_out: NDArray[np.bool_]
    counts: NDArray[np.int64]


def is_held_out(text: bytes, plan: BlockPlan) -> bool:
    """Whether the document that begins with a piece is held out."""
    # A blank line before a long document moves the end of its first piece, so that the end is not looked at.
    words = b" ".join(text.split())[: PIECE // 2]
    digest = hashlib.blake2b(words, digest_size=8, key=str(plan.seed).encode()).digest()
    return int.from_bytes(digest, "little") < plan.held_out * 2**64


def write_block(path: Path, pieces: Sequence[tuple[TextPiece, bool]], plan: BlockPlan) -> int:
    """Write pieces, each marked as held out or not, as a block, and return its number of documents.

    Raises:
        OSError: The file cannot be written.
    """
    tokens, lengths, held_out = [], [], []
    short = broken = size = 0
    for piece, is_held in pieces:
        try:
            text = piece.text.decode("utf-8")
        except UnicodeDecodeError:
            broken += 1
            text = piece.text.decode("utf-8", errors="replace")
        ids = _tokenise(text, plan, wikitext=piece.wikitext)
        if ids.size < plan.min_tokens:
            short += 1
            continue
        tokens.append(ids)
        lengths.append(ids.size)
        held_out.append(is_held)
        size += len(piece.text)
    block = Block(
        np.concatenate([np.zeros(0, dtype=plan.dtype), *tokens]),
        np.array(lengths, dtype=np.int64),
        np.array(held_out, dtype=bool),
        np.array([short, broken, size], dtype=np.int64),
    )
    with whole_bytes(path) as file:
        np.savez(file, **block._asdict())
    return len(lengths)


def read_block(path: Path, *parts: str) -> list[NDArray[Any]]:
    """Read some parts of a block.

    Raises:
        OSError: The file is damaged; it is removed, so that it is created again.
    """
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            return [stored[part] for part in parts]
    except (ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        path.unlink()
        raise OSError(f"{path} was damaged ({error}) and is removed: run the same command again.") from error


def leave_threads() -> None:
    """Let the tokenizer use one thread: each core has a process."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _tokenise(text: str, plan: BlockPlan, *, wikitext: bool) -> NDArray[np.unsignedinteger]:
    unknown = [] if plan.unknown is None else [plan.unknown]
    texts = text.split(UNKNOWN) if wikitext and unknown else [text]
    tokenizer = _tokenizer(plan.tokenizer)
    first, *others = (encoded.ids for encoded in tokenizer.encode_batch_fast(texts, add_special_tokens=False))
    for ids in others:
        first += unknown + ids
    return np.array(first, dtype=plan.dtype)


@cache
def _tokenizer(text: str) -> "Tokenizer":
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(text)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    # [SEP] in a text is five letters, not the end of a segment.
    tokenizer.encode_special_tokens = True
    return tokenizer
