"""Every door that takes a mask of tokens gives one answer to one way of writing it: `nystrom.attention.mask_values`."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close
from transformers import AutoModel, BertConfig, BertForTokenClassification, BertModel

from nystrom import MultiheadAttention, NystromAttention, hilbert_order, nystrom_attention, replace_attention
from nystrom.inspection import inspect_model
from nystrom.integrations.over_ranks import _refusal
from nystrom.landmarks import segment_means
from nystrom.models import EncoderConfig, EncoderForMultipleChoice, EncoderForQuestionAnswering, EncoderModel

SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 64}
FEW = {"num_landmarks": 4}
KEEP = torch.arange(20) < torch.tensor([[20], [13]])
IDS = torch.randint(3, 60, (2, 20), generator=torch.Generator().manual_seed(1))
X = torch.randn(2, 20, 32, generator=torch.Generator().manual_seed(2))
LOWEST = torch.finfo(torch.float32).min


def additive(keep, low):
    return torch.zeros(keep.shape).masked_fill(~keep, low)


# The same real tokens, as they are written elsewhere.
WRITTEN = {
    "booleans": KEEP,
    "integers": KEEP.long(),
    "floats": KEEP.float(),
    "bfloat16": KEEP.bfloat16(),
    "0 and -inf": additive(KEEP, -torch.inf),
    "0 and the lowest float": additive(KEEP, LOWEST),
    "0 and the lowest float16": additive(KEEP, torch.finfo(torch.float16).min).half(),
    "additive, without padding": torch.zeros(2, 20),
    "0 and -10,000": additive(KEEP, -10000.0),
    "integers of packed sequences": KEEP.long() + (torch.arange(20) < 7),
    "shares": KEEP * 0.5,
    "NaN": additive(KEEP, torch.nan),
}


def bert(method="nystrom", kind=None):
    torch.manual_seed(0)
    config = BertConfig(**SIZES, max_position_embeddings=40)
    options = FEW if method == "nystrom" else {}
    make = AutoModel.from_config if kind is None else kind._from_config
    return make(config, attn_implementation=method, attention_options=options).eval()


def encoder(kind):
    torch.manual_seed(0)
    return kind(EncoderConfig(**SIZES, attention="nystrom", attention_options=FEW)).eval()


def run(model):
    return lambda mask: model(input_ids=IDS, attention_mask=mask)[0][KEEP]


def sentence_transformers_module():
    modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    pooling = modules.Pooling(32)
    model = bert()

    def embed(mask):
        states = model(input_ids=IDS, attention_mask=mask)[0]
        return pooling({"token_embeddings": states, "attention_mask": mask})["sentence_embedding"]

    return embed


def inspected():
    model = bert("sdpa")

    def errors(mask):
        report = inspect_model(model, [{"input_ids": IDS, "attention_mask": mask}], methods=["nystrom-4"])
        return torch.tensor(report.whole["nystrom-4"].error)

    return errors


def over_ranks():
    def read(mask):
        if (error := _refusal(IDS, mask, None)) is not None:
            raise error
        return mask.bool()

    return read


def choices(mask):
    model = encoder(EncoderForMultipleChoice)
    return model(input_ids=IDS[:, None], attention_mask=mask[:, None]).logits


# Models that read `attention_mask`, as in transformers.
MODELS = {
    "a model of this library": lambda: run(encoder(EncoderModel)),
    "a head": lambda: run(encoder(EncoderForQuestionAnswering)),
    "multiple choice": lambda: choices,
    "BERT": lambda: run(bert()),
    "BERT by near_far": lambda: run(bert("near_far")),
    "BERT with a head": lambda: run(bert(kind=BertForTokenClassification)),
    "BERT, copied": lambda: run(copy.deepcopy(bert())),
    "BERT, unpickled": lambda: run(pickle.loads(pickle.dumps(bert()))),
    "sentence-transformers": sentence_transformers_module,
    "inspection": inspected,
    "over ranks": over_ranks,
}
# The import of sentence-transformers takes seconds.
DOORS = [pytest.param(door, marks=pytest.mark.long) if door == "sentence-transformers" else door for door in MODELS]
TAKEN = ("booleans", "integers", "floats", "bfloat16")


@pytest.mark.parametrize("door", DOORS)
def test_models_take_zeros_and_ones_of_any_dtype(door):
    call = MODELS[door]()
    with torch.no_grad():
        wanted = call(WRITTEN["booleans"])
        for written in TAKEN[1:]:
            # Pooling of sentence-transformers computes with the mask itself.
            assert_close(call(WRITTEN[written]), wanted, rtol=0, atol=1e-6)


@pytest.mark.refuses
@pytest.mark.parametrize("door", DOORS)
def test_models_refuse_every_other_number(door):
    call = MODELS[door]()
    for written in WRITTEN.keys() - TAKEN:
        with (
            torch.no_grad(),
            pytest.raises(ValueError, match=r"attention_mask has dtype .* numbers other than 0") as told,
        ):
            call(WRITTEN[written])
        assert "of 0 and -inf or the lowest float, 0 means a real token: pass attention_mask == 0" in str(told.value)


def multihead(**how):
    torch.manual_seed(0)
    return MultiheadAttention(32, 4, **how).eval()


def context(mask):
    layer = multihead(method="near_far", self_attention=False)
    return layer.context(X)(X, query_padding_mask=mask)[KEEP]


def replaced():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True).eval()
    replace_attention(layer, "nystrom", FEW)
    return lambda mask: layer(X, src_key_padding_mask=mask)[KEEP]


def nystrom_layer():
    torch.manual_seed(0)
    layer = NystromAttention(32, 4, num_landmarks=4).eval()
    return lambda mask: layer(X, key_padding_mask=mask)[0][KEEP]


# Layers that read `key_padding_mask` or `query_padding_mask`, as in torch: True or a low number ignores a token.
LAYERS = {
    "NystromAttention": nystrom_layer,
    "MultiheadAttention": lambda: lambda mask: multihead(method="near_far")(X, key_padding_mask=mask)[0][KEEP],
    "a context": lambda: context,
    "replaced in a layer of torch": replaced,
}
LOW = ("0 and -inf", "0 and the lowest float", "0 and the lowest float16")


@pytest.mark.parametrize("door", LAYERS)
def test_layers_take_what_torch_takes(door):
    call = LAYERS[door]()
    with torch.no_grad():
        wanted = call(~KEEP)
        for written in LOW:
            assert_close(call(WRITTEN[written]), wanted, rtol=0, atol=0)


@pytest.mark.refuses
@pytest.mark.parametrize("door", LAYERS)
def test_layers_refuse_every_other_number(door):
    call = LAYERS[door]()
    for written in ("integers", "floats", "0 and -10,000", "shares", "NaN"):
        # torch's own layer refuses integers before ours sees them.
        with torch.no_grad(), pytest.raises((ValueError, AssertionError), match="_padding_mask") as told:
            call(WRITTEN[written])
        if WRITTEN[written].is_floating_point():
            assert "other than 0 and -inf (or the lowest float)" in str(told.value)
            assert "_padding_mask < 0" in str(told.value)


HEADS = X.unflatten(-1, (4, 8)).transpose(1, 2)
# Functions that read `keep`.
FUNCTIONS = {
    "keep": lambda keep: nystrom_attention(HEADS, HEADS, HEADS, keep=keep),
    "key_keep": lambda keep: nystrom_attention(HEADS, HEADS, HEADS, key_keep=keep),
    "query_keep": lambda keep: nystrom_attention(HEADS, HEADS, HEADS, query_keep=keep),
    "landmarks": lambda keep: segment_means(HEADS, 4, keep=keep),
    "tiles": lambda keep: hilbert_order(IDS[..., None].expand(2, 20, 2), keep=keep),
}


@pytest.mark.refuses
@pytest.mark.parametrize("door", FUNCTIONS)
def test_functions_take_booleans_alone(door):
    FUNCTIONS[door](KEEP)
    for written in WRITTEN.keys() - {"booleans"}:
        with pytest.raises(ValueError, match=r"keep has dtype .*keep.bool\(\) if it is 0/1, \w*keep == 0 if .*-inf"):
            FUNCTIONS[door](WRITTEN[written])


@pytest.mark.refuses
@pytest.mark.parametrize("method", ["nystrom", "near_far"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.float32])
def test_a_mask_with_four_axes_that_is_not_boolean_is_told_by_its_dtype(method, dtype):
    """Also in one row, where the numbers of a causal mask or of packed sequences stood for themselves."""
    model = bert(method)
    for mask in (KEEP, KEEP[:1], KEEP[:1].flip(1)):
        four = mask[:, None, None].to(dtype)
        with torch.no_grad(), pytest.raises(ValueError, match=rf"{dtype}; {method} attention takes booleans") as told:
            model(IDS[: len(mask)], four)
        assert "mask[:, 0, 0] == 0 of an additive mask (0 and -inf, or the lowest float)" in str(told.value)
    assert_close(model(IDS, KEEP[:, None, None])[0], model(IDS, KEEP)[0], rtol=0, atol=0)


@pytest.mark.parametrize("method", ["nystrom", "near_far"])
def test_one_row_of_real_keys_for_all_queries_is_padding(method):
    """Audio encoders repeat the row for each query; a row that differs is a mask per pair of tokens."""
    model, pairs = bert(method), KEEP[:, None, None].expand(2, 1, 20, 20)
    with torch.no_grad():
        wanted = model(IDS, KEEP)[0]
        assert_close(model(IDS, pairs)[0], wanted, rtol=0, atol=0)
        assert_close(model(IDS, pairs.clone())[0], wanted, rtol=0, atol=0)
        other = pairs.clone()
        other[1, 0, 5, 3] = False
        with pytest.raises(ValueError, match="one per pair of tokens"):
            model(IDS, other)


@pytest.mark.parametrize("method", ["nystrom", "near_far"])
@pytest.mark.parametrize("kind", [BertModel, EncoderModel])
def test_numbers_that_are_not_there_are_not_asked_for(kind, method):
    """Counts of memory use tensors that have a shape alone."""
    with FakeTensorMode():
        model = bert(method) if kind is BertModel else kind(EncoderConfig(**SIZES, attention=method)).eval()
        ids = torch.ones(2, 20, dtype=torch.long)
        assert model(ids, ids)[0].shape == (2, 20, 32)


@pytest.mark.long
@pytest.mark.parametrize("make", [bert, lambda: encoder(EncoderModel)])
def test_a_compiled_model_checks_floats_where_it_runs(make):
    model = make()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        # float32, without the loops of our own that a compiler cannot trace.
        assert_close(compiled(IDS, WRITTEN["floats"])[0], model(IDS, KEEP)[0], rtol=0, atol=1e-5)
        with pytest.raises(RuntimeError, match=r"attention_mask has dtype torch\.float32 and holds zeros alone"):
            compiled(IDS, WRITTEN["0 and -inf"])
    torch.compiler.reset()
