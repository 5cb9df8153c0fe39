"""The estimated error of each layer and head while a model runs, whose outputs stay what they are."""

from functools import partial

import pytest
import torch
from torch import nn
from transformers import AutoModel, BertConfig, LlamaConfig

import nystrom
from nystrom import Alibi, MultiheadAttention, NystromAttention, monitor_errors, replace_attention, softmax_attention
from nystrom.attention.heads import AttentionHeads
from nystrom.attention.registry import METHODS
from nystrom.integrations import set_attention
from nystrom.integrations.error_monitor import is_monitored
from nystrom.models import EncoderConfig, EncoderModel

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 64}
NEAR_FAR = {"block_size": 4, "reach": 1, "num_heavy": 2, "num_clusters": 3, "exact_up_to": 0}
# Less than 33 real tokens: the estimate is the error.
IDS = torch.randint(3, 60, (2, 30), generator=torch.Generator().manual_seed(1))
MASK = (torch.arange(30) < torch.tensor([[30], [21]])).long()
INPUTS = {"input_ids": IDS, "attention_mask": MASK}


def bert(method="near_far", options=NEAR_FAR):
    torch.manual_seed(0)
    model = AutoModel.from_config(BertConfig(**SIZES, initializer_range=0.3)).eval()
    set_attention(model, method, options)
    return model


def relative(out, exact):
    return ((out - exact).square().sum((2, 3)) / exact.square().sum((2, 3))).sqrt()


@torch.no_grad()
def test_the_layers_of_transformers_models():
    model = bert()
    before = model(**INPUTS).last_hidden_state
    with monitor_errors(model) as errors:
        during = model(**INPUTS).last_hidden_state
        model(**INPUTS)
    after = model(**INPUTS).last_hidden_state
    assert torch.equal(during, before)
    assert torch.equal(after, before)
    assert [row.name for row in errors.rows] == [f"encoder.layer.{layer}.attention.self" for layer in range(2)]
    assert not errors.left
    # The first layer's queries, keys and values.
    hidden, own = model.embeddings(IDS), model.encoder.layer[0].attention.self
    q, k, v = (x(hidden).unflatten(-1, (4, 8)).transpose(1, 2) for x in (own.query, own.key, own.value))
    keep = MASK.bool()
    out, exact = (
        attend(q, k, v, keep=keep) for attend in (partial(nystrom.near_far_attention, **NEAR_FAR), softmax_attention)
    )
    true, (row, _) = relative(out, exact), errors.rows
    assert (row.method, row.calls, row.sequences) == ("near_far", 2, 4)
    assert row.mean == pytest.approx(true.mean(dim=0).tolist(), rel=1e-4)
    assert row.largest == pytest.approx(true.amax(dim=0).tolist(), rel=1e-4)
    assert min(row.mean) > 0.01


@torch.no_grad()
def test_each_kth_call_of_a_layer_and_the_table():
    model = bert()
    with monitor_errors(model, every=3) as errors:
        assert not errors.rows
        for _ in range(4):
            model(**INPUTS)
    assert [row.calls for row in errors.rows] == [2, 2]
    head, first, _ = str(errors).splitlines()
    assert head.split() == ["layer", "method", "calls", "sequences", "mean", "largest", "head"]
    row = errors.rows[0]
    worst = max(row.largest)
    numbers = [f"{sum(row.mean) / 4:.3f}", f"{worst:.3f}", f"{row.largest.index(worst)}"]
    assert first.split() == [row.name, "near_far", "2", "4", *numbers]


@torch.no_grad()
@pytest.mark.parametrize("method", [name for name in METHODS if is_monitored(name)])
def test_methods_that_layers_hold(method):
    torch.manual_seed(0)
    options = NEAR_FAR if method == "near_far" else {}
    model = nn.Sequential(MultiheadAttention(32, 4, method=method, **options)).eval()
    x, pad = torch.randn(2, 40, 32), ~MASK.bool()
    before = model[0](x[:, :30], key_padding_mask=pad)[0]
    state = torch.get_rng_state()
    with monitor_errors(model) as errors:
        during = model[0](x[:, :30], key_padding_mask=pad)[0]
    assert torch.equal(during, before)
    assert torch.equal(torch.get_rng_state(), state)
    (row,) = errors.rows
    assert (row.name, row.method, row.sequences) == ("0.heads", method, 2)
    assert "forward" not in vars(model[0].heads)


