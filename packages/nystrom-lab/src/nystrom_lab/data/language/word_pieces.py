"""A WordPiece tokenizer, as in BERT, trained on raw texts.

Words are split at white space and punctuation, lowercased and stripped of accents unless `cased`; the trainer merges
the most frequent neighbours until the vocabulary is full. The vocabulary is a function of the texts alone. The trainer
by itself numbers the letters inside words in hash-table order, which differs between runs and decides between equally
frequent pairs; so the texts are read twice, and the letters are passed to it in a fixed order.

Source: Schuster and Nakajima (2012); Devlin et al. (2019). The trainer is that of the package tokenizers.
"""

import sys
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nystrom.checks import check_at_least
from nystrom.progress import Progress
from nystrom_lab.data.language.tokenizer import save_tokenizer
from nystrom_lab.data.sources.corpora import Corpus, find_corpora
from nystrom_lab.data.store.prepared_folder import folder_to_fill

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
INSIDE = "##"
# Letters in the vocabulary, at most: rarer ones are unknown.
MOST_LETTERS = 6000
LEAST_SIZE = 100


def train_tokenizer(
    source: list[Path],
    to: Path,
    *,
    size: int = 30_000,
    cased: bool = False,
    min_frequency: int = 2,
    text_field: str | None = None,
) -> Path:
    """Train a WordPiece tokenizer on raw texts.

    Args:
        source: Files or folders of texts, as `nystrom data prepare mlm-sop` reads them.
        to: Folder to create, from which AutoTokenizer loads the tokenizer.
        size: Vocabulary size, including special tokens; smaller if the texts hold fewer.
        cased: Keep capitals and accents.
        min_frequency: Pieces that occur less often are not made.
        text_field: Column or field of the texts; if not given, text, content, sentence or review.

    Returns:
        The folder.

    Raises:
        ValueError: A source is missing, broken or without texts, a setting is impossible, or `to` is in use or cannot
            be written.
    """
    to = Path(to).expanduser().resolve()
    check_at_least("--size", size, LEAST_SIZE)
    check_at_least("--min-frequency", min_frequency, 1)
    if to.exists() and not (to.is_dir() and not any(to.iterdir())):
        raise ValueError(f"{to} already exists: name a folder that does not exist yet.")
    corpora, _ = find_corpora(source, text_field=text_field)
    with folder_to_fill(to) as partial:
        count = _train(corpora, partial, size=size, cased=cased, min_frequency=min_frequency)
        partial.replace(to)
    if count < size:
        print(f"notice: the texts give only {count} of the {size} requested tokens.", file=sys.stderr)
    return to


def _train(corpora: Sequence[Corpus], to: Path, *, size: int, cased: bool, min_frequency: int) -> int:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
    from transformers import BertTokenizer

    words = Tokenizer(models.WordPiece(unk_token=SPECIAL[1]))
    words.normalizer = normalizers.BertNormalizer(lowercase=not cased)
    words.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    begin, inside = _letters(corpora, words, size)
    trainer: Any = trainers.WordPieceTrainer(
        vocab_size=size,
        min_frequency=min_frequency,
        # The letters inside words are numbered before the trainer meets them; they are not special afterwards.
        special_tokens=[*SPECIAL, *(INSIDE + letter for letter in inside)],
        initial_alphabet=begin,
        limit_alphabet=len(begin),
        continuing_subword_prefix=INSIDE,
        show_progress=False,
    )
    words.train_from_iterator(_texts(corpora, "pieces"), trainer)
    vocabulary = words.get_vocab()
    tokenizer = BertTokenizer(vocab=vocabulary, do_lower_case=not cased)
    save_tokenizer(tokenizer, to)
    return len(vocabulary)


def _letters(corpora: Sequence[Corpus], words: "Tokenizer", size: int) -> tuple[list[str], list[str]]:
    """Find the most frequent letters, and those that occur inside words, each in alphabetical order."""
    counts: Counter[str] = Counter()
    inside: set[str] = set()
    blanks = _Blanks()
    for text in _texts(corpora, "letters"):
        normal = words.normalizer.normalize_str(text)
        counts.update(normal)
        inside.update(*(word[1:] for word in {*normal.translate(blanks).split()}))
    there = [(-count, letter) for letter, count in counts.items() if not letter.isspace()]
    kept = {letter for _, letter in sorted(there)[: min(MOST_LETTERS, size // 4)]}
    return sorted(kept), sorted(kept & inside)


class _Blanks(dict[int, str]):
    """Maps punctuation, at which BERT splits words, to blanks."""

    def __missing__(self, code: int) -> str:
        letter = chr(code)
        is_symbol = letter.isascii() and letter.isprintable() and not letter.isalnum()
        is_cut = is_symbol or unicodedata.category(letter)[0] == "P"
        self[code] = " " if is_cut else letter
        return self[code]


def _texts(corpora: Sequence[Corpus], what: str) -> Iterator[str]:
    for corpus in Progress(what, len(corpora), unit="files").over(corpora):
        for piece in corpus.pieces():
            text = piece.text.decode("utf-8", errors="replace")
            yield text.replace("<unk>", " ") if piece.wikitext else text
