"""The graphs that layers share, see `nystrom.attention.shared_graph`: each is written once, then put in each layer."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nystrom.attention.shared_graph import DOMAIN, Computation, DynamicAxis, Place, node_name


def put_in(
    written: torch.onnx.ONNXProgram,
    computations: Sequence[Computation],
    write: Callable[[torch.export.ExportedProgram], torch.onnx.ONNXProgram],
) -> None:
    """Replace the nodes of the program by the graphs of these computations, as `write` gives them."""
    import onnx_ir as ir
    from onnx_ir.passes import Sequential, common

    for number, computation in enumerate(computations):
        graph, name = write(_program_of(computation)).model.graph, node_name(number)
        _name_axes(graph, computation)
        # A function has constants in place of initializers.
        constants = [_as_constant(value) for value in graph.initializers.values()]
        graph.initializers.clear()
        graph.insert_before(graph[0], constants)
        function = ir.Function(DOMAIN, name, graph=graph, attributes=())
        written.model.functions[function.identifier()] = function
    # Both parts were optimized, as `torch.onnx.export` does; this ends its work on the whole.
    Sequential(
        common.InlinePass(),
        common.RemoveUnusedOpsetsPass(),
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.DeduplicateInitializersPass(),
        common.CommonSubexpressionEliminationPass(),
        common.NameFixPass(),
    )(written.model)


class _Once(nn.Module):
    def __init__(self, computation: Computation):
        super().__init__()
        self.computation = computation

    def forward(self, *tensors: Tensor) -> Tensor:
        core, arguments, _ = self.computation
        return core(*(tensors[x.place] if isinstance(x, Place) else x for x in arguments))


def _program_of(computation: Computation) -> torch.export.ExportedProgram:
    examples, axes = [], []
    for dtype, sizes in computation.inputs:
        shape = [x.size if isinstance(x, DynamicAxis) else x for x in sizes]
        examples.append(torch.ones(shape, dtype=dtype, device="cpu"))
        axes.append({place: _dynamic(x) for place, x in enumerate(sizes) if isinstance(x, DynamicAxis)})
    return torch.export.export(_Once(computation).eval(), tuple(examples), dynamic_shapes=(tuple(axes),))


def _dynamic(axis: DynamicAxis) -> Any:
    return torch.export.Dim.DYNAMIC(min=axis.least, max=axis.most)


def _name_axes(graph: Any, computation: Computation) -> None:
    """Name the axes of values as the layers that call the graph do; forget those that have no name there."""
    names: dict[str | None, str] = {}
    for value, (_, axes) in zip(graph.inputs, computation.inputs, strict=True):
        names |= {
            dim.value: axis.symbol for dim, axis in zip(value.shape, axes, strict=True) if isinstance(axis, DynamicAxis)
        }
    for value in (*graph.inputs, *(output for node in graph for output in node.outputs)):
        for axis, dim in enumerate(value.shape or ()):
            if not isinstance(dim, int):
                value.shape[axis] = names.get(dim.value)


def _as_constant(value: Any) -> Any:
    import onnx_ir as ir

    constant = ir.Node("", "Constant", [], [ir.Attr("value", ir.AttributeType.TENSOR, value.const_value)])
    constant.outputs[0].name, constant.outputs[0].shape, constant.outputs[0].type = value.name, value.shape, value.type
    value.replace_all_uses_with(constant.outputs[0])
    return constant
