"""near_far and Nyström attention as one operator of onnxruntime give what the functions and the models give."""

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.testing import assert_close
from transformers import BertConfig, BertModel

from nystrom import near_far_attention, nystrom_attention
from nystrom.attention.onnx_operator import OPERATORS
from nystrom.attention.registry import METHODS
from nystrom.integrations import set_attention
from nystrom.models import EncoderConfig, EncoderModel
from nystrom.models.export.comparison import methods_of
from nystrom.models.export.onnx_program import export_onnx
from nystrom.native import onnx_library

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

needs_a_compiler = pytest.mark.skipif(shutil.which(os.environ.get("CXX", "c++")) is None, reason="no C++ compiler here")
# The library is compiled once for a machine, which takes seconds.
pytestmark = [pytest.mark.long, needs_a_compiler]

SIZES: dict[str, Any] = {"block_size": 4, "reach": 1, "num_heavy": 2, "num_clusters": 3, "exact_up_to": 0}
OPTIONS: dict[str, dict[str, Any]] = {"near_far": SIZES, "nystrom": {"num_landmarks": 4}}
FUNCTIONS = {"near_far": near_far_attention, "nystrom": nystrom_attention}
NAMES = {name: operator.name for name, operator in OPERATORS.items()}
# Sequences, tokens, padding on the left and on the right of the last.
SHAPES = ((1, 1, 0, 0), (1, 5, 0, 0), (2, 40, 5, 0), (3, 33, 0, 20), (2, 70, 7, 9))
both = pytest.mark.parametrize("method", OPERATORS)


def start(file):
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(onnx_library()))
    return onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])


def operator(method, more=(), dtype=1, **changes):
    """A session of the operator alone, in float32 (1 in ONNX); `more` inputs may be left out of a file."""
    types = onnx.TensorProto
    options = METHODS[method].options(**OPTIONS[method])
    attributes = {name: getattr(options, name) for name in OPERATORS[method].attributes}
    if "z0" in attributes:
        attributes["z0"] = ("paper", "authors", "sequence").index(changes.pop("z0", "paper"))
    inputs = {name: (dtype, ["b", "h", None, None]) for name in "qkv"} | {"keep": (types.BOOL, ["b", None])}
    if method == "nystrom":
        inputs |= {"query_keep": (types.BOOL, ["b", None])}
    inputs |= {name: (dtype, [None, None]) for name in more}
    node = onnx.helper.make_node(
        NAMES[method], [*inputs], ["out"], domain="nystrom", scale=0.3, **(attributes | changes)
    )
    values = [onnx.helper.make_tensor_value_info(name, *kind) for name, kind in inputs.items()]
    out = onnx.helper.make_tensor_value_info("out", dtype, ["b", "h", None, None])
    versions = [onnx.helper.make_opsetid("", 18), onnx.helper.make_opsetid("nystrom", 1)]
    graph = onnx.helper.make_graph([node], "graph", values, [out])
    return start(onnx.helper.make_model(graph, opset_imports=versions, ir_version=9).SerializeToString())


def draw(b, h, n, d, e, left, right):
    g = torch.Generator().manual_seed(n)
    q, k, v = (torch.randn(b, h, n, width, generator=g) for width in (d, d, e))
    keep = torch.ones(b, n, dtype=torch.bool)
    keep[-1, :left], keep[-1, n - right :] = False, False
    if n > 40:
        # Holes, which count as positions
        keep[0, 15:21] = False
    return q, k, v, keep


def run(session, **inputs):
    return torch.from_numpy(session.run(None, {name: x.numpy() for name, x in inputs.items()})[0])


