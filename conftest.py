"""Fixtures of several rooms: small models of transformers, a tokenizer of a few lines, and small data sets."""

import errno
import functools
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
import torch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

if not torch.cuda.is_available():
    # Triton reads this when it is first imported: its kernels then run on the CPU.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# pytest-xdist runs a worker per core; a second thread in each would only wait.
torch.set_num_threads(1)

# No test depends on the clock: an example is not wrong because a busy machine is slow.
hypothesis.settings.register_profile("untimed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("untimed")
# --hypothesis-profile few: for laws that have been drawn in full elsewhere.
hypothesis.settings.register_profile("few", hypothesis.settings.get_profile("untimed"), max_examples=3)

SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
    "conv_kernel_size": 5,
    "num_labels": 3,
    # So large that attention is far from uniform.
    "initializer_range": 0.3,
}


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    """Commands with --threads set those of the process: sums of the tests after it would differ in the last bit."""
    yield
    torch.set_num_threads(1)


@pytest.fixture
def no_space(monkeypatch):
    """The disk is full for each file that is written whole."""

    def sync(path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("nystrom.whole_files.sync", sync)


# Words of the tiny model's vocabulary.
WORDS = ["a", "the", "of", "and", "in", "one", "two", "three", "river", "stone", "map", "road", "hill", "church"]
WORDS += ["summer", "winter", "tree", "light"]


def pytest_configure(config: pytest.Config) -> None:
    """Refuse `-m gpu` where there is none: tests of full sizes are far too slow in the interpreter."""
    if config.option.markexpr == "gpu" and not torch.cuda.is_available():
        raise pytest.UsageError("-m gpu needs a CUDA device, and torch finds none here: leave it out.")


def pytest_collection_finish() -> None:
    """Leave what was imported out of each later collection of garbage; Trainer asks for a whole one after each run."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def tiny_bert(tmp_path_factory):
    """The folder of a BERT of three layers and four heads with 32 positions, at weights that make its scores matter."""
    from transformers import BertConfig, BertModel, BertTokenizer

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
def published(tmp_path) -> Callable[..., tuple[Any, Path]]:
    """Make a model with a class of transformers and save it; returns the model and its folder."""
    import transformers
    from transformers import NystromformerConfig

    def make(head: str = "ForMaskedLM", **changes: Any) -> tuple[Any, Path]:
        torch.manual_seed(0)
        lengths = {"num_landmarks": 4, "segment_means_seq_len": 16}
        config = NystromformerConfig(**(SIZES | lengths | changes))
        model = getattr(transformers, f"Nystromformer{head}")(config).eval()
        folder = tmp_path / f"published-{head}"
        model.save_pretrained(folder)
        return model, folder

    return make


@pytest.fixture(scope="session")
def tokenizer() -> "PreTrainedTokenizerBase":
    """A tokenizer of ALBERT's kind, as in the published checkpoints."""
    from transformers import AlbertTokenizer

    lines = ["paris is the capital of france .", "berlin is the capital of germany .", "a mask hides a word ."]
    return AlbertTokenizer().train_new_from_iterator(lines * 20, vocab_size=80, show_progress=False)


@pytest.fixture(scope="session")
def mask_filler(tmp_path_factory, tokenizer) -> Path:
    """A small masked LM that was trained on nothing, with its tokenizer."""
    from nystrom.models import EncoderConfig, EncoderForMaskedLM

    torch.manual_seed(0)
    at = tmp_path_factory.mktemp("fill") / "model"
    config = EncoderConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=64, conv_kernel_size=5, initializer_range=0.3, pad_token_id=tokenizer.pad_token_id,
        attention_options={"num_landmarks": 5},
    )  # fmt: skip
    EncoderForMaskedLM(config).save_pretrained(at)
    tokenizer.save_pretrained(at)
    return at


@pytest.fixture(scope="session")
def run_on_ranks(tmp_path_factory):
    """Run the checks of a file on some ranks, all or some of them; gives the errors of those that ran, by name."""

    def run(checks: Path, size: int, names: Collection[str] = ()) -> dict[str, list[str]]:
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        folder = tmp_path_factory.mktemp("ranks")
        program = Path(__file__).parent / "packages" / "nystrom" / "tests" / "ranks.py"
        command = [sys.executable, "-W", "error::UserWarning:nystrom", str(program)]
        ranks = [
            subprocess.Popen(
                [*command, str(rank), str(size), str(folder), str(checks), *names],
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(size)
        ]
        try:
            said = [rank.communicate(timeout=400)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        for rank, process in enumerate(ranks):
            assert process.returncode == 0, said[rank]
        ended = [json.loads((folder / f"ended-{rank}.json").read_text()) for rank in range(size)]
        return {
            name: [f"rank {rank}:\n{each[name]}" for rank, each in enumerate(ended) if each.get(name)]
            for name in ended[0]
            if all(name in each for each in ended)
        }

    return run


@pytest.fixture
def hooks() -> Iterator[ExitStack]:
    """Holds the hooks of a test, and removes them at its end."""
    with ExitStack() as handles:
        yield handles


@pytest.fixture
def after_forward(monkeypatch) -> Callable[[type, Callable], None]:
    """Call a function with each module of a class, its keyword inputs and its output; what it gives replaces that.

    No hook on all modules: of one that sees keywords torch keeps a trace when it is removed, and then warns in every
    later test that compiles a module.
    """

    def add(kind: type, call: Callable) -> None:
        forward = kind.forward

        @functools.wraps(forward)
        def called(module, *given, **named):
            output = forward(module, *given, **named)
            replaced = call(module, named, output)
            return output if replaced is None else replaced

        monkeypatch.setattr(kind, "forward", called)

    return add
