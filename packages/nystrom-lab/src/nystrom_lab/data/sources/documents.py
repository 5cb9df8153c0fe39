"""Documents of plain text, read line by line.

A blank line ends a document. In WikiText, whose first line is a title, a document is an article: it begins with a
line ` = Title = ` after a blank one, and blank lines are inside it.

A document comes in pieces of at most one or two megabytes, cut at a blank if there is one, so that a text of any length
without a blank line fits in memory.

Source of WikiText: Merity et al. (2016), arXiv:1609.07843.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from nystrom_lab.data.sources.row_files import BOM, UTF_16
from nystrom_lab.data.sources.unpacking import BROKEN, open_unpacked, unreadable

PIECE = 1 << 20
CHECKED = 1 << 16
TITLE = re.compile(rb" ?= (?!=)(.*[^= ]) = ?\r?\n?")


class TextPiece(NamedTuple):
    """A document, or a part of a long one.

    Attributes:
        text: Bytes, which should be UTF-8.
        begins: Whether it begins a document; otherwise it continues that of the previous piece.
        wikitext: Whether <unk> in it means an unknown word.
    """

    text: bytes
    begins: bool = True
    wikitext: bool = False


def read_documents(path: Path) -> Iterator[TextPiece]:
    """Read the documents of a file of plain text, compressed or not, in pieces.

    Raises:
        ValueError: The beginning of the file is not UTF-8 text, or the file cannot be unpacked.
    """
    try:
        with open_unpacked(path) as file:
            start = file.peek(CHECKED)[:CHECKED]  # type: ignore[attr-defined]
            check_text(path, start)
            if start.startswith(BOM):
                file.read(len(BOM))
            yield from pieces_of_lines(_lines(file))
    except BROKEN as error:
        raise unreadable(path, error) from error


def check_text(path: Path, start: bytes) -> None:
    """Raise ValueError if a file does not begin like UTF-8 text."""
    if start[:2] in UTF_16:
        raise ValueError(f"{path} is UTF-16: save it as UTF-8.")
    if b"\0" in start:
        raise ValueError(f"{path} is not text (byte {start.index(0)} is 0): name files of text, or leave it out.")
    try:
        start[: whole_characters(start)].decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 text (byte {error.start} is 0x{start[error.start]:02x}): save it as UTF-8, or leave"
            " it out."
        ) from error


def pieces_of_lines(lines: Iterable[bytes]) -> Iterator[TextPiece]:
    """Join lines to documents; the first non-blank line shows whether they are WikiText."""
    held: list[bytes] = []
    size, begins, after_blank = 0, True, True
    wikitext: bool | None = None
    for line in lines:
        blank = line.isspace()
        if wikitext is None and not blank:
            wikitext = TITLE.fullmatch(line) is not None
        if after_blank and TITLE.fullmatch(line) is not None if wikitext else blank:
            yield from _piece(held, begins, wikitext)
            held, size, begins = [], 0, True
        after_blank = blank
        held.append(line)
        size += len(line)
        if size >= PIECE:
            text = b"".join(held)
            cut = last_cut(text)
            yield from _piece([text[:cut]], begins, wikitext)
            held, size, begins = [text[cut:]], len(text) - cut, False
    yield from _piece(held, begins, wikitext)


def pieces_of_text(text: bytes) -> Iterator[TextPiece]:
    """Split a document that is in memory as a whole."""
    begins = True
    while len(text) > PIECE:
        cut = last_cut(text[:PIECE])
        yield TextPiece(text[:cut], begins)
        text, begins = text[cut:], False
    if not text.isspace() and text:
        yield TextPiece(text, begins)


def last_cut(text: bytes) -> int:
    """Find where to cut: after the last blank, or else after the last complete character."""
    blank = max(text.rfind(b" "), text.rfind(b"\n"), text.rfind(b"\t"))
    return blank + 1 if blank > 0 else whole_characters(text)


def whole_characters(text: bytes) -> int:
    """Count the bytes up to the last complete UTF-8 character."""
    for back in range(1, min(4, len(text)) + 1):
        byte = text[-back]
        if byte & 0xC0 != 0x80:
            wanted = 1 if byte < 0x80 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(text) if back >= wanted else len(text) - back
    return len(text)


def _lines(file: BinaryIO) -> Iterator[bytes]:
    while line := file.readline(PIECE):
        yield line


def _piece(lines: list[bytes], begins: bool, wikitext: bool | None) -> Iterator[TextPiece]:
    text = b"".join(lines)
    if text and not text.isspace():
        yield TextPiece(text, begins, bool(wikitext))
