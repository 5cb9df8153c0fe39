"""A model of transformers with the name and the options of a method: made, loaded and pickled."""

import copy
import json
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from transformers import (
    CONFIG_MAPPING,
    AttentionInterface,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    BertConfig,
    BertModel,
    DebertaConfig,
    DebertaV2Config,
    DetrConfig,
    EncoderDecoderModel,
    FalconConfig,
    GPTNeoConfig,
    MegatronBertConfig,
    MPNetConfig,
    NystromformerConfig,
    PreTrainedConfig,
    PreTrainedModel,
    RemBertConfig,
    ResNetConfig,
    RoFormerConfig,
    SiglipConfig,
    SiglipModel,
    SqueezeBertConfig,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from nystrom import MultiheadAttention, replace_attention
from nystrom.attention.heads import build_attention
from nystrom.inspection import inspect_model
from nystrom.integrations import check_attention, set_attention
from nystrom.integrations.attention_interface import register_methods
from nystrom.models import EncoderConfig

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
BERT = SIZES | {"vocab_size": 64, "max_position_embeddings": 40}
FEW = {"num_landmarks": 4}
IDS = {"input_ids": torch.randint(3, 60, (2, 21), generator=torch.Generator().manual_seed(1))}


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    BertModel(BertConfig(**BERT, initializer_range=0.3)).save_pretrained(tmp_path)
    return tmp_path


def run(model, **inputs):
    with torch.no_grad():
        return model(**inputs)[0]


@pytest.mark.refuses
@pytest.mark.parametrize(
    ("guess", "says"),
    [
        *(
            (guess, "perhaps you meant 'nystrom'")
            for guess in ("nystromformer", "nystrom_attention", "nystrom-attention")
        ),
        *((guess, "perhaps you meant 'near_far'") for guess in ("near-far", "nearfar", "near_far_attention")),
        ("linear-attention", "perhaps you meant 'linear'"),
        ("softmax", "perhaps you meant 'sdpa'"),
        ("linformer", "its projections would have to be learned"),
    ],
)
def test_a_likely_guess_of_a_name_is_answered_with_the_name(guess, says, folder):
    for start in (
        lambda: AutoModel.from_pretrained(folder, attn_implementation=guess),
        lambda: AutoModel.from_config(BertConfig(**BERT), attn_implementation=guess),
        lambda: later(guess),
    ):
        with pytest.raises(
            ValueError, match=f"attn_implementation is '{guess}'; expected one of nystrom, near_far.*{says}"
        ):
            start()


def test_a_name_that_another_package_registered_is_its_own():
    own = AttentionInterface().get("linear_attention")
    AttentionInterface.register("linear_attention", sdpa_attention_forward)
    try:
        model = AutoModel.from_config(BertConfig(**BERT), attn_implementation="linear_attention").eval()
        assert model(**IDS).last_hidden_state.isfinite().all()
        register_methods()
        assert AttentionInterface().get("linear_attention") is sdpa_attention_forward
    finally:
        AttentionInterface.register("linear_attention", own)


def later(guess):
    """Transformers takes any name that is registered, and asks for it in the first call."""
    model = BertModel(BertConfig(**BERT))
    model.set_attn_implementation(guess)
    model(**IDS)


@pytest.mark.refuses
@pytest.mark.parametrize("guess", ["nystromformer", "nystrom_attention", "Nystrom"])
def test_functions_that_take_a_method_suggest_the_nearest_name(guess):
    bert, torchs = BertModel(BertConfig(**BERT)), nn.TransformerEncoderLayer(16, 4)
    for call in (
        lambda: set_attention(bert, guess),
        lambda: replace_attention(torchs, guess),
        lambda: build_attention(guess, num_heads=2, head_dim=8),
        lambda: MultiheadAttention(16, 2, method=guess),
        lambda: EncoderConfig(attention=guess),
        lambda: inspect_model(bert, [IDS], methods=[f"{guess}-64"]),
    ):
        with pytest.raises(ValueError, match=f"'{guess}' is unknown; expected .* Perhaps you meant 'nystrom'"):
            call()


@pytest.mark.refuses
@pytest.mark.parametrize(
    ("method", "says"), [("linformer", "projections would have to be learned"), ("softmax", "perhaps you meant 'sdpa'")]
)
def test_a_method_that_is_not_registered_says_why(method, says):
    with pytest.raises(ValueError, match=f"method is '{method}'; expected one of nystrom, .*{says}"):
        set_attention(BertModel(BertConfig(**BERT)), method)


@pytest.mark.refuses
@pytest.mark.parametrize(
    "kind",
    [
        *(MPNetConfig, RoFormerConfig, MegatronBertConfig, RemBertConfig, SqueezeBertConfig),
        *(DebertaConfig, DebertaV2Config, NystromformerConfig),
    ],
)
def test_a_model_whose_attention_asks_for_none_by_name_raises_where_it_is_made_and_loaded(kind, tmp_path):
    config = kind(**SIZES, vocab_size=64, embedding_size=32)
    exact = AutoModel.from_config(config, attn_implementation="eager")
    who = type(exact).__name__
    with pytest.raises(ValueError, match=f"{who} has attention of its own.*would change nothing"):
        AutoModel.from_config(config, attn_implementation="near_far")
    exact.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"{who} has attention of its own.*would change nothing"):
        AutoModel.from_pretrained(tmp_path, attn_implementation="nystrom")


