"""A few repetitive documents as prepared data, and runs of a few steps on them."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from nystrom_lab.config import PretrainOptions
from nystrom_lab.data.language.mlm_sop.task import prepare_mlm_sop
from nystrom_lab.training.pretrain.pretrain import pretrain

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = ("one", "two", "three", "four", "five", "six", ".")
TINY = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}


@pytest.fixture(scope="session")
def tokenizer() -> Callable[..., Path]:
    """Make the folder of a tokenizer of these words."""
    from transformers import BertTokenizer

    def make(folder: Path, words=WORDS) -> Path:
        BertTokenizer(vocab={word: i for i, word in enumerate([*SPECIAL, *words])}).save_pretrained(str(folder))
        return folder

    return make


@pytest.fixture(scope="session")
def prepare(tokenizer) -> Callable[..., Path]:
    """Prepare documents that count from one to six, and begin anywhere."""

    def make(place: Path, documents: int = 60, words=WORDS) -> Path:
        draw = random.Random(0)
        texts = []
        for _ in range(documents):
            first, count = draw.randrange(7), draw.randrange(30, 90)
            texts.append(" ".join(words[(first + i) % len(words)] for i in range(count)))
        source = place / "texts.txt"
        source.write_text("\n\n".join(texts))
        folder = tokenizer(place / "tokenizer", words)
        return prepare_mlm_sop([source], place / "data", tokenizer=folder, length=32, workers=1)

    return make


@pytest.fixture(scope="session")
def documents(tmp_path_factory, prepare) -> Path:
    return prepare(tmp_path_factory.mktemp("documents"))


@pytest.fixture(scope="session")
def short_run(documents) -> Callable[..., Path]:
    """A run of eight steps of eight instances of 24 tokens, a checkpoint every two."""

    def run(to: Path, **changes) -> Path:
        settings = TINY | {"data": documents, "to": to, "preset": "demo", "length": 24, "steps": 8, "warmup_steps": 2}
        settings |= {"batch_size": 8, "evaluate_every": 2, "log_every": 1, "instances": 40, "device": "cpu"}
        settings |= {"attention": "nystrom", "options": {"num_landmarks": 8}, "conv_kernel_size": 3}
        return pretrain(PretrainOptions(**(settings | changes)))

    return run


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory, short_run) -> Path:
    """An unbroken run, with dropout; tests look at it and change nothing."""
    return short_run(tmp_path_factory.mktemp("unbroken") / "run")
