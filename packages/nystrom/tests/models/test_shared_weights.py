"""One Module of a method can serve all layers, as Linformer's projections do in Nyströmformer's code."""

import pytest
import torch
from torch.testing import assert_close

from nystrom.models import EncoderConfig, EncoderForSequenceClassification

SIZES = {
    "vocab_size": 20,
    "hidden_size": 8,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "max_position_embeddings": 16,
    "norm": "pre",
    "attention": "linformer",
    "attention_options": {"num_features": 4, "max_length": 16, "per_head": True, "share_key_value": True},
    "num_labels": 3,
}


def model_of(**changes):
    torch.manual_seed(0)
    return EncoderForSequenceClassification(EncoderConfig(**(SIZES | {"share_attention_weights": True} | changes)))


def projections(model):
    return [name for name, _ in model.named_parameters() if "projection" in name]


def test_the_layers_have_one_parameter_that_all_of_them_train():
    model, ids = model_of(), torch.arange(16)[None]
    shared, alone = projections(model), projections(model_of(share_attention_weights=False))
    assert (len(shared), len(alone)) == (1, 3)
    weight = model.get_parameter(shared[0])
    assert all(
        p is weight for layer in model.nystromformer.encoder.layer for p in layer.attention.self.method.parameters()
    )
    before = model(ids).logits
    with torch.no_grad():
        # The last layer alone, with other projections.
        model.nystromformer.encoder.layer[0].attention.output.dense.weight.zero_()
        model.nystromformer.encoder.layer[1].attention.output.dense.weight.zero_()
        middle = model(ids).logits
        weight += 1
    assert not torch.equal(model(ids).logits, middle)
    assert not torch.equal(before, middle)
    assert "projection" in " ".join(model.state_dict())


def test_a_saved_model_has_the_weights_once_and_loads_to_the_same(tmp_path):
    model, ids = model_of().eval(), torch.arange(16)[None]
    model.save_pretrained(tmp_path)
    loaded = EncoderForSequenceClassification.from_pretrained(tmp_path)
    assert loaded.config.share_attention_weights is True
    assert projections(loaded) == projections(model)
    assert_close(loaded(ids).logits, model(ids).logits, rtol=0, atol=0)


def test_a_method_without_weights_has_none_to_share():
    with pytest.raises(ValueError, match="share_attention_weights is True, but nystrom has no learned weights"):
        model_of(attention="nystrom", attention_options={})