@pytest.mark.refuses
@pytest.mark.parametrize("kind", [GPTNeoConfig, FalconConfig])
def test_a_model_that_picks_its_attention_from_a_table_of_its_own_raises_by_name(kind, tmp_path):
    config = kind(**SIZES, vocab_size=64, attention_types=[[["global"], SIZES["num_hidden_layers"]]])
    exact = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    exact.save_pretrained(tmp_path)
    says = f"{type(exact).__name__} has attention of its own.*would change nothing"
    for call in (
        lambda: AutoModelForCausalLM.from_config(config, attn_implementation="near_far"),
        lambda: AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="nystrom"),
        lambda: set_attention(exact, "near_far"),
    ):
        with pytest.raises(ValueError, match=says):
            call()


GEMMA = BERT | {"num_key_value_heads": 2, "head_dim": 8}
T5 = {"d_model": 32, "num_layers": 2, "num_heads": 4, "d_ff": 48, "d_kv": 8, "vocab_size": 64}
# Facts that a layer shows before it runs.
SAID = {
    "gpt_oss": (GEMMA | {"num_local_experts": 4}, "near_far", "GptOssAttention passes s_aux .attention sinks."),
    "gemma2": (GEMMA, "near_far", "Gemma2Attention passes softcap .soft capping."),
    "t5": (T5, "nystrom", "T5Attention passes position_bias .relative positions."),
    "wav2vec2-bert": (SIZES, "nystrom", "passes position_bias .relative positions."),
    "beit": (SIZES | {"use_relative_position_bias": True}, "nystrom", "passes a bias .of relative positions"),
    "llama": (GEMMA, "nystrom", "LlamaAttention is causal, and nystrom"),
    "bart": ({"d_model": 32}, "nystrom", r"BartAttention is causal, .*set_attention\(model.get_encoder"),
    "layoutlm": (BERT, "near_far", "LayoutLMSelfAttention does not say whether it is causal"),
}


@pytest.mark.refuses
@pytest.mark.parametrize("family", SAID)
def test_what_a_layer_says_before_it_runs_is_refused_where_the_name_is_given(family, tmp_path):
    sizes, method, says = SAID[family]
    config = CONFIG_MAPPING[family](**sizes)
    model = AutoModel.from_config(config, attn_implementation="eager")
    model.save_pretrained(tmp_path)
    configs = [module.config for module in model.modules() if hasattr(module, "config")]
    for call in (
        lambda: AutoModel.from_config(copy.deepcopy(config), attn_implementation=method),
        lambda: AutoModel.from_pretrained(tmp_path, attn_implementation=method),
        lambda: model.set_attn_implementation(method),
        lambda: set_attention(model, method),
    ):
        with pytest.raises(ValueError, match=says):
            call()
        # It keeps what it had.
        after = [module.config for module in model.modules() if hasattr(module, "config")]
        assert all(now is then for now, then in zip(after, configs, strict=True))
        assert {now._attn_implementation for now in after} == {"eager"}


