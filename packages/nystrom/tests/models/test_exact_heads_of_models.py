"""Models of this library whose layers have exact heads."""

import pytest
import torch

from nystrom.attention.plan import AttentionPlan, LayerChoice
from nystrom.models.configuration import EncoderConfig
from nystrom.models.encoder import EncoderModel


def test_a_saved_model_has_its_heads(tmp_path):
    plan = AttentionPlan((LayerChoice("nystrom", {"num_landmarks": 4, "exact_heads": [1]}), LayerChoice("nystrom", {})))
    config = EncoderConfig(
        hidden_size=24, num_attention_heads=4, num_hidden_layers=2, intermediate_size=8, vocab_size=9,
        attention="nystrom_plan", attention_options=plan.options,
    )  # fmt: skip
    model = EncoderModel(config).eval()
    model.save_pretrained(tmp_path)
    loaded, ids = EncoderModel.from_pretrained(tmp_path), torch.randint(9, (1, 40))
    assert loaded.encoder.layer[0].attention.self.method.options.exact_heads == (1,)
    assert torch.equal(loaded(ids)[0], model(ids)[0])
    with pytest.raises(ValueError, match="exact_heads names head 4; the layer has heads 0 to 3"):
        EncoderModel(
            EncoderConfig(**config.to_dict() | {"attention": "nystrom", "attention_options": {"exact_heads": [4]}})
        )


def test_dropped_weights_of_kernelized_attention_have_no_exact_heads():
    config = EncoderConfig(
        hidden_size=24, num_attention_heads=4, num_hidden_layers=1, intermediate_size=8, vocab_size=9,
        attention="kernelized", attention_options={"exact_heads": [1]}, design="authors", norm="pre",
        attention_probs_dropout_prob=0.1,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"exact_heads is \(1,\) and attention_probs_dropout_prob 0.1"):
        EncoderModel(config)
