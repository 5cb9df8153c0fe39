"""Models of others, with a method of ours put in, are written by torch's own exporter and give what torch gives."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from transformers import BertConfig, BertModel

import nystrom
from nystrom.integrations import set_attention
from nystrom.landmarks import for_onnx, insertion_points

pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

SMALL = {"block_size": 4, "reach": 1, "num_heavy": 2, "num_clusters": 3, "exact_up_to": 0}
ANY = torch.export.Dim.DYNAMIC(min=1)
# float32 rounding through a layer.
CLOSE = {"rtol": 0, "atol": 2e-5}


class LastHidden(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask):
        return self.model(input_ids, attention_mask=attention_mask).last_hidden_state


def write(model, inputs, path):
    axes = tuple({0: ANY, 1: ANY} for _ in inputs)
    torch.onnx.export(model, inputs, path, dynamo=True, dynamic_shapes=axes, verbose=False)


def run(path, *inputs):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    fed = {entry.name: x.numpy() for entry, x in zip(session.get_inputs(), inputs, strict=True)}
    return torch.from_numpy(session.run(None, fed)[0])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_model_with_replaced_attention_is_written_as_onnx(tmp_path):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
    nystrom.replace_attention(model, "near_far", SMALL)
    write(model, (torch.randn(2, 24, 16),), tmp_path / "model.onnx")
    for b, n in ((1, 7), (2, 24), (3, 33), (1, 40)):
        x = torch.randn(b, n, 16)
        with torch.no_grad():
            assert_close(run(tmp_path / "model.onnx", x), model(x), **CLOSE)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_model_of_transformers_with_a_method_is_written_as_onnx(tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    bert = BertModel(BertConfig(vocab_size=40, max_position_embeddings=64, initializer_range=0.3, **sizes)).eval()
    set_attention(bert, "near_far", SMALL)
    model = LastHidden(bert)

    def batch(b, n, padded):
        mask = torch.ones(b, n, dtype=torch.long)
        mask[-1, n - padded :] = 0
        return torch.randint(40, (b, n)), mask

    write(model, batch(2, 24, 5), tmp_path / "model.onnx")
    for b, n, padded in ((1, 7, 1), (2, 24, 0), (3, 33, 20), (1, 40, 3)):
        ids, mask = batch(b, n, padded)
        with torch.no_grad():
            wanted = model(ids, mask)
        assert_close(run(tmp_path / "model.onnx", ids, mask)[mask.bool()], wanted[mask.bool()], **CLOSE)


class Search(nn.Module):
    def forward(self, ascending, wanted):
        return insertion_points(ascending, wanted)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_a_search_is_a_count_in_onnx_and_finds_the_same_places(tmp_path):
    generator = torch.Generator().manual_seed(0)
    ascending = torch.randint(9, (2, 20), generator=generator).sort(dim=1).values
    wanted = torch.arange(-1, 11).expand(2, -1).contiguous()
    inputs = ascending, wanted
    found = insertion_points(*inputs)
    assert torch.equal(found, torch.searchsorted(ascending, wanted))
    model = Search().eval()
    with for_onnx():
        counted = torch.export.export(model, inputs)
    searched = torch.export.export(model, inputs)
    search = torch.ops.aten.searchsorted.Tensor
    for program, searches in ((counted, False), (searched, True)):
        assert any(node.target == search for node in program.graph.nodes) is searches
        assert torch.equal(program.module()(*inputs), found)
    torch.onnx.export(model, inputs, tmp_path / "model.onnx", dynamo=True, verbose=False)
    assert torch.equal(run(tmp_path / "model.onnx", *inputs), found)
