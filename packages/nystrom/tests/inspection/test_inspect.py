"""A model is measured layer by layer and as a whole, and agrees with dense sums in float64."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from transformers import (
    AutoConfig,
    AutoModel,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertLMHeadModel,
    BertModel,
    DebertaConfig,
    GPT2Config,
    WhisperConfig,
)

import nystrom
from nystrom import near_far_sizes, nystrom_attention
from nystrom.attention.functions import FUNCTIONS
from nystrom.attention.methods.nystrom import nystrom_factors, nystrom_rows
from nystrom.attention.plan import PLAN, AttentionPlan, LayerChoice
from nystrom.inspection import inspect_model
from nystrom.inspection.candidates import read_candidates
from nystrom.integrations import set_attention
from nystrom.integrations.layer_calls import attend_by, intercepted
from nystrom.linalg.pinv import residual
from nystrom.models import EncoderConfig, EncoderModel

# float64 through two layers, in another order of operations.
CLOSE = {"rtol": 1e-9, "atol": 1e-12}


def first_calls(model, batch):
    """The calls of each layer for each sequence, under exact attention."""
    calls = []

    def attend(call):
        calls.extend(call.sequence(place) for place in range(call.q.shape[0]))
        return attend_by("softmax", call, {})

    with torch.no_grad(), intercepted(model, attend):
        model(**batch)
    return calls


def relative(came, wanted):
    return float((came - wanted).norm() / wanted.norm())


def test_with_all_queries_the_estimates_are_the_dense_sums(bert, batch):
    found = inspect_model(bert, [batch], methods=["nystrom-4"], num_queries=30)
    assert [layer.name for layer in found.layers] == [f"encoder.layer.{i}.attention.self" for i in range(2)]
    assert (found.texts, found.tokens, found.dtype) == (2, 30, torch.float64)
    calls = first_calls(bert, batch)
    for layer in found.layers:
        off, size, variations, residuals = 0.0, 0.0, 0.0, []
        for call in (call for call in calls if call.layer == layer.layer):
            real = 30 if call.keep is None else int(call.keep.sum())
            # Without the padding, which no method sees.
            q, k, v = (x[:, :, :real] for x in call[2:5])
            p = torch.softmax(q @ k.mT / 8**0.5, dim=-1)
            came = nystrom_attention(q, k, v, num_landmarks=4)
            off += (came - p @ v).square().sum(dim=(0, 2, 3))
            size += (p @ v).square().sum(dim=(0, 2, 3))
            rows = nystrom_rows(q, k, torch.arange(real), num_landmarks=4)
            variations += 0.5 * (rows - p).abs().sum(dim=(0, 2, 3))
            factors = nystrom_factors(q, k, num_landmarks=4)
            residuals.append(residual(factors.a, factors.inverse)[0])
        method = layer.methods["nystrom-4"]
        for value in method.error:
            assert_close(value, (off / size).sqrt(), **CLOSE)
        assert_close(method.variation.value, variations / 49, **CLOSE)
        assert_close(method.residual, torch.stack(residuals).mean(dim=0), **CLOSE)
        assert method.error.mean > 0.05


def test_the_whole_model_is_compared_at_real_tokens(bert, batch):
    found = inspect_model(bert, [batch], methods=["nystrom-4", "nystrom-64", "linear"])
    real = batch["attention_mask"].bool()
    with torch.no_grad():
        exact = bert(**batch).last_hidden_state[real]
        set_attention(bert, "nystrom", {"num_landmarks": 4})
        wanted = relative(bert(**batch).last_hidden_state[real], exact)
    assert found.whole["nystrom-4"].error == pytest.approx(wanted, rel=1e-9)
    assert wanted > 0.05
    # A landmark for each token: exact.
    assert found.whole["nystrom-64"].error < 1e-12
    assert found.layers[1].methods["nystrom-64"].error.mean < 1e-12
    assert found.layers[0].methods["linear"].variation is None
    assert found.layers[0].methods["linear"].residual is None
    assert found.whole["nystrom-4"].changed is None
    assert set(found.seconds) == {"nystrom-4", "nystrom-64", "linear", "softmax"}


@pytest.mark.parametrize("ours", [False, True], ids=["transformers", "nystrom"])
def test_the_plan_that_a_model_has_is_measured_too(bert, batch, sizes, ours):
    plan = AttentionPlan((LayerChoice("nystrom", {"num_landmarks": 4, "exact_heads": [1]}), LayerChoice("softmax", {})))
    config = EncoderConfig(attention="softmax", conv_kernel_size=None, **sizes)
    model = EncoderModel(config).double().eval() if ours else bert
    real = batch["attention_mask"].bool()
    with torch.no_grad():
        exact = model(**batch).last_hidden_state[real]
        assert set(inspect_model(model, [batch], methods=["nystrom-4"]).whole) == {"nystrom-4"}
        if ours:
            model.set_attention(PLAN, plan.options)
        else:
            set_attention(bert, plan)
        wanted = relative(model(**batch).last_hidden_state[real], exact)
    found = inspect_model(model, [batch], methods=["nystrom-4"])
    assert found.whole[PLAN].error == pytest.approx(wanted, rel=1e-9)
    assert 0 < wanted < found.whole["nystrom-4"].error


@pytest.mark.parametrize("kind", [BertForMaskedLM, BertForSequenceClassification])
def test_a_head_shows_how_many_predictions_change(kind, batch, sizes):
    torch.manual_seed(0)
    model = kind(BertConfig(num_labels=3, **sizes)).double().eval()
    found = inspect_model(model, [batch], methods=["nystrom-2"])
    with torch.no_grad():
        exact = model(**batch).logits.argmax(dim=-1)
        set_attention(model, "nystrom", {"num_landmarks": 2})
        changed = (model(**batch).logits.argmax(dim=-1) != exact).double()
    wanted = changed[batch["attention_mask"].bool()] if exact.ndim == 2 else changed
    assert found.whole["nystrom-2"].changed == pytest.approx(float(wanted.mean()))
    if exact.ndim == 2:
        assert 0 < found.whole["nystrom-2"].changed < 1


def test_a_model_of_this_library_is_compared_with_its_skip_convolution(batch, sizes):
    torch.manual_seed(0)
    model = EncoderModel(EncoderConfig(conv_kernel_size=5, attention_options={"num_landmarks": 4}, **sizes)).double()
    exact = EncoderModel(EncoderConfig(conv_kernel_size=5, attention="softmax", **sizes)).double().eval()
    exact.load_state_dict(model.state_dict())
    found = inspect_model(model.train(), [batch], methods=["nystrom-4"])
    assert model.training
    real = batch["attention_mask"].bool()
    with torch.no_grad():
        came, wanted = (each.eval()(**batch).last_hidden_state[real] for each in (model, exact))
    assert found.whole["nystrom-4"].error == pytest.approx(relative(came, wanted), rel=1e-9)
    assert found.layers[0].name == "encoder.layer.0.attention.self.method"


def test_a_model_with_replaced_attention_is_measured():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double().eval()
    x = torch.randn(2, 20, 16, dtype=torch.float64)
    with pytest.raises(ValueError, match="replace_attention"):
        inspect_model(model, [x], methods=["nystrom-4"])
    with torch.no_grad():
        exact = model(x)
        nystrom.replace_attention(model, "nystrom", {"num_landmarks": 4})
        wanted = relative(model(x), exact)
    found = inspect_model(model, [x], methods=["nystrom-4"])
    assert found.whole["nystrom-4"].error == pytest.approx(wanted, rel=1e-9)


def test_a_sample_is_near_the_exact_error_and_the_same_for_one_seed(bert):
    ids = torch.randint(40, (3, 64), generator=torch.Generator().manual_seed(2))
    exact, one, two, other = (
        inspect_model(bert, [{"input_ids": ids}], methods=["nystrom-4"], num_queries=count, seed=seed).layers[1]
        for count, seed in ((64, 0), (24, 0), (24, 0), (24, 1))
    )
    wanted, came = exact.methods["nystrom-4"].error, one.methods["nystrom-4"].error
    assert torch.equal(came.value, two.methods["nystrom-4"].error.value)
    assert not torch.equal(came.value, other.methods["nystrom-4"].error.value)
    assert torch.all(came.low < came.value)
    # Four standard errors for four heads.
    assert torch.all((came.value / wanted.value).log().abs() < 2 * (came.high / came.value).log())


def test_without_the_whole_model_layers_see_what_the_method_makes_of_those_below(bert, batch):
    found = inspect_model(bert, [batch], methods=["nystrom-4"], num_queries=30, whole_model=False)
    usual = inspect_model(bert, [batch], methods=["nystrom-4"], num_queries=30)
    first, second = ([each.layers[i].entropy.value for each in (found, usual)] for i in range(2))
    assert_close(*first, **CLOSE)
    assert not torch.allclose(*second, rtol=1e-3)
    assert not found.whole


def test_near_far_is_compared_as_a_model_of_that_length_has_it():
    usual, larger = read_candidates(["near_far", "near_far-128"], 2048)
    assert (usual.name, usual.options) == ("near_far", near_far_sizes(2048, selects=False))
    assert (larger.name, larger.options["exact_up_to"]) == ("near_far-128", 0)
    assert read_candidates(["near_far"])[0].options == {}


def test_local_layers_are_left_alone():
    config = AutoConfig.for_model(
        "modernbert", vocab_size=40, hidden_size=16, num_hidden_layers=4, num_attention_heads=2, intermediate_size=24,
        local_attention=8, global_attn_every_n_layers=3, bos_token_id=2, cls_token_id=2, eos_token_id=3, sep_token_id=3,
        pad_token_id=1,
    )  # fmt: skip
    model = AutoModel.from_config(config).eval()
    found = inspect_model(model, [{"input_ids": torch.randint(40, (1, 30))}], methods=["nystrom-4"])
    assert [layer.layer for layer in found.layers] == [0, 3]
    assert found.left == ("layers.1.attn", "layers.2.attn")


def test_the_encoder_of_an_encoder_decoder_is_served_and_the_whole_raises():
    torch.manual_seed(0)
    model = AutoModel.from_config(
        WhisperConfig(
            d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
            encoder_ffn_dim=16, decoder_ffn_dim=16, vocab_size=60, num_mel_bins=8, max_source_positions=24,
            pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        )
    ).eval()  # fmt: skip
    sound = {"input_features": torch.randn(1, 8, 48)}
    assert len(inspect_model(model.get_encoder(), [sound], methods=["nystrom-4"]).layers) == 1
    with pytest.raises(ValueError, match="causal"):
        inspect_model(model, [sound | {"decoder_input_ids": torch.tensor([[1, 2, 3]])}], methods=["nystrom-4"])
    assert model.config._attn_implementation == "sdpa"


def test_models_that_no_method_can_serve_raise_and_stay_as_they_were(batch, sizes):
    cases = [
        (AutoModel.from_config(GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2)), "causal"),
        (BertLMHeadModel(BertConfig(is_decoder=True, **sizes)), "causal"),
        (AutoModel.from_config(DebertaConfig(**sizes)), "attention of its own"),
    ]
    for model, says in cases:
        before = model.config._attn_implementation
        with pytest.raises(ValueError, match=says) as caught:
            inspect_model(model, [batch], methods=["nystrom-4"])
        assert "\n" not in str(caught.value)
        assert model.config._attn_implementation == before
        assert model.training


@pytest.mark.parametrize(
    ("methods", "says"),
    [
        ([], "methods is empty"),
        (["nystrm"], "nystrom"),
        (["linformer"], "would have to be learned"),
        (["nystrom", "nystrom-64"], "named twice"),
        (["nystrom-0"], "at least 1"),
    ],
)
def test_methods_that_cannot_be_had_raise(methods, says, bert, batch):
    with pytest.raises(ValueError, match=says):
        inspect_model(bert, [batch], methods=methods)


def test_a_method_that_cannot_serve_a_layer_is_named(bert, batch):
    with pytest.raises(ValueError, match=r"method longformer-4 cannot serve layer encoder\.layer\.0"):
        inspect_model(bert, [batch], methods=["longformer-4"])


def test_no_batch_and_no_real_token_raise(bert, batch):
    with pytest.raises(ValueError, match="batches is empty"):
        inspect_model(bert, [], methods=["nystrom-4"])
    with pytest.raises(ValueError, match="no real token"):
        inspect_model(bert, [batch | {"attention_mask": torch.zeros(2, 30, dtype=torch.long)}], methods=["nystrom-4"])


def test_near_far_sees_its_near_tokens_under_padding(bert, batch):
    real = batch["attention_mask"].bool()
    found = inspect_model(bert, [batch], methods=["near_far-2"], num_queries=30)
    with torch.no_grad():
        exact = bert(**batch).last_hidden_state[real]
        set_attention(bert, "near_far", {"num_heavy": 2, "num_clusters": 2, "exact_up_to": 0})
        wanted = relative(bert(**batch).last_hidden_state[real], exact)
    # The same to float64 rounding, measured by sequence and run as a batch.
    assert found.whole["near_far-2"].error == pytest.approx(wanted, rel=1e-9)
    calls = [call for call in first_calls(bert, batch) if call.layer == 0]
    assert all(call.masks.is_self for call in calls)
    # Layers are measured with the near tokens that the model has, also for the padded sequence.
    off = size = 0.0
    for call in calls:
        real = 30 if call.keep is None else int(call.keep.sum())
        q, k, v = (x[:, :, :real] for x in call[2:5])
        out = FUNCTIONS["softmax"](q, k, v)
        near_far = FUNCTIONS["near_far"](q, k, v, num_heavy=2, num_clusters=2, exact_up_to=0)
        off += (near_far - out).square().sum(dim=(0, 2, 3))
        size += out.square().sum(dim=(0, 2, 3))
    assert_close(found.layers[0].methods["near_far-2"].error.value, (off / size).sqrt(), **CLOSE)


def test_a_context_that_has_ended_holds_no_model(sizes):
    model = BertModel(BertConfig(**sizes)).eval()
    with torch.no_grad(), intercepted(model, lambda call: attend_by("softmax", call, {})):
        model(torch.zeros(1, 5, dtype=torch.long))
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
