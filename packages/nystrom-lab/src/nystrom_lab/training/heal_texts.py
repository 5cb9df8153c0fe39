"""The texts that a model is healed on: read one after another, encoded, and a part of them held out."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np

from nystrom_lab.data.language.labelled.splits import TextSplit
from nystrom_lab.data.sources.corpora import find_corpora
from nystrom_lab.training.finetune.encoding import EncodedSplit
from nystrom_lab.training.heal_settings import HealSettings

# Characters of a token, at least, in texts that are read: those of more are cut before they are encoded.
_CHARACTERS = 16
# Texts that are encoded at a time.
_AT_ONCE = 64


class Samples:
    """Texts as tokens.

    Args:
        rows: The tokens of each.

    Attributes:
        lengths: Tokens of each.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]]):
        self.rows = rows
        self.lengths = np.array([len(row["input_ids"]) for row in rows], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int, /) -> Mapping[str, Any]:
        return self.rows[index]


def read_samples(settings: HealSettings, tokenizer: Any) -> tuple[Samples, Samples]:
    """The texts to learn from, as many as the run can read, and those that are held out.

    Raises:
        ValueError: There are too few that are long enough.
    """
    rows: list[Mapping[str, Any]] = []
    read, longest = 0, 0
    wanted, least = settings.steps * settings.batch_size + settings.held_out, settings.batch_size + settings.held_out
    texts = _texts(settings)
    while len(rows) < wanted and (part := list(islice(texts, _AT_ONCE))):
        encoded = EncodedSplit(TextSplit(part, None, None), tokenizer, max_length=settings.length, segments=False)
        rows += [encoded[i] for i in range(len(part)) if encoded.lengths[i] >= settings.shortest]
        read, longest = read + len(part), max(longest, int(encoded.lengths.max()))
    if len(rows) < least:
        raise ValueError(
            f"{len(rows)} of {read} texts have at least {settings.shortest} tokens, the longest {longest}; expected "
            f"{least}, {settings.held_out} of them held out: name more or longer texts (in a plain text file a blank "
            "line ends one), or take --shortest or --length smaller."
        )
    rows = rows[:wanted]
    order = np.random.default_rng(0).permutation(len(rows)).tolist()
    parts = order[settings.held_out :], order[: settings.held_out]
    train, held_out = (Samples([rows[i] for i in sorted(part)]) for part in parts)
    return train, held_out


def digest_of(*splits: Samples) -> str:
    """A digest of the tokens, by which a run knows its texts."""
    digest = hashlib.sha256()
    for split in splits:
        digest.update(split.lengths.tobytes())
        for row in split.rows:
            digest.update(row["input_ids"].tobytes())
    return digest.hexdigest()[:16]


def _texts(settings: HealSettings) -> Iterator[str]:
    """The texts, each once, cut to more characters than the tokens that are read of it."""
    corpora, _ = find_corpora(settings.texts, text_field=settings.text_field)
    most, known = settings.length * _CHARACTERS, set()
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
