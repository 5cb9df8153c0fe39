"""The mask that a model asks for reaches its layers: if the two differ the layer raises."""

import pytest
import torch
from torch.testing import assert_close
from transformers import CONFIG_MAPPING, AutoModel, Gemma3TextConfig, GemmaConfig
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    blockwise_overlay,
    causal_mask_function,
    or_masks,
    packed_sequence_mask_function,
    remap_positions_for_packed_sequence,
)

from nystrom.integrations import check_attention
from nystrom.integrations.attention_interface import attend_layer
from nystrom.integrations.mask_interface import make_mask

SIZES = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GEMMA = SIZES | {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
GEMMA |= {"intermediate_size": 48, "head_dim": 8, "use_bidirectional_attention": True}
SEQ2SEQ = SIZES | {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4}
SEQ2SEQ |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "decoder_start_token_id": 1}
SERIES = {"prediction_length": 8, "context_length": 16, "lags_sequence": [1, 2], "num_time_features": 1}
IDS = torch.randint(3, 60, (2, 30), generator=torch.Generator().manual_seed(1))
PADDED = (torch.arange(30) < torch.tensor([[30], [21]])).long()
# float32 through two layers.
CLOSE = {"rtol": 0, "atol": 1e-5}


def make(config, implementation="eager"):
    torch.manual_seed(0)
    model = AutoModel.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                # Scores far from zero: otherwise every token is the mean of all, with any mask.
                parameter.normal_(std=0.15)
    model.set_attn_implementation(implementation)
    return model


@torch.no_grad()
def run(model, **inputs):
    return model(**inputs)[0]


def series():
    g = torch.Generator().manual_seed(1)
    past, future = torch.randn(2, 18, generator=g), torch.randn(2, 8, generator=g)
    features = {"past_time_features": past[..., None], "future_time_features": future[..., None]}
    return {"past_values": past, "future_values": future, "past_observed_mask": torch.ones(2, 18)} | features


# Layers that are made without `is_causal` and rely on the mask.
SILENT = {
    "nllb-moe": SEQ2SEQ | {"num_experts": 4, "expert_capacity": 64},
    "informer": SEQ2SEQ | SERIES | {"attention_type": "full"},
    "gemma": GEMMA,
}


@pytest.mark.refuses
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("family", SILENT)
def test_a_layer_that_does_not_say_that_it_is_causal_raises_under_a_causal_mask(family, padded):
    model = make(CONFIG_MAPPING[family](**SILENT[family]), "near_far")
    inputs = series() if family == "informer" else {"input_ids": IDS}
    if family not in ("informer", "gemma"):
        inputs["decoder_input_ids"] = IDS
    if padded and family != "informer":
        inputs["attention_mask"] = PADDED
    with pytest.raises(
        ValueError, match=r"Attention says that it is not causal \(is_causal is False\), but its mask is"
    ):
        run(model, **inputs)


def test_layers_that_are_then_told_to_be_causal_equal_exact_attention_and_see_no_later_token():
    model = make(CONFIG_MAPPING["nllb-moe"](**SILENT["nllb-moe"]))
    inputs = {"input_ids": IDS, "attention_mask": PADDED, "decoder_input_ids": IDS}
    exact = run(model, **inputs)
    for layer in model.decoder.layers:
        layer.self_attn.is_causal = True
    model.set_attn_implementation("near_far")
    states = run(model, **inputs)
    assert_close(states, exact, **CLOSE)
    later = IDS.clone()
    later[:, 25] = 3 + (later[:, 25] - 2) % 57
    assert_close(run(model, **inputs | {"decoder_input_ids": later})[:, :25], states[:, :25], **CLOSE)


@pytest.mark.parametrize("method", ["near_far", "nystrom"])
@pytest.mark.parametrize("mask", [None, PADDED, PADDED.flip(1)])
@pytest.mark.parametrize("family", ["gemma", "gemma3_text"])
def test_a_decoder_that_sees_both_sides_equals_its_exact_self(family, mask, method):
    """Gemma by `is_causal` in its configuration; Gemma 3 by its own switch, with windows on both sides."""
    if family == "gemma":
        config = GemmaConfig(**GEMMA)
        config.is_causal = False
    else:
        layers = ["sliding_attention", "full_attention"]
        config = Gemma3TextConfig(**GEMMA, layer_types=layers, sliding_window=8, query_pre_attn_scalar=8)
    exact = make(config, "sdpa")
    inputs = {"input_ids": IDS, "attention_mask": mask}
    wanted = run(exact, **inputs)
    exact.set_attn_implementation(method)
    real = torch.ones_like(IDS).bool() if mask is None else mask.bool()
    assert_close(run(exact, **inputs)[real], wanted[real], **CLOSE)
    use = check_attention(exact, inputs)
    assert use.exact == (("layers.0.self_attn",) if family == "gemma3_text" else ())
    assert "layers.1.self_attn" in use.layers


