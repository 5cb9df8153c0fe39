"""Every encoder family of transformers, as a tiny random model: with a landmark per token it equals its exact self.

A family is a model type that transformers offers for text, images, sound or video. Each one whose code asks for an
attention by name is in one of three tables: those that work, those that raise and why, and those that are
made of others.
"""

import inspect
import sys
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close
from transformers import CONFIG_MAPPING, MODEL_MAPPING, AutoModel
from transformers.models.auto import modeling_auto

from nystrom.integrations import check_attention, set_attention
from nystrom.integrations.attention_interface import REGISTERED
from nystrom.integrations.bert_names import positions_of
from nystrom.integrations.position_tables import rows_of, table_of

SIZES = {
    **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 64},
    **{"pad_token_id": 0, "max_position_embeddings": 80, "image_size": 32, "patch_size": 4, "num_channels": 3},
    **{"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "embedding_size": 32, "num_key_value_heads": 2},
    **{"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48},
    **{"decoder_attention_heads": 4, "decoder_ffn_dim": 48, "d_ff": 48, "num_layers": 2, "num_heads": 4, "d_kv": 8},
    **{"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "num_mel_bins": 8, "head_dim": 8},
    **{"max_source_positions": 24, "max_target_positions": 24, "num_feat_extract_layers": 2, "conv_dim": (16, 16)},
    **{"conv_kernel": (3, 3), "conv_stride": (2, 2), "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2},
    **{"feature_projection_input_dim": 8, "subsampling_conv_channels": 8, "num_frames": 4, "tubelet_size": 2},
}
# Families that work, and what they need in addition to the sizes.
WORKS = {
    "aimv2_vision_model": {},
    "albert": {},
    "audio-spectrogram-transformer": {"max_length": 32, "num_mel_bins": 8, "frequency_stride": 4, "time_stride": 4},
    "beit": {},
    "bert": {},
    "bert-generation": {},
    "camembert": {},
    "chinese_clip_vision_model": {},
    "clip_vision_model": {},
    "data2vec-audio": {},
    "data2vec-text": {},
    "deit": {},
    "dinov2": {},
    "dinov2_with_registers": {},
    "dinov3_vit": {},
    "distilbert": {},
    "dpt": {},
    "electra": {},
    "ernie": {},
    "esm": {},
    "esmc": {"num_key_value_heads": 4},
    "eurobert": {},
    "gte": {},
    "hubert": {},
    "ijepa": {},
    "jina_embeddings_v3": {},
    "lasr_encoder": {},
    "mlcd": {},
    "mlcd_vision_model": {},
    "mobilebert": {},
    "modernbert": {},
    "neomme": {"head_dim": 16},
    "nomic_bert": {},
    "pixio": {},
    "roberta": {},
    "roberta-prelayernorm": {},
    "roc_bert": {"pronunciation_vocab_size": 20, "pronunciation_embed_dim": 8}
    | {"shape_vocab_size": 20, "shape_embed_dim": 8},
    "segformer": {"num_attention_heads": [1, 2, 2, 4], "hidden_sizes": [8, 8, 16, 16], "sr_ratios": [2, 1, 1, 1]},
    "sew": {},
    "siglip_vision_model": {},
    "tipsv2_text_model": {},
    "tipsv2_vision_model": {},
    "ultrabert": {"layer_types": ["full_attention", "sliding_attention"]},
    "unispeech": {},
    "unispeech-sat": {},
    "videomae": {},
    "vit": {},
    "vit_mae": {"mask_ratio": 0.0},
    "vit_msn": {},
    "vivit": {"tubelet_size": [2, 4, 4]},
    "vjepa2": {"crop_size": 32, "frames_per_clip": 4, "pred_hidden_size": 32, "pred_num_hidden_layers": 2}
    | {"pred_num_attention_heads": 4, "pred_num_mask_tokens": 1},
    "wav2vec2": {},
    "wav2vec2-bert": {"position_embeddings_type": None},
    "wav2vec2-conformer": {"position_embeddings_type": "rotary"},
    "xlm-roberta": {},
    "xlm-roberta-xl": {},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "yolos": {"image_size": [32, 32], "num_detection_tokens": 5},
}
CAUSAL = "asks for a causal mask|is causal"
BIAS = "passes attention a mask of shape .* and torch.float32|relative positions"
CAPPED = "passes softcap"
# Families that raise: what they need in addition to the sizes, and why.
RAISE = {
    "bart": ({}, CAUSAL),
    "beit": ({"use_relative_position_bias": True}, BIAS),
    "bert": ({"is_decoder": True}, CAUSAL),
    "clip_text_model": ({}, CAUSAL),
    "gpt2": ({}, CAUSAL),
    "layoutlm": ({}, "does not say whether it is causal"),
    "llama": ({}, CAUSAL),
    "markuplm": ({}, "does not say whether it is causal"),
    "mbart": ({}, CAUSAL),
    "molmo2_text": ({}, CAUSAL),
    "mt5": ({}, BIAS),
    "parakeet_encoder": ({}, BIAS),
    "pixtral": ({}, BIAS),
    "splinter": ({}, "does not say whether it is causal"),
    "swin": ({"embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "window_size": 4}, BIAS),
    "t5": ({}, BIAS),
    "umt5": ({}, BIAS),
    "videoprism_vision_model": ({"num_spatial_layers": 2, "num_temporal_layers": 2, "tubelet_size": [1, 4, 4]}, CAPPED),
    "wav2vec2-bert": ({}, BIAS),
    "wav2vec2-conformer": ({}, BIAS),
    "whisper": ({}, CAUSAL),
}  # fmt: skip
# Families of these whose layers say nothing of it.
MASKED = {"clip_text_model", "pixtral"}
# Patches of a spectrogram; and a convolution after attention that mixes what padded frames hold into real ones, where
# exact attention gives padded frames a value and the methods give zero.
UNMASKED = {"audio-spectrogram-transformer", "wav2vec2-conformer"}
# Families made of parts that are tested under their own names, of decoders, or that need another package.
COMPOSED = {
    *("clip", "cohere2_vision", "depth_pro", "emu3", "granite_speech5_ctc", "lasr_ctc", "llama4", "metaclip_2"),
    *("mllama", "modernvbert", "parakeet_ctc", "siglip", "siglip2", "t5gemma", "ultravbert"),
    *("conditional_detr", "deformable_detr", "detr"),
}
# Some of the many families that run their own attention under any name.
DEAF = ["deberta", "deberta-v2", "mpnet", "wavlm", "longformer", "perceiver"]

TASKS = (
    "MASKED_LM",
    "TEXT_ENCODING",
    "IMAGE",
    "IMAGE_CLASSIFICATION",
    "VIDEO_CLASSIFICATION",
    "AUDIO_CLASSIFICATION",
    "CTC",
)
# float32 through two layers.
CLOSE = {"rtol": 0, "atol": 1e-4}
pytestmark = [
    # LASR's convolution.
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths"),
]


def make(family, changes, implementation=None):
    if family not in CONFIG_MAPPING:
        pytest.skip("not in this version of transformers")
    config = CONFIG_MAPPING[family]
    known = set(config.__dataclass_fields__) - set(config.attribute_map)
    made = config(**{name: value for name, value in SIZES.items() if name in known} | changes)
    torch.manual_seed(0)
    model = AutoModel.from_config(made, attn_implementation=implementation).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                # Scores far from zero: otherwise every token is the mean of all, with any method.
                parameter.normal_(std=0.15)
    return model


def make_inputs(model, n=21):
    """Two samples, the second padded where the family takes a mask; and which outputs are real."""
    g, name, family = torch.Generator().manual_seed(1), model.main_input_name, model.config.model_type
    takes_mask = "attention_mask" in inspect.signature(model.forward).parameters
    shapes = {"pixel_values": (2, 3, 32, 32), "pixel_values_videos": (2, 4, 3, 32, 32), "input_values": (2, 160)}
    shape = shapes.get(name, (2, 48, 8))
    if family in ("videomae", "vivit", "videoprism_vision_model"):
        shape = (2, 4, 3, 32, 32)
    if family == "audio-spectrogram-transformer":
        shape = (2, 32, 8)
    if family == "whisper":
        return {name: torch.randn(2, 8, 48, generator=g), "decoder_input_ids": torch.ones(2, 3, dtype=torch.long)}, None
    if name == "input_ids":
        inputs = {name: torch.randint(3, 60, (2, n), generator=g)}
    else:
        inputs = {name: torch.randn(shape, generator=g)}
    if family in ("t5", "mt5", "umt5"):
        inputs["decoder_input_ids"] = inputs[name]
    if family in ("markuplm",):
        inputs["xpath_tags_seq"] = None
    if not takes_mask or name == "pixel_values" or family in UNMASKED:
        return inputs, None
    keep = torch.ones(inputs[name].shape[:2], dtype=torch.long)
    keep[1, 2 * keep.shape[1] // 3 :] = 0
    inputs["attention_mask"] = keep
    frames = getattr(model, "_get_feature_vector_attention_mask", None) or getattr(
        model, "_get_output_attention_mask", None
    )
    if frames is None or name == "input_ids":
        return inputs, keep.bool()
    length = run(model, inputs).shape[1]
    return inputs, keep.bool() if length == keep.shape[1] else _frames(model, keep, length)


def _frames(model, keep, length):
    if hasattr(model, "_get_output_attention_mask"):
        return model._get_output_attention_mask(keep, target_length=length).bool()
    return model._get_feature_vector_attention_mask(length, keep).bool()


def run(model, inputs):
    # Masked autoencoders shuffle.
    torch.manual_seed(2)
    with torch.no_grad():
        return model(**inputs)[0]


@pytest.mark.parametrize("family", WORKS)
def test_a_family_equals_its_exact_self_with_a_landmark_per_token_and_not_with_few(family):
    model = make(family, WORKS[family])
    inputs, real = make_inputs(model)
    exact = run(model, inputs)
    real = torch.ones(exact.shape[:2], dtype=torch.bool) if real is None else real
    model.set_attn_implementation("nystrom")
    outputs = []
    for num_landmarks in (1000, 3):
        model.config.attention_options = {"num_landmarks": num_landmarks}
        outputs.append(run(model, inputs))
        layers = check_attention(model, inputs).layers
        assert {options["num_landmarks"] for options in layers.values()} == {num_landmarks}
    assert_close(outputs[0][real], exact[real], **CLOSE)
    assert (outputs[1][real] - exact[real]).abs().max() > 1e-3


@pytest.mark.refuses
@pytest.mark.parametrize("family", WORKS)
def test_weights_that_a_caller_asks_for_raise(family):
    """Also where the model collects what its layers return, and tells them nothing."""
    model = make(family, WORKS[family], "nystrom")
    inputs, _ = make_inputs(model)
    with pytest.raises(ValueError, match="output_attentions is True, but nystrom attention stores no weights"):
        model(**inputs, output_attentions=True)


# Not "mobilebert", where a token enters with the embeddings of its neighbours, padding among them.
TEXT = [
    *("albert", "bert", "bert-generation", "camembert", "data2vec-text", "distilbert", "electra", "ernie", "esm"),
    *("esmc", "eurobert", "gte", "jina_embeddings_v3", "modernbert", "neomme", "nomic_bert", "roberta", "ultrabert"),
    *("roberta-prelayernorm", "roc_bert", "tipsv2_text_model", "xlm-roberta", "xlm-roberta-xl", "xmod"),
]


@pytest.mark.parametrize("family", TEXT)
def test_the_amount_of_padding_and_neighbours_change_nothing_with_few_landmarks(family):
    model = make(family, WORKS[family], "nystrom")
    model.config.attention_options = {"num_landmarks": 3}
    inputs, _ = make_inputs(model)
    together = run(model, inputs)
    ids = inputs["input_ids"][1:, :14]
    assert_close(together[1:, :14], run(model, {"input_ids": ids}), **CLOSE)
    more = {"input_ids": torch.nn.functional.pad(ids, (0, 25)), "attention_mask": torch.ones_like(ids)}
    more["attention_mask"] = torch.nn.functional.pad(more["attention_mask"], (0, 25))
    assert_close(run(model, more)[:, :14], together[1:, :14], **CLOSE)


@pytest.mark.refuses
@pytest.mark.parametrize("family", [*TEXT, "mobilebert"])
def test_every_family_with_a_table_takes_as_many_tokens_as_it_has_positions_and_refuses_more(family):
    model = make(family, WORKS[family], "nystrom")
    if (path := table_of(model)) is None:
        pytest.skip("without a table of learned positions")
    most = rows_of(model.get_submodule(path))
    assert positions_of(model.config) == most
    with torch.no_grad():
        assert model(torch.ones(1, most, dtype=torch.long))[0].isfinite().all()
        with pytest.raises(
            ValueError, match=f"given {most + 1} tokens, and its table has {most} positions: cut the texts to"
        ):
            model(input_ids=torch.ones(1, most + 1, dtype=torch.long))


@pytest.mark.parametrize("method", REGISTERED)
@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_what_padding_holds_reaches_no_gradient_of_a_weight(family, method):
    model = make(family, WORKS[family], method)
    inputs, real = make_inputs(model)
    results = []
    for shift in (0, 7):
        model.zero_grad()
        ids = torch.where(real, inputs["input_ids"], 1 + shift)
        out = model(input_ids=ids, attention_mask=inputs["attention_mask"])[0][real]
        out.square().sum().backward()
        results.append([out.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    for clean, soiled in zip(*results, strict=True):
        assert torch.equal(clean, soiled)


@pytest.mark.refuses
@pytest.mark.parametrize("family", RAISE)
def test_causal_and_biased_families_raise_by_name(family):
    """The error comes where the model is made, except for masks, which are known in the first call."""
    changes, reason = RAISE[family]

    def first_call():
        model = make(family, changes, "nystrom")
        run(model, make_inputs(model)[0])

    with pytest.raises(ValueError, match=reason):
        first_call() if family in MASKED else make(family, changes, "nystrom")


@pytest.mark.long
@pytest.mark.refuses
@pytest.mark.parametrize("family", DEAF)
def test_a_family_with_attention_of_its_own_is_found_out(family):
    model = make(family, {})
    with pytest.raises(ValueError, match="does not ask transformers' AttentionInterface"):
        set_attention(model, "nystrom")


def asks(family):
    """Whether the code of a family asks for an attention by name."""
    model = MODEL_MAPPING[CONFIG_MAPPING[family]]
    model = model[0] if isinstance(model, tuple) else model
    source = inspect.getsource(sys.modules[model.__module__])
    return "get_interface(" in source and model._can_set_attn_implementation()


def test_every_family_that_asks_for_an_attention_is_in_a_table():
    offered = {family for task in TASKS for family in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")}
    offered &= set(modeling_auto.MODEL_MAPPING_NAMES)
    asking = {family for family in offered if asks(family)}
    assert asking - set(WORKS) - set(RAISE) - COMPOSED == set()
    assert len(asking & set(WORKS)) > 50
    assert not any(asks(family) for family in DEAF)


def test_the_guide_names_every_family_that_works():
    page = (Path(__file__).parents[4] / "docs" / "families.md").read_text(encoding="utf-8")
    assert not [name for name in WORKS if f"`{name}`" not in page]
