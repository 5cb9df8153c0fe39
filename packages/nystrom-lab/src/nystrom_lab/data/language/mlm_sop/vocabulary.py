"""The tokenizer of prepared documents, and which of its tokens are special, are words, or end a sentence.

It is a fast tokenizer of Hugging Face, with a `tokenizer.json` or files that convert to one. It must have the tokens
that an instance is made of: [CLS], [SEP], [MASK] and [PAD], under any names.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from nystrom_lab.data.language.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NEEDED = ("cls_token", "sep_token", "mask_token", "pad_token")
# Marks of a word's beginning in the vocabularies of SentencePiece and of byte-level tokenizers.
WORD_MARKS = "▁Ġ"
SENTENCE_ENDS = frozenset(".!?…。！？｡؟।॥።")


@dataclass(frozen=True)
class Vocabulary:
    """The properties of a tokenizer that instances need; stored in the header of prepared data.

    Attributes:
        size: Size of the vocabulary, including gaps: the number of embeddings that a model needs.
        cls_token_id: Begins an instance.
        sep_token_id: Ends a segment.
        mask_token_id: Takes the place of a word.
        pad_token_id: Pads.
        no_words: Special tokens, and ids without a token: never masked, never used as a random replacement.
        sentence_ends: Tokens after which a segment may end.
    """

    size: int
    cls_token_id: int
    sep_token_id: int
    mask_token_id: int
    pad_token_id: int
    no_words: tuple[int, ...]
    sentence_ends: tuple[int, ...]

    @property
    def dtype(self) -> type[np.unsignedinteger[Any]]:
        """The smallest integer type that holds every token."""
        return np.uint16 if self.size <= 1 << 16 else np.uint32

    def table(self, tokens: tuple[int, ...]) -> NDArray[np.bool_]:
        """A boolean table that marks some of the tokens."""
        marked = np.zeros(self.size, dtype=bool)
        marked[[*tokens]] = True
        return marked


def vocabulary_of(facts: Mapping[str, Any]) -> Vocabulary | None:
    """Read a vocabulary from the header; None if it is invalid."""
    numbers = [facts.get(name) for name in ("size", *(f"{needed}_id" for needed in NEEDED))]
    lists = [facts.get(name) for name in ("no_words", "sentence_ends")]
    if not all(type(number) is int and number >= 0 for number in numbers):
        return None
    size, *special = cast("list[int]", numbers)
    if not all(isinstance(tokens, list) and all(type(token) is int for token in tokens) for tokens in lists):
        return None
    no_words, sentence_ends = (tuple(tokens) for tokens in cast("list[list[int]]", lists))
    if not all(0 <= token < size for token in (*special, *no_words, *sentence_ends)):
        return None
    if not {*special} <= {*no_words} or len({*no_words}) == size:
        return None
    cls, sep, mask, pad = special
    return Vocabulary(size, cls, sep, mask, pad, no_words, sentence_ends)


def open_tokenizer(folder: Path) -> "PreTrainedTokenizerBase":
    """Load the tokenizer of a folder; code in it is not run.

    Raises:
        ValueError: There is none, or it is broken, not a fast tokenizer, or lacks a token that instances need.
    """
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise ValueError(
            f"--tokenizer is {folder}, which is not a folder: name the folder of a model or a tokenizer, or make one"
            " with `nystrom tokenizer train`."
        )
    try:
        tokenizer = load_tokenizer(folder)
    except ValueError as error:
        raise ValueError(
            f"--tokenizer is {folder}, from which no tokenizer can be read ({str(error).rstrip('.')}): name a folder "
            "with a tokenizer.json, or make one with `nystrom tokenizer train`."
        ) from error
    if not tokenizer.is_fast:
        raise ValueError(f"--tokenizer is {folder}, whose tokenizer has no tokenizer.json: save it as a fast one.")
    if missing := [name for name in NEEDED if getattr(tokenizer, name) is None]:
        raise ValueError(
            f"--tokenizer is {folder}, which has no {', '.join(missing)}: masked words and sentence order need all of"
            f" {', '.join(NEEDED)}; name the tokenizer of a BERT or the like."
        )
    return tokenizer


def read_vocabulary(tokenizer: "PreTrainedTokenizerBase") -> Vocabulary:
    """Determine the roles of the tokens."""
    tokens = tokenizer.get_vocab()
    size = max(tokens.values()) + 1
    special = {*tokenizer.all_special_ids}
    no_words = special | ({*range(size)} - {*tokens.values()})
    ends = {number for token, number in tokens.items() if _ends_sentence(token)}
    cls, sep, mask, pad = (int(getattr(tokenizer, f"{name}_id")) for name in NEEDED)
    return Vocabulary(size, cls, sep, mask, pad, tuple(sorted(no_words)), tuple(sorted(ends - special)))


def _ends_sentence(token: str) -> bool:
    token = token.strip(WORD_MARKS)
    return bool(token) and {*token} <= SENTENCE_ENDS
