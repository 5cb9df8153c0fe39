"""Texts as blocks of tokens, which are kept when the work is interrupted: the same command continues from them.

A block is an uncompressed numpy archive with the tokens of some documents, end to end, how many tokens each has,
whether it is held out, and counts of skipped documents. It appears under its name when it is complete. The documents of
a block are tokenised together, by the threads of the package tokenizers.

Whether a document is held out is decided by a hash of its words and the seed. So it does not depend on the document's
place, on white space or on other documents, and equal documents are on the same side. The pieces of a long document
follow the first.

A data set `mlm` is built with the help of `.mlm.XXXXXXXXXXXX.kept` beside its place, where X is a hash of everything
that determines the data. It is locked while a process works with it. When the data set is complete its files are
removed, and those of other settings for the same place; a file that is not of this work stays.
"""

import hashlib
import json
import re
import sys
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from nystrom.progress import Progress
from nystrom.whole_files import check_no_link, whole_bytes
from nystrom_lab.data.sources.corpora import Corpus
from nystrom_lab.data.sources.documents import PIECE, TextPiece
from nystrom_lab.data.store.prepared_folder import cannot_be_made
from nystrom_lab.data.store.token_files import DataSettings
from nystrom_lab.whole_folders import remove_files

if TYPE_CHECKING:
    from tokenizers import Tokenizer

UNKNOWN = "<unk>"
BLOCK = 4 << 20
# A block, what a killed process was writing, and what version 0.4 kept.
_FILE = re.compile(r"\.?[0-9]{6}(-[0-9]{6})?\.(npz|finished)(\.[0-9a-f]{8}\.partial)?")


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


