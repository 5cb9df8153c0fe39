"""Fixtures of several rooms: small models of transformers, and a tokenizer that was trained on a few lines."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

if not torch.cuda.is_available():
    # Triton reads this when it is first imported: its kernels then run on the CPU.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# pytest-xdist runs a worker per core; a second thread in each would only wait.
torch.set_num_threads(1)

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


@pytest.fixture
def published(tmp_path) -> Callable[..., tuple[Any, Path]]:
    """Make a model with a class of transformers and save it; gives the model and its folder."""
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
    """ALBERT's kind of tokenizer, as the published checkpoints have it."""
    from transformers import AlbertTokenizer

    lines = ["paris is the capital of france .", "berlin is the capital of germany .", "a mask hides a word ."]
    return AlbertTokenizer().train_new_from_iterator(lines * 20, vocab_size=80, show_progress=False)
