"""A method for each layer: set, saved, loaded, converted."""

import json
import subprocess
import sys

import pytest
import torch
from torch.testing import assert_close
from transformers import (
    AlbertConfig,
    AlbertModel,
    AutoModel,
    BertConfig,
    BertModel,
    DistilBertConfig,
    DistilBertModel,
    ViTConfig,
    ViTModel,
    Wav2Vec2Config,
    Wav2Vec2Model,
)

from nystrom.attention.plan import AttentionPlan, LayerChoice
from nystrom.command_options import ConvertOptions
from nystrom.inspection import choose_plan
from nystrom.integrations import check_attention, save_with_attention, set_attention
from nystrom.integrations.convert import convert
from nystrom.integrations.layer_calls import attend_by, intercepted
from nystrom.models import EncoderConfig, EncoderModel

SIZES = {"vocab_size": 30, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 32}
PLAN = AttentionPlan(
    (
        LayerChoice("nystrom", {"num_landmarks": 3}),
        LayerChoice("softmax", {}),
        LayerChoice("near_far", {"num_heavy": 2}),
    )
)
IDS = torch.randint(30, (2, 25), generator=torch.Generator().manual_seed(0))
BATCH = {"input_ids": IDS, "attention_mask": (torch.arange(25) < torch.tensor([[25], [17]])).long()}


@pytest.fixture
def bert():
    torch.manual_seed(0)
    return BertModel(BertConfig(max_position_embeddings=40, initializer_range=0.3, **SIZES)).double().eval()


def states(model):
    with torch.no_grad():
        return model(**BATCH).last_hidden_state[BATCH["attention_mask"].bool()]


def planned_states(model, plan=PLAN):
    """States of a model whose layers are handed to the methods of the plan one by one."""

    def attend(call):
        method, options = plan.layers[call.layer]
        return attend_by(method, call, options)

    with intercepted(model, attend):
        return states(model)


def test_each_layer_runs_its_own_method(bert):
    exact, wanted = states(bert), planned_states(bert)
    set_attention(bert, PLAN)
    # float64, in another order of operations.
    assert_close(states(bert), wanted, rtol=1e-9, atol=1e-9)
    assert (wanted - exact).norm() > 0.01 * exact.norm()
    use = check_attention(bert, BATCH)
    places = [f"encoder.layer.{number}.attention.self" for number in range(3)]
    assert use.methods == {places[0]: "nystrom", places[2]: "near_far"}
    assert use.layers == {places[0]: {"num_landmarks": 3}, places[2]: {"num_heavy": 2}}
    assert use.exact == (places[1],)
    set_attention(bert, "sdpa")
    assert_close(states(bert), exact, rtol=0, atol=0)


@pytest.mark.long
def test_a_plan_is_saved_and_loaded_with_the_model(bert, tmp_path):
    set_attention(bert, PLAN)
    wanted = states(bert)
    save_with_attention(bert, tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path, dtype=torch.float64)
    assert_close(states(loaded), wanted, rtol=0, atol=0)
    code = f"from transformers import AutoModel; AutoModel.from_pretrained({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode != 0
    assert "nystrom_plan" in done.stderr


