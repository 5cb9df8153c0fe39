"""A tiny BERT with its tokenizer, and a few labelled texts."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertModel, BertTokenizer

from nystrom_lab.config import FinetuneOptions
from nystrom_lab.training.finetune.finetune import finetune

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film", "the", "a", "plot", "very", "and", '"']


@pytest.fixture(scope="session")
def bert(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "bert"
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32,
        max_position_embeddings=48, initializer_range=0.3,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    BertTokenizer(vocab=str(folder / "vocab.txt")).save_pretrained(folder)
    return folder


def sentences(count: int, seed: int) -> list[tuple[str, int]]:
    """Texts of 3 to 30 words, labelled by the one word that tells."""
    draw = torch.Generator().manual_seed(seed)
    rows = []
    for i in range(count):
        words = [WORDS[w] for w in torch.randint(7, len(WORDS), (3 + 3 * (i % 9),), generator=draw)]
        words.insert(int(torch.randint(len(words), (1,), generator=draw)), ("bad", "good")[i % 2])
        rows.append((" ".join(words), i % 2))
    return rows


@pytest.fixture(scope="session")
def films(tmp_path_factory) -> Path:
    """48 + 20 texts with labels, and 10 without, in the files of SST-2; some hold quotes."""
    folder = tmp_path_factory.mktemp("films")
    for name, count, seed in (("train", 48, 0), ("dev", 20, 1)):
        rows = "".join(f"{text}\t{label}\n" for text, label in sentences(count, seed))
        (folder / f"{name}.tsv").write_text(f"sentence\tlabel\n{rows}")
    rows = "".join(f"{i}\t{text}\n" for i, (text, _) in enumerate(sentences(10, 2)))
    (folder / "test.tsv").write_text(f"index\tsentence\n{rows}")
    return folder


@pytest.fixture(scope="session")
def pairs_of_films(tmp_path_factory) -> Path:
    """Pairs with a number each, in the user's own columns."""
    folder = tmp_path_factory.mktemp("numbers")
    for name, count, seed in (("train", 24, 0), ("val", 10, 1), ("test", 10, 2)):
        rows = [
            {"one": text, "two": "a film", "likeness": label * 2.5 + 0.5 * (i % 3)}
            for i, (text, label) in enumerate(sentences(count, seed))
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="session")
def tuned(bert, films) -> Callable[..., Path]:
    """A run of six steps of eight texts, a checkpoint every three."""

    def run(to: Path, task: str | None = "sst2", **changes) -> Path:
        settings = {"model": str(bert), "data": (films,), "attention": "nystrom", "options": {"num_landmarks": 4}}
        settings |= {"to": to, "steps": 6, "batch_size": 8, "evaluate_every": 3, "learning_rate": 1e-3, "device": "cpu"}
        searched = changes["grid"].values() if "grid" in changes else {}
        settings = {name: value for name, value in settings.items() if name not in searched}
        return finetune(FinetuneOptions(task, **(settings | changes)))

    return run


@pytest.fixture(scope="session")
def whole(tmp_path_factory, tuned) -> Path:
    """An unbroken run; tests look at it and change nothing."""
    return tuned(tmp_path_factory.mktemp("whole") / "run")
