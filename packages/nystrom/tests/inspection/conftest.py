import pytest
import torch
from transformers import BertConfig, BertModel


@pytest.fixture
def sizes():
    """Sizes of a small encoder whose attention is far from uniform."""
    return {
        "vocab_size": 40,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,
    }


@pytest.fixture
def bert(sizes):
    """A random BERT in float64."""
    torch.manual_seed(0)
    return BertModel(BertConfig(**sizes)).double().eval()


@pytest.fixture
def one_head(bert):
    """A BERT that reads little but head 2 of its first layer, which attends to few keys."""
    with torch.no_grad():
        for layer in bert.encoder.layer:
            layer.attention.output.dense.weight *= 0.01
        first = bert.encoder.layer[0].attention
        first.output.dense.weight[:, 16:24] *= 1000
        first.self.query.weight[16:24] *= 3
    return bert


@pytest.fixture
def batch():
    """Two sequences, one of them padded."""
    ids = torch.randint(40, (2, 30), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "attention_mask": (torch.arange(30) < torch.tensor([[30], [19]])).long()}


@pytest.fixture
def other_batch():
    """A sequence of other tokens."""
    ids = torch.randint(40, (1, 30), generator=torch.Generator().manual_seed(2))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