def test_a_model_without_these_terms_takes_the_name():
    for family, changes in {"gemma2": {"attn_logit_softcapping": None}, "llama": {"is_causal": False}}.items():
        config = CONFIG_MAPPING[family](**GEMMA, **changes)
        method = "nystrom" if family == "llama" else "near_far"
        model = AutoModel.from_config(config, attn_implementation=method).eval()
        assert check_attention(model, IDS).method == method


class OwnConfig(PreTrainedConfig):
    model_type = "own"
    hidden_size = 8


class OwnAttention(nn.Module):
    def forward(self, q, k, v):
        return nn.functional.scaled_dot_product_attention(q, k, v)


class DeafModel(PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.attention = OwnAttention()
        self.post_init()


class AroundBert(PreTrainedModel):
    """Attention of its own around a part that asks: the class of a user, of whose source nothing is known."""

    config_class = BertConfig

    def __init__(self, config):
        super().__init__(config)
        self.bert, self.attention = BertModel(config), OwnAttention()
        self.post_init()


def test_a_model_of_the_users_raises_where_none_of_its_parts_asks():
    assert AroundBert._from_config(BertConfig(**BERT), attn_implementation="nystrom").config._attn_implementation
    with pytest.raises(ValueError, match="DeafModel has attention of its own"):
        DeafModel._from_config(OwnConfig(), attn_implementation="nystrom")


def test_a_part_without_attention_takes_any_name():
    backbone = ResNetConfig(embedding_size=8, hidden_sizes=[8] * 4, depths=[1] * 4, out_features=["stage4"])
    small = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "d_model": 16}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = DetrConfig(**small, **heads, backbone_config=backbone)
    model = AutoModel.from_config(config, attn_implementation="nystrom")
    assert model.config.backbone_config._attn_implementation == "nystrom"


def test_options_that_are_given_where_a_model_or_its_configuration_is_loaded_are_taken(folder):
    model = AutoModel.from_pretrained(folder, attn_implementation="nystrom")
    many = run(model, **IDS)
    model.config.attention_options = FEW
    few = run(model, **IDS)
    assert (few - many).abs().max() > 0.01
    named = {"attn_implementation": "nystrom", "attention_options": FEW}
    config = AutoConfig.from_pretrained(folder, **named)
    # The way of sentence-transformers' config_kwargs.
    by_config = AutoModel.from_pretrained(folder, config=config)
    assert_close(run(by_config, **IDS), few, rtol=0, atol=0)
    loaded = AutoModel.from_pretrained(folder, **named)
    assert_close(run(loaded, **IDS), few, rtol=0, atol=0)
    assert set(map(str, check_attention(loaded, IDS).layers.values())) == {str(FEW)}
    # Beside a configuration, which stays as it is: the way of sentence-transformers' model_kwargs.
    config = AutoConfig.from_pretrained(folder)
    beside = AutoModel.from_pretrained(folder, config=config, **named)
    assert_close(run(beside, **IDS), few, rtol=0, atol=0)
    assert (config.attention_options, beside.config.attention_options) == (None, FEW)
    assert AutoModel.from_config(config, **named).config.attention_options == FEW


@pytest.mark.refuses
def test_options_that_the_method_does_not_have_raise_however_they_came(folder):
    loaded = AutoModel.from_pretrained(folder, attn_implementation="nystrom", attention_options={"landmark": 3})
    with pytest.raises(ValueError, match="option of nystrom 'landmark' is unknown"):
        run(loaded, **IDS)


def siglip():
    texts = SIZES | {"vocab_size": 30, "max_position_embeddings": 40}
    return SiglipModel(SiglipConfig(text_config=texts, vision_config=SIZES | {"image_size": 16, "patch_size": 4}))


def options_of(model):
    return [part.config.attention_options for part in (model, model.text_model, model.vision_model)]


