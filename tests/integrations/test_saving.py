"""A saved model comes back with its method, and one with exact attention as it was."""

import json

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModel, BertConfig, BertModel

from nystrom.integrations import check_attention, save_with_attention, set_attention


@pytest.fixture
def bert():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
    return BertModel(BertConfig(vocab_size=30, max_position_embeddings=40, initializer_range=0.3, **sizes)).eval()


def test_the_method_and_its_options_come_back(bert, tmp_path):
    ids = {"input_ids": torch.randint(30, (1, 30))}
    with torch.no_grad():
        exact = bert(**ids).last_hidden_state
        set_attention(bert, "nystrom", {"num_landmarks": 4})
        wanted = bert(**ids).last_hidden_state
        save_with_attention(bert, tmp_path / "kept")
        loaded = AutoModel.from_pretrained(tmp_path / "kept")
        assert_close(loaded(**ids).last_hidden_state, wanted, rtol=0, atol=0)
        assert not torch.allclose(wanted, exact, atol=1e-2)
    assert list(check_attention(loaded, ids).layers.values()) == [{"num_landmarks": 4}] * 2
    # What this is for.
    bert.save_pretrained(tmp_path / "forgotten")
    assert AutoModel.from_pretrained(tmp_path / "forgotten").config._attn_implementation == "sdpa"


def test_exact_attention_is_saved_as_transformers_does(bert, tmp_path):
    save_with_attention(bert, tmp_path / "one")
    bert.save_pretrained(tmp_path / "two")
    one, two = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("one", "two"))
    assert one == two