def attend(session, q, k, v, keep, **more):
    """The operator's output; the mask is that of queries and keys unless there is another."""
    x = {"q": q, "k": k, "v": v, "keep": keep, "query_keep": keep} | more
    return run(session, **{each.name: x[each.name] for each in session.get_inputs()})


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("near_far", {}),
        ("near_far", {"num_heavy": 0, "reach": 0, "iterations": 1}),
        ("near_far", {"num_selected": 3}),
        ("near_far", {"exact_up_to": 30}),
        ("near_far", {"block_size": 16, "reach": 20, "num_clusters": 9}),
        ("nystrom", {}),
        ("nystrom", {"num_landmarks": 9, "pinv_steps": 0}),
        ("nystrom", {"num_landmarks": 17, "pinv_steps": 1, "z0": "sequence"}),
        ("nystrom", {"num_landmarks": 5, "pinv_steps": 1, "z0": "authors"}),
    ],
)
def test_the_operator_is_the_function(method, changes):
    session = operator(method, **changes)
    for b, n, left, right in (*SHAPES, (1, 300, 0, 0)):
        q, k, v, keep = draw(b, 2, n, 6, 5, left, right)
        keep[-1] &= torch.arange(n) != 3
        wanted = FUNCTIONS[method](q, k, v, keep=keep, **(OPTIONS[method] | changes), scale=0.3)
        # The same choices; sums of a few numbers around 1 in another order.
        assert_close(attend(session, q, k, v, keep), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("taps", [1, 5, 35])
def test_the_operator_of_nystrom_adds_a_convolution(taps):
    session, g = operator("nystrom", ["skip"]), torch.Generator().manual_seed(taps)
    w = torch.randn(2, taps, generator=g)
    for b, n, left, right in SHAPES:
        q, k, v, keep = draw(b, 2, n, 6, 5, left, right)
        keep[-1] &= torch.arange(n) != 3
        v[~keep[:, None].expand(v.shape[:3])] = torch.nan
        wanted = nystrom_attention(q, k, v, keep=keep, num_landmarks=4, scale=0.3, skip=w[:, None, :, None])
        assert_close(attend(session, q, k, v, keep, skip=w), wanted, rtol=0, atol=1e-5)


def test_the_operator_of_nystrom_takes_other_keys_than_queries():
    session = operator("nystrom")
    for n, s in ((40, 70), (70, 40), (3, 70), (70, 3)):
        q, (_, k, v, keep) = draw(2, 2, n, 6, 5, 0, 0)[0], draw(2, 2, s, 6, 5, 1, 1)
        query_keep = torch.arange(n) < torch.tensor([[n], [n - 1]])
        wanted = nystrom_attention(q, k, v, key_keep=keep, query_keep=query_keep, num_landmarks=4, scale=0.3)
        assert_close(attend(session, q, k, v, keep, query_keep=query_keep), wanted, rtol=0, atol=1e-5)


@both
def test_the_operator_reads_nothing_of_padding_or_of_neighbours(method):
    session = operator(method)
    q, k, v, keep = draw(2, 2, 50, 6, 5, 4, 9)
    whole = attend(session, q, k, v, keep)
    inside = slice(4, 41)
    alone = attend(session, q[1:, :, inside], k[1:, :, inside], v[1:, :, inside], keep[1:, inside])
    assert torch.equal(whole[1:, :, inside], alone)
    for x in (q, k, v):
        x[~keep[:, None].expand(x.shape[:3])] = torch.nan
    assert torch.equal(attend(session, q, k, v, keep), whole)
    assert not whole[1, :, :4].any()


@both
@pytest.mark.parametrize(("b", "n"), [(0, 5), (2, 0)])
def test_the_operator_takes_nothing(method, b, n):
    q, k, v, keep = draw(2, 2, 5, 6, 5, 0, 0)
    found = attend(operator(method), q[:b, :, :n], k[:b, :, :n], v[:b, :, :n], keep[:b, :n])
    assert found.shape == (b, 2, n, 5)


@both
def test_the_operator_gives_zeros_where_no_token_is_real(method):
    q, k, v, keep = draw(2, 2, 50, 6, 5, 0, 50)
    assert not attend(operator(method), q, k, v, keep)[1].any()


@both
@pytest.mark.parametrize("value", [torch.nan, -torch.inf, 3e38])
def test_the_operator_keeps_numbers_that_are_not_finite_in_their_head(method, value):
    session = operator(method)
    for n, name in ((3, "v"), (50, "q"), (50, "k"), (50, "v")):
        x: dict[str, Any] = dict(zip(("q", "k", "v", "keep"), draw(2, 2, n, 6, 5, 0, 0), strict=True))
        before = attend(session, **x)
        x[name][0, 0, n // 2, 2] = value
        found = attend(session, **x)
        wanted = FUNCTIONS[method](**x, **OPTIONS[method], scale=0.3)
        assert torch.equal(found[0, 1], before[0, 1])
        assert torch.equal(found[1], before[1])
        assert torch.equal(found.isfinite(), wanted.isfinite())


@both
@pytest.mark.parametrize("value", [-3e38, 3e38])
def test_one_token_gets_its_value(method, value):
    q, k, v, keep = draw(1, 2, 1, 6, 5, 0, 0)
    q[..., 2] = value
    assert torch.equal(attend(operator(method), q, k, v, keep), v)


def test_sessions_run_at_once():
    sessions = operator("nystrom", z0="sequence"), operator("near_far"), operator("nystrom", z0="sequence")
    inputs = draw(2, 4, 300, 6, 5, 4, 9)
    alone = [attend(each, *inputs) for each in sessions]
    with ThreadPoolExecutor(6) as pool:
        some = [(i, pool.submit(attend, sessions[i], *inputs)) for i in 10 * [0, 1, 2]]
        assert all(torch.equal(future.result(), alone[i]) for i, future in some)


@both
@pytest.mark.parametrize("dtype", ["FLOAT16", "DOUBLE"])
def test_the_operator_refuses_other_dtypes(method, dtype):
    with pytest.raises(Exception, match=f"input parameter \\(q\\) of operator \\({NAMES[method]}\\)"):
        operator(method, dtype=getattr(onnx.TensorProto, dtype))


@both
@pytest.mark.parametrize("wrong", ["k", "v", "keep"])
def test_the_operator_refuses_shapes_that_do_not_fit(method, wrong):
    x = dict(zip(("q", "k", "v", "keep"), draw(2, 2, 50, 6, 5, 0, 0), strict=True))
    x[wrong] = x[wrong][:1]
    with pytest.raises(Exception, match=rf"{NAMES[method]}: expected q"):
        attend(operator(method), **x)


@pytest.mark.parametrize("shape", [(1, 3), (2, 3, 1), ()])
def test_the_operator_refuses_kernels_that_do_not_fit(shape):
    with pytest.raises(Exception, match=r"Nystrom: expected q .* skip \(h, taps\)|Invalid rank for input: skip"):
        attend(operator("nystrom", ["skip"]), *draw(2, 2, 50, 6, 5, 0, 0), skip=torch.ones(shape))


@pytest.mark.parametrize(
    ("method", "name", "value"),
    [
        *(("near_far", name, 0) for name in ("block_size", "num_clusters", "iterations")),
        *(("nystrom", name, value) for name, value in (("num_landmarks", 0), ("pinv_steps", -1))),
    ],
)
def test_the_operator_refuses_sizes_out_of_range(method, name, value):
    with pytest.raises(Exception, match=f"{NAMES[method]}: {name} is out of range"):
        operator(method, **{name: value})


ENCODER: dict[str, Any] = {
    **{"vocab_size": 17, "hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16},
    **{"max_position_embeddings": 80, "initializer_range": 0.3},
}


def make_ours(attention="near_far", **options):
    torch.manual_seed(0)
    # Without loops ONNX has no choice of keys.
    given = {"near_far": SIZES | {"num_selected": 3}, "nystrom": OPTIONS["nystrom"]}.get(attention, {}) | options
    convolution: dict[str, Any] = {"conv_kernel_size": 5} if attention == "nystrom" else {}
    config = EncoderConfig(**ENCODER, **convolution, attention=attention, attention_options=given)
    return EncoderModel(config).eval()


def make_bert(attention="near_far", **options):
    torch.manual_seed(0)
    config = BertConfig.from_dict(ENCODER | {"attention_options": OPTIONS[attention] | options})
    return BertModel._from_config(config, attn_implementation=attention).eval()


@both
@pytest.mark.parametrize("make", [make_ours, make_bert])
def test_a_file_with_loops_gives_what_the_model_gives(make, method, tmp_path):
    model = make(method)
    done = export_onnx(model, tmp_path / "model.onnx", loops=True)
    assert done.difference < 1e-5
    assert [node.op_type for node in onnx.load(tmp_path / "model.onnx").graph.node if node.domain] == [NAMES[method]]
    session = start(tmp_path / "model.onnx")
    for b, n, left, right in SHAPES:
        ids = torch.randint(0, 17, (b, n), generator=torch.Generator().manual_seed(n))
        mask = torch.ones_like(ids)
        mask[-1, :left], mask[-1, n - right :] = 0, 0
        with torch.no_grad():
            wanted = model(ids, attention_mask=mask).last_hidden_state
        found = run(session, input_ids=ids, attention_mask=mask)
        # float32 rounding through a layer
        assert_close(found[mask.bool()], wanted[mask.bool()], rtol=0, atol=1e-5)
        if right:
            alone = run(session, input_ids=ids[-1:, : n - right], attention_mask=mask[-1:, : n - right])
            assert_close(found[-1:, left : n - right], alone[:, left:], rtol=0, atol=1e-5)


def test_a_file_with_loops_needs_the_library(tmp_path):
    export_onnx(make_ours(), tmp_path / "model.onnx", loops=True, check=False)
    with pytest.raises(Exception, match=r"nystrom:NearFar.* is not a registered function"):
        onnxruntime.InferenceSession(tmp_path / "model.onnx")


@pytest.fixture
def no_trace(monkeypatch):
    def trace(*_, **__):
        raise AssertionError("a trace has begun")

    monkeypatch.setattr(torch.export, "export", trace)


def test_loops_without_a_method_that_has_an_operator_are_refused(tmp_path, no_trace):
    wanted = "loops is True, but no layer of the model has self-attention by near_far or nystrom"
    for model in (make_ours("softmax"), make_ours("skyformer")):
        with pytest.raises(ValueError, match=wanted):
            export_onnx(model, tmp_path / "model.onnx", loops=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("loops", [True, False])
def test_an_option_that_a_method_does_not_have_is_refused(loops, tmp_path, no_trace):
    with pytest.raises(ValueError, match=r"in config.attention_options 'num_heavie' is unknown.*'num_heavy'"):
        export_onnx(make_bert("near_far", num_heavie=3), tmp_path / "model.onnx", loops=loops)


@pytest.mark.parametrize("make", [make_ours, make_bert])
@pytest.mark.parametrize(
    ("method", "option", "value"),
    [
        ("nystrom", "landmarks", "kmeans"),
        ("nystrom", "pinv", "exact"),
        ("nystrom", "tolerance", 0.1),
        ("near_far", "tolerance", 0.1),
    ],
)
def test_options_that_an_operator_does_not_take_are_refused(make, method, option, value, tmp_path, no_trace):
    wanted = f"{option} is {value!r}, which the operator of {method} for onnxruntime does not take: use "
    with pytest.raises(ValueError, match=wanted):
        export_onnx(make(method, **{option: value}), tmp_path / "model.onnx", loops=True)


def test_the_tokens_that_are_exact_are_read_from_the_layers():
    plan = {"layers": [{"method": "near_far", "options": {"exact_up_to": 70}}, {"method": "softmax", "options": {}}]}
    for model, most in (
        (make_ours(exact_up_to=70), 70),
        (make_bert(exact_up_to=70), 70),
        (make_bert(exact_up_to=70, exact_layers=[0]), 70),
        (BertModel(BertConfig.from_dict(ENCODER)), 0),
        (make_bert("nystrom"), 0),
    ):
        assert max((getattr(options, "exact_up_to", 0) for _, options in methods_of(model)), default=0) == most
    planned = BertModel(BertConfig.from_dict({**ENCODER, "num_hidden_layers": 2}))
    set_attention(planned, "nystrom_plan", plan)
    assert [(method, getattr(options, "exact_up_to", 0)) for method, options in methods_of(planned)] == [
        ("near_far", 70),
        ("softmax", 0),
    ]