@pytest.mark.parametrize("mask", [None, PADDED, PADDED.flip(1)])
@pytest.mark.parametrize("family", ["llama4_text", "phimoe"])
def test_layers_with_chunks_or_windows_of_which_the_mask_alone_knows_are_exact(family, mask):
    sizes = {name: size for name, size in GEMMA.items() if name != "use_bidirectional_attention"}
    local = {"attention_chunk_size": 6, "no_rope_layers": [1, 0], "intermediate_size_mlp": 48, "sliding_window": 6}
    kind = CONFIG_MAPPING[family]
    known = set(kind.__dataclass_fields__)
    named = {"num_local_experts": 4, "moe_layers": []} | local
    model = make(kind(**sizes, **{name: value for name, value in named.items() if name in known}))
    inputs = {"input_ids": IDS, "attention_mask": mask}
    wanted, real = run(model, **inputs), torch.ones_like(IDS).bool() if mask is None else mask.bool()
    model.set_attn_implementation("near_far")
    assert_close(run(model, **inputs)[real], wanted[real], **CLOSE)
    if family == "llama4_text":
        use = check_attention(model, inputs)
        assert (list(use.layers), use.exact) == (["layers.1.self_attn"], ("layers.0.self_attn",))


@pytest.mark.refuses
def test_a_causal_layer_raises_under_a_mask_that_lets_it_see_all_tokens():
    layer = make(GemmaConfig(**GEMMA | {"use_bidirectional_attention": False})).layers[0].self_attn
    q, row = torch.randn(2, 4, 30, 8), PADDED.bool()[:, None, None]
    k = q[:, :2]
    with pytest.raises(ValueError, match=r"says that it is causal \(is_causal is True\), but its mask sees all tokens"):
        attend_layer("near_far", layer, q, k, k, row)
    # One token that follows those of a cache sees them all.
    assert attend_layer("near_far", layer, q[:, :, :1], k, k, row)[0].isfinite().all()


def in_packed(pattern, *, outside):
    """A pattern inside packed sequences; `outside`: they are kept apart last, as from transformers 5.24 on."""
    apart = packed_sequence_mask_function(torch.zeros(1, 30, dtype=torch.long))
    inside = remap_positions_for_packed_sequence(pattern, torch.arange(30)[None])
    return and_masks(inside, apart) if outside else and_masks(apart, inside)


ASKED = {"batch_size": 1, "q_length": 30, "kv_length": 30, "config": GemmaConfig(**GEMMA), "attention_mask": None}


@pytest.mark.refuses
def test_blocks_raise_also_inside_packed_sequences_and_beside_them():
    see_each_other = blockwise_overlay(torch.zeros(1, 30, dtype=torch.long))
    blocks = or_masks(causal_mask_function, see_each_other)
    beside = or_masks(remap_positions_for_packed_sequence(causal_mask_function, torch.arange(30)[None]), see_each_other)
    apart = packed_sequence_mask_function(torch.zeros(1, 30, dtype=torch.long))
    both = (blocks, and_masks(blocks, causal_mask_function))
    packed = [in_packed(pattern, outside=outside) for pattern in both for outside in (False, True)]
    for pattern in (*both, *packed, and_masks(beside, apart)):
        with pytest.raises(ValueError, match="custom mask pattern, such as blocks, which near_far attention cannot"):
            make_mask("near_far", mask_function=pattern, **ASKED)


@pytest.mark.parametrize("outside", [False, True])
def test_the_numbers_of_causal_sequences_are_told_from_those_of_others_by_their_type(outside):
    for pattern, told in ((causal_mask_function, torch.int32), (bidirectional_mask_function, torch.int64)):
        packed = in_packed(pattern, outside=outside)
        assert make_mask("near_far", mask_function=packed, **ASKED).dtype == told
