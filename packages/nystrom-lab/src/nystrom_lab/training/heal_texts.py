"""The texts that a model is healed on, read one after another."""

import hashlib
from collections.abc import Iterator

from nystrom_lab.config import HealOptions
from nystrom_lab.data.sources.corpora import find_corpora

# Characters of a token, at least, in texts that are read: those of more are cut before they are encoded.
_CHARACTERS = 16


def read_texts(options: HealOptions, *, length: int) -> Iterator[str]:
    """The texts, each once, cut to more characters than `length` tokens have."""
    corpora, _ = find_corpora(options.texts, text_field=options.text_field)
    most, known = length * _CHARACTERS, set()
    for corpus in corpora:
        held = ""
        for piece in corpus.pieces():
            if piece.begins and held.strip():
                yield from _new(held[:most], known)
                held = ""
            if len(held) < most:
                held += piece.text.decode("utf-8", errors="replace")
        if held.strip():
            yield from _new(held[:most], known)


def _new(text: str, known: set[bytes]) -> Iterator[str]:
    """A text that was not there before: one that is held out must not be learned."""
    digest = hashlib.sha256(text.encode()).digest()
    if digest not in known:
        known.add(digest)
        yield text
