"""`EncoderConfig(track_error=True)`: an estimate for each layer and head, in no file and no state dict."""

import pytest
import torch

from nystrom.attention.tracked_error import tracked_errors
from nystrom.models import EncoderConfig, EncoderForSequenceClassification

SIZES = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
SIZES |= {
    "max_position_embeddings": 40,
    "initializer_range": 0.5,
    "attention_options": {"num_landmarks": 4},
    "conv_kernel_size": 3,
}


def model_of(**changes):
    torch.manual_seed(0)
    return EncoderForSequenceClassification(EncoderConfig(**SIZES, **changes))


def test_each_layer_has_an_estimate_in_training_alone_and_the_model_is_the_same():
    model, plain = model_of(track_error=True), model_of()
    assert model.load_state_dict(plain.state_dict(), strict=True)
    ids, keep = torch.arange(40).reshape(2, 20) % 20, torch.ones(2, 20, dtype=torch.bool)
    keep[1] = False
    model.eval()(ids, keep)
    assert all(error.isnan().all() for error in tracked_errors(model).values())
    logits = []
    for each in (model.train(), plain.train()):
        torch.manual_seed(1)
        logits.append(each(ids, keep).logits)
    assert torch.equal(*logits)
    errors = tracked_errors(model)
    layers = [f"nystromformer.encoder.layer.{number}.attention.self" for number in range(2)]
    assert list(errors) == layers
    assert all((error > 1e-3).all() for error in errors.values())


def test_no_file_holds_it(tmp_path):
    model_of(track_error=True).save_pretrained(tmp_path)
    assert "track_error" not in (tmp_path / "config.json").read_text()
    loaded = EncoderForSequenceClassification.from_pretrained(tmp_path)
    assert not loaded.config.track_error
    with pytest.raises(ValueError, match="has no layer that tracks its error"):
        tracked_errors(loaded)
    again = EncoderForSequenceClassification.from_pretrained(tmp_path, track_error=True).train()
    again(torch.ones(1, 9, dtype=torch.long))
    assert all(error.isfinite().all() for error in tracked_errors(again).values())


def test_another_method_begins_anew():
    model = model_of(track_error=True).train()
    model(torch.ones(1, 9, dtype=torch.long))
    model.set_attention("softmax", {})
    assert all(error.isnan().all() for error in tracked_errors(model).values())


def test_what_is_no_flag_raises():
    with pytest.raises(ValueError, match="track_error is 'yes'; expected True or False"):
        EncoderConfig(track_error="yes")
    with pytest.raises(ValueError, match="track_error is True, but attention is 'none'"):
        EncoderConfig(track_error=True, attention="none")
