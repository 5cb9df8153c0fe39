"""Operations of torch that ONNX lacks or defines differently, in terms of operations that both have.

| torch | in ONNX |
|---|---|
| `searchsorted` | the count of smaller entries |
| a stable `sort` | `TopK` of all entries, which breaks ties by place (there, not in torch) |
| a remainder by a length | a remainder by a tensor |
| distances (`cdist`) | the roots of sums over squared differences |
| `>>` of signed numbers | a division that rounds down; ONNX shifts unsigned ones only |

A program is put into these words before it is written as ONNX. Searches for the place of a token take their form in its
trace (`nystrom.landmarks.for_onnx`).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node, Proxy
from torch.fx.node import map_arg
from torch.fx.proxy import GraphAppendingTracer


def _count_smaller(
    sorted_sequence: Tensor, self: Tensor, *, out_int32: bool = False, right: bool = False, side=None, sorter=None
) -> Tensor:
    assert not right
    assert side is None
    assert sorter is None
    return (sorted_sequence[..., None, :] < self[..., None]).sum(-1)


def _sort(
    self: Tensor, *, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> tuple[Tensor, Tensor]:
    return torch.topk(self, self.shape[dim], dim=dim, largest=descending)


def _remainder(self: Tensor, other: int | float) -> Tensor:
    return torch.remainder(self, self.new_full((), other))


def _shift(self: Tensor, other: int) -> Tensor:
    return torch.div(self, 1 << other, rounding_mode="floor")


def _distances(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: int | None = None) -> Tensor:
    assert p == 2
    return (x1[..., :, None, :] - x2[..., None, :, :]).square().sum(-1).sqrt()


_aten = torch.ops.aten
IN_WORDS_OF_ONNX: dict[Any, Callable[..., Any]] = {
    _aten.searchsorted.Tensor: _count_smaller,
    _aten.sort.stable: _sort,
    _aten.remainder.Scalar: _remainder,
    _aten.cdist.default: _distances,
    _aten.__rshift__.Scalar: _shift,
}


def put_into_words(program: torch.export.ExportedProgram) -> None:
    """Replace these operations in the graph of a program and in those that it calls, without another trace.

    `torch.onnx.export` traces the program once more, and finds the shapes of what replaces them.
    """
    for module in program.graph_module.modules():
        if not isinstance(module, GraphModule):
            continue
        as_proxy = _as_proxy(GraphAppendingTracer(module.graph))
        for node in [node for node in module.graph.nodes if node.target in IN_WORDS_OF_ONNX]:
            with module.graph.inserting_before(node):
                given, named = map_arg(node.args, as_proxy), map_arg(node.kwargs, as_proxy)
                node.replace_all_uses_with(IN_WORDS_OF_ONNX[node.target](*given, **named).node)
            module.graph.erase_node(node)
        module.recompile()


def _as_proxy(tracer: GraphAppendingTracer) -> Callable[[Node], Any]:
    return lambda node: Proxy(node, tracer)