def is_held_out(text: bytes, plan: BlockPlan) -> bool:
    """Whether the document that begins with a piece is held out."""
    # A blank line before a long document moves the end of its first piece, so that the end is not looked at.
    words = b" ".join(text.split())[: PIECE // 2]
    digest = hashlib.blake2b(words, digest_size=8, key=str(plan.seed).encode()).digest()
    return int.from_bytes(digest, "little") < plan.held_out * 2**64


def tokenise(corpora: Sequence[Corpus], kept: Path, plan: BlockPlan, *, block_size: int = BLOCK) -> list[Path]:
    """Write the blocks of all corpora into a folder of finished work, and return their files in order.

    Blocks that exist are not made again; a block has so many bytes of text, at least.

    Raises:
        ValueError: A corpus is broken, or its first documents are all too short.
        OSError: A block cannot be written.
    """
    blocks: list[Path] = []
    with Progress("texts", len(corpora), unit="files") as bar:
        for pieces in _in_blocks(corpora, plan, block_size, bar):
            path = kept / f"{len(blocks):06}.npz"
            if not path.is_file():
                write_block(path, pieces, plan)
            if not blocks:
                _check_length(path, plan)
            blocks.append(path)
    return blocks


def _in_blocks(
    corpora: Sequence[Corpus], plan: BlockPlan, block_size: int, bar: Progress
) -> Iterator[list[tuple[TextPiece, bool]]]:
    """The pieces of documents, each marked as held out or not."""
    pieces: list[tuple[TextPiece, bool]] = []
    size, held_out = 0, False
    for corpus in corpora:
        for piece in corpus.pieces():
            if piece.begins:
                held_out = is_held_out(piece.text, plan)
            pieces.append((piece, held_out))
            size += len(piece.text)
            if size >= block_size:
                yield pieces
                pieces, size = [], 0
        bar.update()
    if pieces:
        yield pieces


def _check_length(first: Path, plan: BlockPlan) -> None:
    lengths, counts = read_block(first, "lengths", "counts")
    if not lengths.size:
        first.unlink()
        raise ValueError(
            f"none of the first {counts[0]} documents has {plan.min_tokens} tokens: a blank line ends a document, and"
            " a row is one; join them to longer ones, or lower --min-tokens."
        )


def write_block(path: Path, pieces: Sequence[tuple[TextPiece, bool]], plan: BlockPlan) -> None:
    """Write pieces, each marked as held out or not, as a block, or raise OSError."""
    parts: list[list[str]] = []
    broken = 0
    for piece, _ in pieces:
        text = piece.text.decode("utf-8", errors="replace")
        broken += text.encode() != piece.text
        parts.append(text.split(UNKNOWN) if piece.wikitext and plan.unknown is not None else [text])
    texts = [text for part in parts for text in part]
    encoded = iter(_tokenizer(plan.tokenizer).encode_batch_fast(texts, add_special_tokens=False))
    tokens, lengths, held_out, short, size = [], [], [], 0, 0
    for (piece, is_held), part in zip(pieces, parts, strict=True):
        ids = next(encoded).ids
        for _ in part[1:]:
            ids += [plan.unknown, *next(encoded).ids]
        if len(ids) < plan.min_tokens:
            short += 1
            continue
        tokens.append(np.array(ids, dtype=plan.dtype))
        lengths.append(len(ids))
        held_out.append(is_held)
        size += len(piece.text)
    block = {
        "tokens": np.concatenate([np.zeros(0, dtype=plan.dtype), *tokens]),
        "lengths": np.array(lengths, dtype=np.int64),
        "held_out": np.array(held_out, dtype=bool),
        # Documents that were too short, documents with bytes that are not UTF-8, and bytes of the texts kept.
        "counts": np.array([short, broken, size], dtype=np.int64),
    }
    with whole_bytes(path) as file:
        np.savez(file, **block)


def read_block(path: Path, *parts: str) -> list[NDArray[Any]]:
    """Read some parts of a block; a damaged one is removed, so that it is created again, and an OSError."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            return [stored[part] for part in parts]
    except (ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        path.unlink()
        raise OSError(f"{path} was damaged ({error}) and is removed: run the same command again.") from error


@cache
def _tokenizer(text: str) -> "Tokenizer":
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(text)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    # [SEP] in a text is five letters, not the end of a segment.
    tokenizer.encode_special_tokens = True
    return tokenizer


@contextmanager
def kept_folder(to: Path, settings: DataSettings) -> Iterator[Path]:
    """Give the folder of finished work, which is removed when the block ends without an error.

    Raises:
        ValueError: It cannot be created or is a link, or another process is using it.
    """
    digest = hashlib.sha256(json.dumps(dict(settings), sort_keys=True).encode()).hexdigest()[:12]
    folder = to.parent / f".{to.name}.{digest}.kept"
    check_no_link(folder)
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(_mark(folder), blocking=False)
        lock.acquire()
        folder.mkdir(exist_ok=True)
    except Timeout as error:
        raise ValueError(f"{to} is being made by another process: wait for it, or name another folder.") from error
    except OSError as error:
        raise cannot_be_made(to, error) from error
    try:
        yield folder
    except BaseException as error:
        # A mistake in the texts or the settings is one again with the same command.
        if any(folder.glob("*.npz")) and not isinstance(error, ValueError):
            print(f"notice: finished work is kept in {folder}; the same command continues from it.", file=sys.stderr)
        else:
            _remove(folder)
        raise
    else:
        _remove(folder)
        _remove_others(to)
    finally:
        lock.release()


def _mark(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")


def _remove(folder: Path) -> None:
    with suppress(OSError):
        remove_files(folder, [file.name for file in folder.iterdir() if _FILE.fullmatch(file.name)])
    _mark(folder).unlink(missing_ok=True)


def _remove_others(to: Path) -> None:
    named = re.compile(rf"\.{re.escape(to.name)}\.[0-9a-f]{{12}}\.kept")
    for folder in [path for path in to.parent.iterdir() if named.fullmatch(path.name) and path.is_dir()]:
        try:
            with FileLock(_mark(folder), blocking=False):
                _remove(folder)
        except (Timeout, OSError):
            # Another process is at work with it, or it is another user's.
            continue
