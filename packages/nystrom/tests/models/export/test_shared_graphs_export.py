"""Layers that compute the same share one graph of an export, which the file holds where they are."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from nystrom.attention.plan import PLAN, AttentionPlan, LayerChoice
from nystrom.attention.shared_graph import shared_graphs
from nystrom.models import EncoderConfig, EncoderModel
from nystrom.models.export.onnx_program import export_onnx, export_program
from nystrom.models.export.words import IN_WORDS_OF_ONNX, put_into_words

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")


def make(attention="linear", options=None, layers=3):
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 17, "hidden_size": 12, "num_attention_heads": 2, "intermediate_size": 16}
    config = EncoderConfig(**sizes, num_hidden_layers=layers, attention=attention, attention_options=options or {})
    return EncoderModel(config).eval()


def nodes_of(program):
    """The nodes that stand for graphs, in the program and in what it calls."""
    graphs = [module.graph for module in program.graph_module.modules() if isinstance(module, torch.fx.GraphModule)]
    return [node for graph in graphs for node in graph.nodes if "onnx_symbolic" in str(node.target)]


def noted(model):
    with shared_graphs() as computations:
        program = export_program(model)
    return computations, nodes_of(program)


def test_layers_with_the_same_options_share_one_graph():
    computations, nodes = noted(make("near_far"))
    assert len(nodes) == 3
    assert len(computations) == 1
    batch, heads, length, width = computations[0].inputs[0].axes
    assert (heads, width) == (2, 6)
    # The mask of queries and keys is one input.
    assert [x.axes for x in computations[0].inputs[1:]] == [(batch, 2, length, 6)] * 2 + [(batch, length)]


def test_layers_with_other_options_have_graphs_of_their_own():
    choices = [("near_far", {"num_clusters": m}) for m in (8, 9, 8)] + [("linear", {})]
    plan = AttentionPlan(tuple(LayerChoice(*each) for each in choices))
    computations, nodes = noted(make(PLAN, plan.options, layers=4))
    assert len(nodes) == 4
    assert len(computations) == 3


def test_a_program_of_its_own_has_no_such_node():
    assert not nodes_of(export_program(make(layers=1)))


@pytest.mark.long
def test_a_file_holds_the_graph_in_every_layer(tmp_path):
    model = make()
    export_onnx(model, tmp_path / "model.onnx", check=False)
    file = onnx.load(tmp_path / "model.onnx")
    onnx.checker.check_model(file, full_check=True)
    assert not file.functions
    assert {node.domain for node in file.graph.node} == {""}
    assert {entry.domain for entry in file.opset_import} == {""}
    names = [*(x for node in file.graph.node for x in node.output), *(x.name for x in file.graph.initializer)]
    assert len(names) == len({*names})
    axes = {dim.dim_param for x in file.graph.value_info for dim in x.type.tensor_type.shape.dim}
    assert {"batch", "length"} <= axes
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    for b, n in ((1, 1), (3, 40)):
        ids, mask = torch.ones(b, n, dtype=torch.long), torch.ones(b, n, dtype=torch.long)
        mask[-1, n // 2 :] = 0
        with torch.no_grad():
            wanted = model(ids, attention_mask=mask).last_hidden_state
        (came,) = session.run(None, {"input_ids": ids.numpy(), "attention_mask": mask.numpy()})
        # float32 rounding through three layers
        assert_close(torch.from_numpy(came), wanted, rtol=0, atol=1e-5)


class Words(nn.Module):
    def forward(self, x, whole):
        n = x.shape[1]
        values, order = x.sort(dim=1, stable=True, descending=True)
        return (
            *(values, order, (whole * 7) % n, whole >> 1, torch.cdist(x, x + 1)),
            torch.searchsorted(values.flip(1).contiguous(), x),
        )


@pytest.mark.filterwarnings("ignore")  # of torch's own
def test_words_of_onnx_export_give_the_same_numbers():
    x, whole = torch.rand(2, 9, generator=torch.Generator().manual_seed(0)), torch.arange(-4, 5)
    axis = torch.export.Dim.DYNAMIC(min=2)
    program = torch.export.export(Words(), (x, whole), dynamic_shapes=({1: axis}, {0: axis}))
    put_into_words(program)
    assert not {node.target for node in program.graph.nodes} & {*IN_WORDS_OF_ONNX}
    again = program.run_decompositions({}).module()
    for n in (9, 5):
        x, whole = x[:, :n], whole[:n]
        assert_close(again(x, whole), Words()(x, whole), rtol=0, atol=1e-6)
