"""near_far as one operator of onnxruntime gives what the function and the models give."""

import os
import shutil
from typing import Any

import pytest
import torch
from torch.testing import assert_close
from transformers import BertConfig, BertModel

import nystrom.integrations  # noqa: F401 (registers near_far with transformers)
from nystrom import near_far_attention
from nystrom.attention.options import NearFarOptions
from nystrom.models import EncoderConfig, EncoderModel
from nystrom.models.export.onnx_program import export_onnx
from nystrom.native import onnx_library

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

needs_a_compiler = pytest.mark.skipif(shutil.which(os.environ.get("CXX", "c++")) is None, reason="no C++ compiler here")
# The library is compiled once for a machine, which takes seconds.
pytestmark = [pytest.mark.long, needs_a_compiler]

SIZES: dict[str, Any] = {"block_size": 4, "reach": 1, "num_heavy": 2, "num_clusters": 3, "exact_up_to": 0}
FIELDS = "block_size", "reach", "num_heavy", "num_clusters", "iterations", "exact_up_to", "num_selected"
# Sequences, tokens, padding on the left and on the right of the last.
SHAPES = ((1, 1, 0, 0), (1, 5, 0, 0), (2, 40, 5, 0), (3, 33, 0, 20), (2, 70, 7, 9))


def start(file):
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(onnx_library()))
    return onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])


def operator(options, scale):
    """A file with the operator alone."""
    types = onnx.TensorProto
    inputs = [(name, types.FLOAT, ["b", "h", "n", name]) for name in "qkv"] + [("keep", types.BOOL, ["b", "m"])]
    node = onnx.helper.make_node(
        "NearFar", [*"qkv", "keep"], ["out"], domain="nystrom", scale=scale, **{x: getattr(options, x) for x in FIELDS}
    )
    values = [
        onnx.helper.make_tensor_value_info(*each) for each in (*inputs, ("out", types.FLOAT, ["b", "h", "n", "e"]))
    ]
    graph = onnx.helper.make_graph([node], "graph", values[:-1], values[-1:])
    versions = [onnx.helper.make_opsetid("", 18), onnx.helper.make_opsetid("nystrom", 1)]
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


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_heavy": 0, "reach": 0, "iterations": 1},
        {"num_selected": 3},
        {"exact_up_to": 30},
        {"block_size": 16, "reach": 20, "num_clusters": 9},
    ],
)
def test_the_operator_is_the_function(changes):
    options = NearFarOptions(**(SIZES | changes))
    session = operator(options, 0.3)
    for b, n, left, right in (*SHAPES, (1, 300, 0, 0)):
        q, k, v, keep = draw(b, 2, n, 6, 5, left, right)
        keep[-1] &= torch.arange(n) != 3
        found = run(session, q=q, k=k, v=v, keep=keep)
        wanted = near_far_attention(q, k, v, keep=keep, **(SIZES | changes), scale=0.3)
        # The same choices; sums of a few numbers around 1 in another order.
        assert_close(found, wanted, rtol=0, atol=1e-5)


def test_the_operator_reads_nothing_of_padding_or_of_neighbours():
    session = operator(NearFarOptions(**SIZES), 0.3)
    q, k, v, keep = draw(2, 2, 50, 6, 5, 4, 9)
    whole = run(session, q=q, k=k, v=v, keep=keep)
    inside = slice(4, 41)
    alone = run(
        session, keep=keep[1:, inside], **{name: x[1:, :, inside] for name, x in zip("qkv", (q, k, v), strict=True)}
    )
    assert torch.equal(whole[1:, :, inside], alone)
    for x in (q, k, v):
        x[~keep[:, None].expand(x.shape[:3])] = torch.nan
    assert torch.equal(run(session, q=q, k=k, v=v, keep=keep), whole)
    assert not whole[1, :, :4].any()


@pytest.mark.parametrize(("b", "n"), [(0, 5), (2, 0)])
def test_the_operator_takes_nothing(b, n):
    q, k, v, keep = draw(2, 2, 5, 6, 5, 0, 0)
    found = run(
        operator(NearFarOptions(**SIZES), 0.3), q=q[:b, :, :n], k=k[:b, :, :n], v=v[:b, :, :n], keep=keep[:b, :n]
    )
    assert found.shape == (b, 2, n, 5)


def test_the_operator_gives_zeros_where_no_token_is_real():
    q, k, v, keep = draw(2, 2, 50, 6, 5, 0, 50)
    assert not run(operator(NearFarOptions(**SIZES), 0.3), q=q, k=k, v=v, keep=keep)[1].any()


@pytest.mark.parametrize("wrong", ["k", "v", "keep"])
def test_the_operator_refuses_shapes_that_do_not_fit(wrong):
    x = dict(zip(("q", "k", "v", "keep"), draw(2, 2, 50, 6, 5, 0, 0), strict=True))
    x[wrong] = x[wrong][:1]
    with pytest.raises(Exception, match=r"NearFar: expected q, k \(b, h, n, d\), v \(b, h, n, e\) and keep \(b, n\)"):
        run(operator(NearFarOptions(**SIZES), 0.3), **x)


@pytest.mark.parametrize("name", ["block_size", "num_clusters", "iterations"])
def test_the_operator_refuses_sizes_out_of_range(name):
    options = NearFarOptions(**SIZES)
    object.__setattr__(options, name, 0)
    with pytest.raises(Exception, match=f"NearFar: {name} is out of range"):
        operator(options, 0.3)


ENCODER: dict[str, Any] = {
    **{"vocab_size": 17, "hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16},
    **{"max_position_embeddings": 80, "initializer_range": 0.3},
}


def make_ours(attention="near_far"):
    torch.manual_seed(0)
    # Without loops ONNX has no choice of keys.
    options = SIZES | {"num_selected": 3} if attention == "near_far" else {}
    return EncoderModel(EncoderConfig(**ENCODER, attention=attention, attention_options=options)).eval()


def make_bert():
    torch.manual_seed(0)
    config = BertConfig.from_dict(ENCODER | {"attention_options": SIZES})
    return BertModel._from_config(config, attn_implementation="near_far").eval()


@pytest.mark.parametrize("make", [make_ours, make_bert])
def test_a_file_with_loops_gives_what_the_model_gives(make, tmp_path):
    model = make()
    done = export_onnx(model, tmp_path / "model.onnx", loops=True)
    assert done.difference < 1e-5
    assert [node.op_type for node in onnx.load(tmp_path / "model.onnx").graph.node if node.domain] == ["NearFar"]
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


def test_loops_without_near_far_are_refused(tmp_path):
    with pytest.raises(ValueError, match="loops is True, but no layer of the model has near_far self-attention"):
        export_onnx(make_ours("softmax"), tmp_path / "model.onnx", loops=True)
    assert not list(tmp_path.iterdir())
