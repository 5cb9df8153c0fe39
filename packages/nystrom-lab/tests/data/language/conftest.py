"""A tokenizer of a few words, and documents made of them."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = ("the", "cat", "dog", "sat", "ran", "on", "a", "mat", "hill", "##s", "red", "blue", ".", "?", "=", "<", ">")


@pytest.fixture(scope="session")
def words(tmp_path_factory) -> Path:
    """The folder of a BERT tokenizer; as those that were used it truncates and pads."""
    from transformers import BertTokenizer

    folder = tmp_path_factory.mktemp("words")
    tokenizer = BertTokenizer(vocab={word: number for number, word in enumerate([*SPECIAL, *WORDS])})
    tokenizer.backend_tokenizer.enable_truncation(7)
    tokenizer.backend_tokenizer.enable_padding(length=9)
    tokenizer.save_pretrained(str(folder))
    return folder


@pytest.fixture(scope="session")
def sentences() -> Callable[..., str]:
    """Make a text of so many sentences of five tokens."""

    def make(count: int, seed: int = 0) -> str:
        rng = random.Random(seed)
        return " ".join(f"{' '.join(rng.choices(WORDS[:8], k=4))}." for _ in range(count))

    return make


@pytest.fixture
def texts(tmp_path, sentences) -> Path:
    """60 documents of 25 to 320 tokens, apart by blank lines."""
    documents = [sentences(5 + number, number) for number in range(60)]
    path = tmp_path / "texts.txt"
    path.write_text("\n\n".join(documents) + "\n")
    return path
