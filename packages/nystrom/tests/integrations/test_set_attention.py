"""One part of a model attends by a method, and a check reports what ran."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from transformers import (
    CONFIG_MAPPING,
    AttentionInterface,
    AutoModel,
    BertConfig,
    DebertaConfig,
    FNetConfig,
    MPNetConfig,
    WhisperConfig,
)

import nystrom
from nystrom.attention.plan import AttentionPlan
from nystrom.inspection import inspect_model
from nystrom.integrations import check_attention, set_attention
from nystrom.models import EncoderConfig, EncoderModel

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 64}
IDS = {"input_ids": torch.randint(3, 60, (2, 21), generator=torch.Generator().manual_seed(1))}
# float32 through four layers.
CLOSE = {"rtol": 0, "atol": 1e-4}


def bert():
    torch.manual_seed(0)
    return AutoModel.from_config(BertConfig(**SIZES)).eval()


def whisper():
    config = WhisperConfig(
        d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=48, decoder_ffn_dim=48, vocab_size=64, num_mel_bins=8, max_source_positions=24,
        max_target_positions=24, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModel.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.15)
    sound = torch.randn(2, 8, 48, generator=torch.Generator().manual_seed(1))
    return model, {"input_features": sound, "decoder_input_ids": IDS["input_ids"][:, :5]}


def run(model, inputs):
    with torch.no_grad():
        return model(**inputs)[0]


def test_the_encoder_of_whisper_takes_a_method_and_its_decoder_does_not():
    model, inputs = whisper()
    exact = run(model, inputs)
    set_attention(model.get_encoder(), "nystrom", {"num_landmarks": 1000})
    assert_close(run(model, inputs), exact, **CLOSE)
    set_attention(model.get_encoder(), "nystrom", {"num_landmarks": 3})
    assert (run(model, inputs) - exact).abs().max() > 1e-3
    use = check_attention(model, inputs)
    assert use.method == "nystrom"
    assert use.layers == {f"encoder.layers.{i}.self_attn": {"num_landmarks": 3} for i in range(2)}
    assert use.exact == ()
    assert model.config._attn_implementation == "sdpa"
    assert "attention_options" not in vars(model.config)


def test_a_whole_model_goes_back_and_forth():
    model = bert()
    exact = run(model, IDS)
    set_attention(model, "linear")
    assert model.config._attn_implementation == "linear"
    assert list(check_attention(model, IDS).layers) == [f"encoder.layer.{i}.attention.self" for i in range(2)]
    set_attention(model, "sdpa")
    assert_close(run(model, IDS), exact, rtol=0, atol=0)


def test_the_check_separates_exact_layers_from_others_and_leaves_the_interface_unchanged():
    model = bert()
    set_attention(model, "nystrom", {"exact_layers": [1]})
    registered = AttentionInterface()["nystrom"]
    use = check_attention(model, IDS)
    assert (list(use.layers), use.exact) == (["encoder.layer.0.attention.self"], ("encoder.layer.1.attention.self",))
    assert AttentionInterface()["nystrom"] is registered
    with pytest.raises(ValueError, match="num_landmarks is 0"):
        check_attention(model, {**IDS, "num_landmarks": 0})
    assert AttentionInterface()["nystrom"] is registered


@pytest.mark.refuses
def test_a_model_that_takes_the_name_and_ignores_it_is_found_out():
    """DeBERTa would take the name and run exact attention, and MPNet fail somewhere in its own code."""
    for config in (DebertaConfig(**SIZES), MPNetConfig(**SIZES)):
        with pytest.raises(ValueError, match="has attention of its own"):
            AutoModel.from_config(config, attn_implementation="nystrom")
        model = AutoModel.from_config(config, attn_implementation="eager").eval()
        model.config._attn_implementation = "nystrom"
        with pytest.raises(ValueError, match=f"{type(model).__name__} has attention of its own"):
            check_attention(model, IDS)
        with pytest.raises(ValueError, match=f"{type(model).__name__} has attention of its own"):
            set_attention(model, "nystrom")
        deaf = AutoModel.from_config(config, attn_implementation="eager")
        with pytest.raises(ValueError, match=f"{type(model).__name__} has attention of its own"):
            deaf.set_attn_implementation("nystrom")
        assert deaf.config._attn_implementation == "eager"
        with pytest.raises(ValueError, match=f"{type(model).__name__} has attention of its own"):
            check_attention(deaf, IDS)


@pytest.mark.refuses
def test_an_input_longer_than_the_positions_is_named_with_the_way_out():
    model = bert()
    set_attention(model, "nystrom")
    with pytest.raises(ValueError, match=r"BertModel is given 600 tokens.*512 positions.*nystrom convert .* 600"):
        check_attention(model, {"input_ids": torch.ones(1, 600, dtype=torch.long)})


class HandWritten(nn.Module):
    def forward(self, q, k, v):
        return nn.functional.scaled_dot_product_attention(q, k, v)


@pytest.mark.refuses
def test_a_model_that_calls_exact_attention_itself_is_pointed_to_the_function():
    with pytest.raises(ValueError, match=r"HandWritten holds no .*call nystrom.nystrom_attention\(q, k, v\)"):
        nystrom.replace_attention(HandWritten())


@pytest.mark.refuses
def test_a_model_without_attention_is_found_out():
    model = AutoModel.from_config(FNetConfig(**SIZES), attn_implementation="nystrom").eval()
    with pytest.raises(ValueError, match="FNetModel is set to 'nystrom' but never asked for it"):
        check_attention(model, IDS)


@pytest.mark.refuses
def test_a_plan_that_keeps_all_layers_exact_is_found_out():
    model = AutoModel.from_config(BertConfig(**SIZES)).eval()
    set_attention(model, AttentionPlan((("softmax", {}), ("softmax", {}))))
    with pytest.raises(ValueError, match=r"so nothing is gained by the method: leave the plan out, or make one with"):
        check_attention(model, IDS)


@pytest.mark.refuses
def test_a_model_that_gains_nothing_is_found_out():
    if "ultrabert" not in CONFIG_MAPPING:
        pytest.skip("not in this version of transformers")
    config = CONFIG_MAPPING["ultrabert"](
        **SIZES, layer_types=["sliding_attention"] * 2, pad_token_id=0, bos_token_id=1, eos_token_id=2
    )
    model = AutoModel.from_config(config, attn_implementation="nystrom").eval()
    with pytest.raises(
        ValueError, match=r"ran exact attention in layers\.0\.\w+, layers\.1\.\w+, so nothing is gained"
    ):
        check_attention(model, IDS)


@pytest.mark.refuses
def test_parts_that_cannot_be_set_or_checked_raise():
    with pytest.raises(ValueError, match="BertModel is set to 'sdpa'; expected one method of"):
        check_attention(bert(), IDS)
    with pytest.raises(ValueError, match=r"method is 'linformer'; .* projections would have to be learned"):
        set_attention(bert(), "linformer")
    with pytest.raises(ValueError, match="option of linear 'num_landmarks' is unknown"):
        set_attention(bert(), "linear", {"num_landmarks": 3})
    with pytest.raises(ValueError, match=r"part is a TransformerEncoderLayer.*replace_attention"):
        set_attention(nn.TransformerEncoderLayer(8, 2), "nystrom")
    with pytest.raises(ValueError, match="part is a BertLayer, which is not a model"):
        set_attention(bert().encoder.layer[0], "nystrom")


def own_encoder(**changes):
    torch.manual_seed(0)
    return EncoderModel(EncoderConfig(**SIZES, initializer_range=0.3, **changes)).eval()


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("nystrom", {"num_landmarks": 2}),
        ("near_far", {"block_size": 4, "num_heavy": 2, "num_clusters": 3, "exact_up_to": 0}),
    ],
)
def test_a_model_of_this_library_runs_and_keeps_the_method_that_it_is_set_to(method, options, tmp_path):
    model = own_encoder(attention_options={"num_landmarks": 64})
    wanted = run(own_encoder(attention=method, attention_options=options), IDS)
    before = run(model, IDS)
    set_attention(model, method, options)
    assert_close(run(model, IDS), wanted, rtol=0, atol=0)
    assert (wanted - before).abs().max() > 1e-3
    model.save_pretrained(tmp_path)
    assert_close(run(EncoderModel.from_pretrained(tmp_path), IDS), wanted, rtol=0, atol=0)
    use = check_attention(model, IDS)
    places = [f"encoder.layer.{number}.attention.self" for number in range(2)]
    assert (use.method, use.exact) == (method, ())
    assert use.layers == dict.fromkeys(places, options)
    assert use.methods == dict.fromkeys(places, method)
    set_attention(model, "sdpa")
    # With a landmark per token Nyström attention is exact.
    assert_close(run(model, IDS), before, **CLOSE)
    with pytest.raises(ValueError, match=r"EncoderModel is set to 'softmax' but ran exact attention in encoder\.layer"):
        check_attention(model, IDS)


@pytest.mark.refuses
def test_what_would_change_nothing_in_a_model_of_this_library_raises():
    model = own_encoder()
    before = model.config.to_dict()
    with pytest.raises(ValueError, match=r"attn_implementation is 'near_far'.*call model\.set_attention\('nystrom'"):
        model.set_attn_implementation("near_far")
    with pytest.raises(ValueError, match="part is a EncoderLayer, and nothing in it has a configuration"):
        set_attention(model.encoder.layer[0], "sdpa")
    with pytest.raises(ValueError, match="option of linear 'num_landmarks' is unknown"):
        set_attention(model, "linear", {"num_landmarks": 3})
    assert model.config.to_dict() == before
    with pytest.raises(ValueError, match="EncoderModel is set to 'none' but never asked for it"):
        check_attention(own_encoder(attention="none"), IDS)
    with pytest.raises(ValueError, match="takes its attention from its configuration"):
        inspect_model(own_encoder(attention="none"), [IDS], methods=["nystrom-4"])