def test_a_folder_with_a_broken_plan_raises_and_is_not_exact(bert, tmp_path):
    set_attention(bert, PLAN)
    save_with_attention(bert, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["attention_options"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="a plan has layers = None"):
        states(AutoModel.from_pretrained(tmp_path))


def test_a_converted_model_keeps_the_plan(bert, tmp_path):
    bert.float().save_pretrained(tmp_path / "bert")
    PLAN.write(tmp_path / "plan.json")
    wanted = planned_states(bert)
    convert(ConvertOptions(tmp_path / "bert", tmp_path / "own", plan=tmp_path / "plan.json"))
    loaded = AutoModel.from_pretrained(tmp_path / "own")
    assert isinstance(loaded, EncoderModel)
    # float32 through three layers; the skip convolution is still zero.
    assert_close(states(loaded), wanted, rtol=1e-4, atol=1e-4)
    # From there to another plan, and again through a folder.
    other = AttentionPlan((LayerChoice("softmax", {}),) * 3)
    other.write(tmp_path / "other.json")
    convert(ConvertOptions(tmp_path / "own", tmp_path / "exact", plan=tmp_path / "other.json"))
    assert_close(states(AutoModel.from_pretrained(tmp_path / "exact")), states(bert), rtol=1e-4, atol=1e-4)


def test_a_model_of_this_library_takes_a_plan_and_keeps_its_weights():
    torch.manual_seed(0)
    model = EncoderModel(EncoderConfig(conv_kernel_size=5, initializer_range=0.3, **SIZES)).double().eval()
    before, wanted = {name: tensor.clone() for name, tensor in model.state_dict().items()}, planned_states(model)
    set_attention(model, PLAN)
    assert_close(states(model), wanted, rtol=1e-9, atol=1e-9)
    assert before.keys() == model.state_dict().keys()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    built = EncoderModel(EncoderConfig.from_dict(model.config.to_dict())).double().eval()
    built.load_state_dict(before)
    assert_close(states(built), wanted, rtol=1e-9, atol=1e-9)
    with pytest.raises(ValueError, match="has learned weights"):
        set_attention(model, AttentionPlan((LayerChoice("linformer", {"max_length": 40}),) * 3))


def test_another_attention_replaces_a_plan_in_a_configuration():
    config = EncoderConfig(attention="nystrom_plan", attention_options=PLAN.options, **SIZES)
    assert config.layer_attention(2) == PLAN.layers[2]
    changed = EncoderConfig.from_dict(config.to_dict(), attention="softmax")
    assert [changed.layer_attention(layer).method for layer in range(3)] == ["softmax"] * 3
    with pytest.raises(ValueError, match="nothing else"):
        EncoderConfig.from_dict(config.to_dict(), attention_options={"num_landmarks": 3})


def test_what_a_plan_cannot_be_set_on_raises(bert, tmp_path):
    short = AttentionPlan(PLAN.layers[:2])
    with pytest.raises(ValueError, match="the plan has 2 layers but BertModel has 3"):
        set_attention(bert, short)
    with pytest.raises(ValueError, match="the plan has 2 layers but the configuration has 3"):
        EncoderConfig(attention="nystrom_plan", attention_options=short.options, **SIZES)
    with pytest.raises(ValueError, match="attention method of a plan"):
        set_attention(bert, AttentionPlan((LayerChoice("linformer", {"max_length": 40}),) * 3))
    with pytest.raises(ValueError, match="not a model of transformers"):
        set_attention(torch.nn.Linear(3, 3), PLAN)
    assert bert.config._attn_implementation == "sdpa"
    bert.save_pretrained(tmp_path / "bert")
    short.write(tmp_path / "short.json")
    with pytest.raises(ValueError, match="the plan has 2 layers"):
        convert(ConvertOptions(tmp_path / "bert", tmp_path / "own", plan=tmp_path / "short.json"))
    assert not (tmp_path / "own").exists()
    with pytest.raises(ValueError, match="leave one out"):
        convert(ConvertOptions(tmp_path / "bert", tmp_path / "own", num_landmarks=8, plan=tmp_path / "short.json"))


@pytest.mark.refuses
def test_exact_layers_of_a_plan_take_what_its_other_layers_take(bert):
    set_attention(bert, AttentionPlan((LayerChoice("softmax", {}),) * 3))
    wanted = states(bert)
    with pytest.raises(ValueError, match="output_attentions is True, but softmax attention stores no weights"):
        bert(**BATCH, output_attentions=True)
    with pytest.raises(ValueError, match=r"BertSelfAttention passes position_bias .*softmax attention cannot honour"):
        bert(**BATCH, position_bias=torch.zeros(2, 4, 25, 25))
    with torch.no_grad():
        came = bert(**BATCH, num_landmarks=2).last_hidden_state[BATCH["attention_mask"].bool()]
    assert_close(came, wanted, rtol=0, atol=0)


def distilbert():
    config = DistilBertConfig(vocab_size=30, dim=32, n_layers=3, n_heads=4, hidden_dim=32, initializer_range=0.3)
    return DistilBertModel(config), {"input_ids": IDS}


def vit():
    sizes = {name: value for name, value in SIZES.items() if name != "vocab_size"}
    config = ViTConfig(image_size=20, patch_size=4, initializer_range=0.3, **sizes)
    return ViTModel(config), {"pixel_values": torch.randn(2, 3, 20, 20, generator=torch.Generator().manual_seed(0))}


def wav2vec2():
    config = Wav2Vec2Config(
        conv_dim=(16,), conv_kernel=(3,), conv_stride=(4,), num_feat_extract_layers=1, num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2, initializer_range=0.3, **SIZES,
    )  # fmt: skip
    return Wav2Vec2Model(config), {"input_values": torch.randn(2, 100, generator=torch.Generator().manual_seed(0))}


@pytest.mark.parametrize("make", [distilbert, vit, wav2vec2])
def test_layers_that_do_not_know_their_numbers_are_numbered_by_their_place(make, tmp_path):
    torch.manual_seed(0)
    model, inputs = make()
    model.eval()

    def attend(call):
        method, options = PLAN.layers[call.layer]
        return attend_by(method, call, options)

    with torch.no_grad():
        exact = model(**inputs)[0]
        with intercepted(model, attend):
            wanted = model(**inputs)[0]
        set_attention(model, PLAN)
        # float32 through three layers, in another order of operations.
        assert_close(model(**inputs)[0], wanted, rtol=1e-4, atol=1e-4)
        assert (wanted - exact).norm() > 0.01 * exact.norm()
        use = check_attention(model, inputs)
        assert list(use.methods.values()) == ["nystrom", "near_far"]
        set_attention(model, "nystrom", {"num_landmarks": 3, "exact_layers": [0, 2]})
        assert check_attention(model, inputs).exact == tuple(use.layers)
        with pytest.raises(ValueError, match=r"does not know its number .*call set_attention again after loading"):
            save_with_attention(model, tmp_path / "model")
        assert not (tmp_path / "model").exists()
        set_attention(model, "nystrom", {"num_landmarks": 3})
        save_with_attention(model, tmp_path / "model")
        # A folder written by hand is read the same way.
        loaded = AutoModel.from_pretrained(tmp_path / "model")
        loaded.config.attention_options = {"exact_layers": [0]}
        with pytest.raises(ValueError, match=r"does not know its number .*set_attention, which numbers the layers"):
            loaded(**inputs)


def test_layers_that_run_several_times_take_no_plan_and_nothing_is_measured(monkeypatch):
    model = AlbertModel(AlbertConfig(embedding_size=16, **SIZES)).eval()
    before = model.config.to_dict()
    monkeypatch.setattr(model, "forward", lambda **inputs: pytest.fail("the model ran"))
    says = "layers of AlbertModel have no numbers .*AlbertAttention has none .* num_hidden_layers=3"
    with pytest.raises(ValueError, match=says):
        choose_plan(model, [BATCH], budget=9.0, methods=["nystrom-4"])
    with pytest.raises(ValueError, match=says):
        set_attention(model, PLAN)
    with pytest.raises(ValueError, match=says):
        set_attention(model, "nystrom", {"exact_layers": [0]})
    assert model.config.to_dict() == before
    assert model.config._attn_implementation == "sdpa"