def test_options_are_given_to_all_parts_and_read_parts_keep_their_own(tmp_path):
    siglip().save_pretrained(tmp_path / "none")
    loaded = AutoModel.from_pretrained(tmp_path / "none", attention_options=FEW)
    assert options_of(loaded) == [FEW] * 3
    loaded.config.vision_config.attention_options = {"num_landmarks": 3}
    loaded.save_pretrained(tmp_path / "own")
    assert options_of(AutoModel.from_pretrained(tmp_path / "own")) == [FEW, FEW, {"num_landmarks": 3}]
    # Options of the call win over all that was saved.
    again = AutoModel.from_pretrained(tmp_path / "own", attention_options={"num_landmarks": 5})
    assert options_of(again) == [{"num_landmarks": 5}] * 3


T5 = {"vocab_size": 30, "d_model": 8, "d_kv": 4, "num_heads": 2, "d_ff": 8, "num_layers": 1}


@pytest.mark.parametrize("given", ["at once", "later", "by set_attention"])
def test_options_reach_layers_that_read_a_copy_of_the_configuration(given, tmp_path):
    options, made = {"num_heavy": 3}, T5ForConditionalGeneration(T5Config(**T5)).eval()
    if given == "at once":
        made.config.attention_options = {"num_heavy": 2}
    if given == "by set_attention":
        set_attention(made.get_encoder(), "near_far", {"num_heavy": 1})
        made.config.attention_options = options
        assert made.get_encoder().config.attention_options == {"num_heavy": 1}
        set_attention(made, "near_far", {"num_heavy": 2})
    else:
        made.set_attn_implementation("near_far")
    inputs = {"input_ids": torch.ones(1, 9, dtype=torch.long), "decoder_input_ids": torch.ones(1, 2, dtype=torch.long)}
    for model in (made, copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        model.config.attention_options = options
        assert list(check_attention(model, inputs).layers.values()) == [options]
    made.save_pretrained(tmp_path / "t5")
    assert json.loads((tmp_path / "t5/config.json").read_text())["attention_options"] == options
    loaded = T5ForConditionalGeneration.from_pretrained(tmp_path / "t5", attn_implementation="near_far")
    loaded.config.attention_options["num_heavy"] = 4
    assert list(check_attention(loaded, inputs).layers.values()) == [{"num_heavy": 4}]
    assert "copies" not in str(loaded.config) + str(loaded.config.to_dict())


def test_a_configuration_without_options_is_saved_and_compared_as_before():
    config = BertConfig(**BERT)
    assert config.attention_options is None
    assert "attention_options" not in config.to_dict()
    assert BertConfig(**BERT, attention_options=FEW).to_diff_dict()["attention_options"] == FEW


def test_a_pickled_model_names_this_package_if_it_is_set_to_a_method_and_only_then(folder):
    model = AutoModel.from_pretrained(folder)
    assert b"nystrom" not in pickle.dumps(model)
    set_attention(model, "nystrom", FEW)
    again = pickle.loads(pickle.dumps(model))
    assert again.config == model.config
    assert_close(run(again, **IDS), run(model, **IDS), rtol=0, atol=0)
    model.set_attn_implementation("sdpa")
    model.config.attention_options = None
    assert b"nystrom" not in pickle.dumps(model)


UNPICKLE = """
import pickle, sys, torch
assert "nystrom" not in sys.modules
model, inputs, wanted = torch.load(sys.argv[1], weights_only=False)
with torch.no_grad():
    torch.testing.assert_close(model(**inputs)[0], wanted, rtol=0, atol=1e-5)
"""


@pytest.mark.long
def test_a_fresh_process_runs_a_pickled_model_without_importing_this_package_first(folder, tmp_path):
    model = AutoModel.from_pretrained(folder, attn_implementation="nystrom", attention_options=FEW)
    torch.save((model, IDS, run(model, **IDS)), tmp_path / "model.pt")
    subprocess.run([sys.executable, "-c", UNPICKLE, str(tmp_path / "model.pt")], check=True, timeout=600)


@pytest.mark.long
def test_a_pool_of_sentence_transformers_runs_the_method(folder):
    modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    from sentence_transformers import SentenceTransformer
    from transformers import BertTokenizer

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh"]
    BertTokenizer(vocab={word: i for i, word in enumerate(words)}).save_pretrained(folder)
    asked = {"attn_implementation": "nystrom"}
    body = modules.Transformer(str(folder), model_kwargs=asked, config_kwargs={"attention_options": FEW})
    model = SentenceTransformer(modules=[body, modules.Pooling(32)], device="cpu")
    texts = ["a b c d e f g h a b c", "c d a"]
    alone = model.encode(texts)
    pool = model.start_multi_process_pool(["cpu"])
    try:
        assert_close(model.encode(texts, pool=pool), alone)
    finally:
        model.stop_multi_process_pool(pool)


@pytest.mark.refuses
def test_a_part_that_is_not_there_raises_where_it_would_get_a_method(tmp_path):
    parts = {"text_config": BERT, "vision_config": SIZES | {"image_size": 32, "patch_size": 8}}
    model = SiglipModel(SiglipConfig(**parts))
    model.save_pretrained(tmp_path)
    wrong, says = {"vison_config": "near_far"}, "'vison_config' is unknown.*Perhaps you meant 'vision_config'"
    for call in (
        lambda: model.set_attn_implementation(wrong),
        lambda: AutoModel.from_pretrained(tmp_path, attn_implementation=wrong),
        lambda: AutoModel.from_config(SiglipConfig(**parts), attn_implementation=wrong),
    ):
        with pytest.raises(ValueError, match=says):
            call()
    # transformers checks its own names; "" is the whole model.
    model.set_attn_implementation({"vison_config": "sdpa", "": "sdpa"})
    right = {"vision_config": "near_far", "text_config": "sdpa"}
    model.set_attn_implementation(right)
    for each in (AutoModel.from_pretrained(tmp_path, attn_implementation=right), model):
        assert each.config.vision_config._attn_implementation == "near_far"
        assert each.config.text_config._attn_implementation == "sdpa"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("when", ["loaded", "later"])
def test_a_part_of_an_encoder_decoder_changes_its_layers(folder, when):
    loaded = {"encoder_attn_implementation": "nystrom"} if when == "loaded" else {}
    model = EncoderDecoderModel.from_encoder_decoder_pretrained(folder, folder, **loaded).eval()
    layer, exact = model.encoder.encoder.layer[0].attention.self, BertModel.from_pretrained(folder)
    for name in ("nystrom", "near_far", "sdpa"):
        model.encoder.set_attn_implementation(name)
        assert layer.config._attn_implementation == name
    model.set_attn_implementation({"encoder": "nystrom"})
    assert model.decoder.bert.encoder.layer[0].attention.self.config._attn_implementation == "sdpa"
    model = pickle.loads(pickle.dumps(model))
    for config in (model.encoder.config, model.config.encoder, model.config):
        for options, same in ((FEW, False), ({"num_landmarks": 100}, True)):
            config.attention_options = options
            moved = (run(model.encoder, **IDS) - run(exact, **IDS)).abs().max()
            assert (moved < 1e-5) == same


@pytest.mark.refuses
@pytest.mark.filterwarnings("ignore")
def test_a_name_that_would_reach_no_layer_raises(folder, tmp_path):
    """The empty name of a part is the whole model, whose layers read the configurations of its parts."""
    model = EncoderDecoderModel.from_encoder_decoder_pretrained(folder, folder)
    model.save_pretrained(tmp_path / "both")
    for each, parts in ((model, "'decoder'"), (siglip(), "'vision_config', 'text_config'")):
        with pytest.raises(ValueError, match=f"changes no layer of {type(each).__name__}.* name the parts.*{parts}"):
            each.set_attn_implementation({"": "near_far"})
        assert each.config._attn_implementation == "sdpa"
    with pytest.raises(ValueError, match="changes no layer of EncoderDecoderModel"):
        EncoderDecoderModel.from_pretrained(tmp_path / "both", attn_implementation={"": "near_far"})
    bert = BertModel(BertConfig(**BERT))
    bert.set_attn_implementation({"": "near_far"})
    assert check_attention(bert, IDS).method == "near_far"


@pytest.mark.filterwarnings("ignore")
def test_an_encoder_decoder_without_a_method_is_left_as_it_is(folder):
    model = EncoderDecoderModel.from_encoder_decoder_pretrained(folder, folder)
    model.set_attn_implementation("eager")
    config = model.encoder.encoder.layer[0].attention.self.config
    assert config is not model.encoder.config
    assert config._attn_implementation == "sdpa"
