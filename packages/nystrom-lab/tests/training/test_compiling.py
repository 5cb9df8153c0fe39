"""A compiled run equals the one that is not compiled, with one graph for all its steps."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close

from nystrom.attention.registry import METHODS
from nystrom.models import EncoderConfig, EncoderForSequenceClassification
from nystrom_lab.config import EvaluateOptions
from nystrom_lab.measure.rows import read_rows
from nystrom_lab.training import compiling
from nystrom_lab.training.compiling import compile_model
from nystrom_lab.training.scoring import evaluate

# The method with the smallest graph.
SOFTMAX = {"attention": "softmax", "options": {}}


@pytest.fixture(autouse=True)
def backend(monkeypatch):
    """Chooses the backend for the graphs of runs; by default they run operation by operation."""

    def choose(backend):
        monkeypatch.setattr(compiling, "BACKEND", backend)

    choose("eager")
    # None from other tests.
    torch._dynamo.reset()
    return choose


@pytest.mark.long
def test_a_compiled_run_gives_the_result_of_the_plain_one(small_run, data, tmp_path, backend, weights, curves):
    # With a graph of the backward pass, too.
    backend("aot_eager")
    # A method with weights for positions.
    changes = {"attention": "linformer", "options": {}, "dropout": 0.0, "steps": 6, "evaluate_every": 6}
    plain = small_run(tmp_path / "plain", **changes)
    compiled = small_run(tmp_path / "compiled", compile=True, **changes)
    # Sums over another length, over six steps of Adam.
    assert_close(weights(compiled, 6), weights(plain, 6), rtol=1e-3, atol=1e-4)
    assert [value for *_, value in curves(compiled)] == pytest.approx([value for *_, value in curves(plain)], rel=1e-3)
    # The best model is saved and scored like any other.
    assert load_file(compiled / "best" / "model.safetensors").keys() == weights(plain, 6).keys()
    tested = read_rows(compiled / "rows.csv")[0]
    assert tested.quantity == "test accuracy"
    assert tested.value == evaluate(EvaluateOptions("listops", model=compiled / "best", data=data, device="cpu")).value


@pytest.mark.long
def test_what_evaluations_fix_is_that_of_the_plain_run(small_run, tmp_path, weights, curves):
    changes = {**SOFTMAX, "pooled_norm": "batch", "dropout": 0.0, "steps": 4, "evaluate_every": 2}
    plain, compiled = (small_run(tmp_path / str(compile), compile=compile, **changes) for compile in (False, True))
    # Not the weights: a shift of all sequences has no gradient except rounding, which Adam makes a step of.
    spread = "classifier.norm.running_var"
    assert_close(weights(compiled, 4)[spread], weights(plain, 4)[spread], rtol=1e-3, atol=1e-6)
    # Sums over another length, over four steps of Adam.
    assert [value for *_, value in curves(compiled)] == pytest.approx([value for *_, value in curves(plain)], rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"precision": "bfloat16"}, {"task": "retrieval"}])
def test_autocast_and_pairs_compile_too(small_run, pairs, tmp_path, weights, changes):
    changes = {**SOFTMAX, "steps": 3, "dropout": 0.0, **changes} | ({"data": pairs} if "task" in changes else {})
    plain, compiled = (small_run(tmp_path / str(compile), compile=compile, **changes) for compile in (False, True))
    # Sums over another length, over three steps of Adam; bfloat16 rounds the terms to 8 bits.
    close = {"rtol": 1e-3, "atol": 1e-4} if "task" in changes else {"rtol": 0.05, "atol": 1e-2}
    assert_close(weights(compiled, 3), weights(plain, 3), **close)


@pytest.mark.long
def test_one_graph_serves_all_steps_and_one_each_size_of_evaluation(small_run, tmp_path, backend):
    graphs, shapes = [], []

    def count(graph, inputs):
        graphs.append(sum(node.op == "call_function" for node in graph.graph.nodes))
        shapes.append({tuple(x.shape) for x in inputs if x.dtype == torch.int64 and x.ndim == 2})
        return graph.forward

    backend(count)
    small_run(tmp_path / "run", compile=True, **SOFTMAX)
    # The steps; the 20 samples of the evaluations, by eight and the last four. One more shows first that there is a
    # compiler.
    assert len(graphs) == 4
    assert graphs[0] < 5 < 50 < min(graphs[1:])
    # The demo's positions, however short the samples of a batch are.
    assert set().union(*shapes) == {(8, 512), (4, 512)}


@pytest.mark.slow
def test_a_compiled_run_continues_where_it_was_cut_off(small_run, tmp_path, weights, curves, interrupted):
    changes = {**SOFTMAX, "steps": 6}
    whole = small_run(tmp_path / "whole", compile=True, **changes)
    interrupted(5, small_run, tmp_path / "broken", compile=True, **changes)
    assert json.loads((tmp_path / "broken" / "run.json").read_text())["settings"]["compile"] is True
    with pytest.raises(ValueError, match="compile is False but was True"):
        small_run(tmp_path / "broken", resume=True, **changes)
    broken = small_run(tmp_path / "broken", resume=True, compile=True, **changes)
    assert_close(weights(broken, 6), weights(whole, 6), rtol=0, atol=0)
    assert curves(broken) == curves(whole)


def test_where_torch_cannot_compile_the_run_leaves_no_folder(small_run, tmp_path, backend):
    def fail(graph, inputs):
        raise RuntimeError("no compiler\nwas found")

    backend(fail)
    with pytest.raises(ValueError, match=r"compile is on, but torch cannot compile for 'cpu' here \(.*no compiler.*\)"):
        small_run(tmp_path / "run", compile=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.long
def test_every_method_trains_in_one_graph(method, backend):
    graphs = []
    backend(lambda graph, inputs: graphs.append(graph) or graph.forward)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    sizes |= {"vocab_size": 20, "max_position_embeddings": 32, "num_labels": 3}
    config = EncoderConfig(norm="pre", attention=method, **sizes)
    model = EncoderForSequenceClassification(config).train()
    compile_model(model)
    for seed in (0, 1):
        g = torch.Generator().manual_seed(seed)
        ids, lengths = torch.randint(20, (4, 32), generator=g), torch.randint(1, 33, (4, 1), generator=g)
        model(ids, attention_mask=torch.arange(32) < lengths, labels=torch.tensor([0, 1, 2, 0])).loss.backward()
    assert len(graphs) == 1


@pytest.mark.slow
def test_inductor_gives_the_result_of_the_plain_run(small_run, tmp_path, backend, weights):
    backend("inductor")
    changes = {"steps": 3, "dropout": 0.0, "threads": 1}
    plain, compiled = (small_run(tmp_path / str(compile), compile=compile, **changes) for compile in (False, True))
    # Fused sums in float32, over three steps of Adam.
    assert_close(weights(compiled, 3), weights(plain, 3), rtol=1e-3, atol=1e-4)