def test_padding_that_holds_nan_and_gradients_change_nothing():
    torch.manual_seed(0)
    heads = nystrom.build_attention("near_far", num_heads=4, head_dim=8, **NEAR_FAR)
    keep, results, rows = MASK.bool(), [], []
    for junk in (0.0, float("nan")):
        inputs = [torch.randn(2, 4, 30, 8, generator=torch.Generator().manual_seed(3)) for _ in range(3)]
        inputs = [x.masked_fill(~keep[:, None, :, None], junk).requires_grad_() for x in inputs]
        with monitor_errors(heads) as errors:
            out = heads(*inputs, keep=keep)
        out.sum().backward()
        results.append([out, *(x.grad for x in inputs)])
        rows.append(errors.rows)
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
    assert rows[0] == rows[1]


@torch.no_grad()
def test_the_skip_of_a_layer_is_no_part_of_its_error():
    torch.manual_seed(0)
    layer = NystromAttention(32, 4, num_landmarks=40, conv_kernel_size=5).eval()
    with monitor_errors(layer) as errors:
        layer(torch.randn(2, 30, 32))
    assert max(errors.rows[0].largest) < 1e-5


@torch.no_grad()
def test_models_of_this_library_and_replaced_attention():
    torch.manual_seed(0)
    own = EncoderModel(EncoderConfig(**SIZES, attention="near_far", attention_options=NEAR_FAR)).eval()
    with monitor_errors(own) as errors:
        own(**INPUTS)
    assert [row.method for row in errors.rows] == ["near_far"] * 2
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(32, 4, 48, batch_first=True), 2, enable_nested_tensor=False
    )
    replace_attention(encoder, "nystrom", {"num_landmarks": 4})
    with monitor_errors(encoder.eval()) as errors:
        encoder(torch.randn(2, 30, 32))
    assert [row.method for row in errors.rows] == ["nystrom"] * 2


@torch.no_grad()
def test_a_tolerance_of_a_model_of_transformers():
    exact, within, model = bert("sdpa", {}), bert(options={**NEAR_FAR, "tolerance": 0.0}), bert()
    wanted = exact(**INPUTS).last_hidden_state[MASK.bool()]
    torch.testing.assert_close(within(**INPUTS).last_hidden_state[MASK.bool()], wanted)
    assert (model(**INPUTS).last_hidden_state[MASK.bool()] - wanted).abs().max() > 0.01
    with monitor_errors(within) as errors:
        within(**INPUTS)
    assert max(max(row.largest) for row in errors.rows) < 1e-5


@torch.no_grad()
def test_what_is_left_out_is_named():
    model = bert(options={**NEAR_FAR, "exact_layers": (1,)})
    with monitor_errors(model) as errors:
        model(**INPUTS)
    assert len(errors.rows) == 1
    assert errors.left == {"encoder.layer.1.attention.self": "exact attention"}
    assert "left out: encoder.layer.1.attention.self (exact attention)" in str(errors)
    decoder = AutoModel.from_config(LlamaConfig(**SIZES)).eval()
    set_attention(decoder, "near_far")
    with monitor_errors(decoder) as errors:
        decoder(IDS)
    assert {*errors.left.values()} == {"causal"}
    x = torch.randn(1, 30, 32)
    for method, call, why in (
        ("softmax", {}, "exact attention"),
        ("linear", {}, "kernel or rule of its own"),
        ("reformer", {}, "kernel or rule of its own"),
        ("near_far", {"is_causal": True}, "causal"),
        ("near_far", {"cu_seqlens": torch.tensor([0, 9, 30])}, "packed"),
        ("near_far", {"bias": Alibi(torch.ones(4))}, "bias of positions"),
    ):
        layer = MultiheadAttention(32, 4, method=method).eval()
        with monitor_errors(layer) as errors:
            layer(x, **call)
        assert not errors.rows
        assert why in errors.left["heads"]


def test_another_model_with_the_same_method_and_an_error_leave_no_trace():
    model, other = bert(), bert()
    with monitor_errors(model) as errors, torch.no_grad():
        other(**INPUTS)
    assert not errors.rows
    layer = MultiheadAttention(32, 4, method="near_far")
    heads = next(module for module in layer.modules() if isinstance(module, AttentionHeads))
    heads.forward = wrapped = heads.forward
    with pytest.raises(RuntimeError, match="stop"), monitor_errors(layer):
        raise RuntimeError("stop")
    assert vars(heads)["forward"] is wrapped


@pytest.mark.refuses
def test_what_cannot_be_monitored_raises():
    with (
        pytest.raises(ValueError, match=r"Linear holds no attention of this library.*replace_attention"),
        monitor_errors(nn.Linear(2, 2)),
    ):
        pass
    layer = MultiheadAttention(32, 4, method="near_far").eval()
    with pytest.raises(ValueError, match="every is 0"), monitor_errors(layer, every=0):
        pass
    x = torch.randn(1, 30, 32)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    with monitor_errors(layer), pytest.raises(Exception, match="monitor_errors is on, which looks at the values"):
        compiled(x)
