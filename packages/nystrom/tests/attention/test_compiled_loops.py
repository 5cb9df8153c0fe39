"""The loops in compiled graphs: a method is one operator, with the results of a plain call."""

import os
import shutil

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from nystrom import near_far_attention, nystrom_attention

pytestmark = [
    pytest.mark.skipif(shutil.which(os.environ.get("CXX", "c++")) is None, reason="no C++ compiler here"),
]
NEAR_FAR = {"block_size": 16, "reach": 3, "num_heavy": 5, "num_clusters": 12, "exact_up_to": 40}
CASES = {
    "near_far": (near_far_attention, NEAR_FAR),
    "nystrom": (nystrom_attention, {"num_landmarks": 16, "landmarks": "segment_means"}),
    "selected": (near_far_attention, {**NEAR_FAR, "num_selected": 7, "scale": 0.3}),
    "skip": (nystrom_attention, {"num_landmarks": 16, "pinv": "exact"}),
}
# A compiler takes seconds.
every_case = pytest.mark.parametrize(
    "case", [*list(CASES)[:2], *(pytest.param(x, marks=pytest.mark.long) for x in list(CASES)[2:])]
)


class Graphs:
    """A backend that runs the graphs that inductor would compile, and counts the operators of the loops in them."""

    def __init__(self):
        self.operators = []
        self.backend = aot_autograd(fw_compiler=self.see)

    def see(self, graph, inputs):
        names = [str(node.target) for node in graph.graph.nodes]
        self.operators.append([name.removesuffix(".default") for name in names if name.startswith("nystrom.")])
        return make_boxed_func(graph.forward)


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def call(case, length, *, masked=False, rows=2, dtype=torch.float32):
    """The arguments of a call; the first row has padding at both ends, the second few real tokens."""
    g = torch.Generator().manual_seed(length)
    tensors = [
        torch.randn(rows, length, 2, 8, generator=g, dtype=dtype).transpose(1, 2).requires_grad_() for _ in "qkv"
    ]
    skip = torch.randn(2, 1, 5, 1, generator=g, dtype=dtype).requires_grad_() if case == "skip" else None
    keep = torch.ones(rows, length, dtype=torch.bool) if masked else None
    if keep is not None:
        keep[0, :4], keep[0, -3:], keep[1, 9:] = False, False, False
    return tensors, keep, skip


def attend(case):
    function, options = CASES[case]
    if case == "skip":
        return lambda q, k, v, keep, skip: function(q, k, v, keep=keep, skip=skip, **options)
    return lambda q, k, v, keep, skip: function(q, k, v, keep=keep, **options)


@every_case
@pytest.mark.parametrize("masked", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_compiled_call_keeps_the_loops_at_any_length(case, masked):
    graphs, plain = Graphs(), attend(case)
    compiled = torch.compile(plain, fullgraph=True, dynamic=True, backend=graphs.backend)
    for length in (97, 64, 130):
        tensors, keep, skip = call(case, length, masked=masked)
        leaves = [*tensors, *([] if skip is None else [skip])]
        found, wanted = (
            (out, *torch.autograd.grad(out.square().sum(), leaves))
            for out in (apply(*tensors, keep, skip) for apply in (compiled, plain))
        )
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    name = f"nystrom.{'near_far' if CASES[case][0] is near_far_attention else 'nystrom'}_by_loops"
    assert graphs.operators == [[name], [f"{name}_backward"]]


@every_case
def test_a_compiled_row_does_not_see_its_neighbours_nor_masked_tokens(case):
    graphs, plain = Graphs(), attend(case)
    compiled = torch.compile(plain, fullgraph=True, dynamic=True, backend=graphs.backend)
    tensors, keep, skip = call(case, 97, masked=True, rows=3)
    wanted = compiled(*tensors, keep, skip)
    others = [torch.where(keep[:, None, :, None], x, torch.nan).detach() for x in tensors]
    for x in others:
        x[1] = 1.0
    found = compiled(*others, keep, skip)
    torch.testing.assert_close(found[[0, 2]], wanted[[0, 2]], rtol=1e-5, atol=1e-5)
    assert all(graphs.operators)


@pytest.mark.parametrize("case", [pytest.param("near_far", marks=pytest.mark.long), "nystrom"])
@pytest.mark.parametrize("why", ["exported", "switched off", "bfloat16"])
def test_the_plain_form_is_traced_elsewhere(case, why, monkeypatch):
    tensors, keep, skip = call(case, 97, dtype=torch.bfloat16 if why == "bfloat16" else torch.float32)
    tensors = [x.detach() for x in tensors]
    if why == "switched off":
        monkeypatch.setenv("NYSTROM_NATIVE", "0")
    if why != "exported":
        graphs = Graphs()
        torch.compile(attend(case), fullgraph=True, backend=graphs.backend)(*tensors, keep, skip)
        assert not any(graphs.operators)
        return

    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return attend(case)(q, k, v, keep, skip)

    for strict in (False, True):
        program = torch.export.export(Model(), tuple(tensors), strict=strict)
        assert not any(str(node.target).startswith("nystrom.") for node in program.graph.nodes)


def test_a_graph_that_is_differentiated_twice_refuses():
    tensors, keep, skip = call("near_far", 97)
    compiled = torch.compile(attend("near_far"), fullgraph=True, backend="eager")
    (grad,) = torch.autograd.grad(compiled(*tensors, keep, skip).square().sum(), tensors[0], create_graph=True)
    with pytest.raises(RuntimeError, match="near_far_by_loops_backward"):
        grad.sum().backward()
