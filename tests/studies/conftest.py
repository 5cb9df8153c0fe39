import pytest
import torch
from transformers import BertConfig, BertModel, BertTokenizer

from nystrom.studies.reproduce.study import Setting

WORDS = [
    "a",
    "the",
    "of",
    "and",
    "in",
    "one",
    "two",
    "three",
    "river",
    "stone",
    "map",
    "road",
    "hill",
    "church",
    "summer",
    "winter",
    "tree",
    "light",
]


@pytest.fixture(scope="session")
def tiny_bert(tmp_path_factory):
    """The folder of a BERT of three layers and four heads with 32 positions, at weights that make its scores matter."""
    folder = tmp_path_factory.mktemp("models") / "tiny-bert"
    vocabulary = folder.parent / "vocab.txt"
    vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]) + "\n")
    config = BertConfig(
        vocab_size=5 + len(WORDS),
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=32,
        initializer_range=0.3,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        BertModel(config).save_pretrained(folder)
    BertTokenizer(vocab=str(vocabulary)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def prose(tmp_path_factory):
    """A file of some 4,000 tokens of the tiny model, in lines."""
    file = tmp_path_factory.mktemp("texts") / "prose.txt"
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(len(WORDS), (200, 20), generator=generator)
    file.write_text("\n".join(" ".join(WORDS[number] for number in line) for line in numbers) + "\n")
    return file


@pytest.fixture
def tiny_setting(tiny_bert, prose):
    return Setting(model=tiny_bert, texts=(prose,))
