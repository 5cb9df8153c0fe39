"""A method's computation as one node of an export, so that layers with the same options share one graph.

A trace of a method costs an export most of its time. In the context `shared_graphs`, `nystrom.attention.entry.attend`
traces the computation as a node `nystrom.shared::Attention<number>`, and notes what it stands for: layers that compute
the same, on tensors of the same dtypes and sizes, have the same number. `nystrom.models.export.shared_graphs` writes
the graph of each number once, and puts it where the nodes are.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nystrom.shapes import is_number

DOMAIN = "nystrom.shared"


class DynamicAxis(NamedTuple):
    """One axis of an input whose size is a symbol."""

    symbol: str  # Sizes of the same symbol are equal
    size: int  # An example
    least: int
    most: int | None  # None without a limit


class Input(NamedTuple):
    """The dtype and the axes of a tensor."""

    dtype: torch.dtype
    axes: tuple[int | DynamicAxis, ...]


class Place(NamedTuple):
    """An argument that is a tensor, as its place among the inputs."""

    place: int


class Computation(NamedTuple):
    """A function, its arguments, and the tensors among these: a node stands for this computation."""

    core: Callable[..., Tensor]
    arguments: tuple[Any, ...]
    inputs: tuple[Input, ...]


SHARED = ContextVar[list[Computation] | None]("SHARED", default=None)


@contextmanager
def shared_graphs() -> Iterator[list[Computation]]:
    """Context in which an export traces attention as nodes; the list has what each number stands for."""
    noted: list[Computation] = []
    before = SHARED.set(noted)
    try:
        yield noted
    finally:
        SHARED.reset(before)


def node_name(number: int) -> str:
    """The name of the operator that stands for a computation."""
    return f"Attention{number}"


def as_node(core: Callable[..., Tensor], noted: list[Computation]) -> Callable[..., Tensor]:
    """The core of a method, see `nystrom.attention.entry.attend`, as a node of a trace."""

    def call(*arguments: Any) -> Tensor:
        q, _, v = arguments[:3]
        # A mask of queries and keys is one tensor, and one input.
        tensors = list({id(x): x for x in arguments if isinstance(x, Tensor)}.values())
        places = {id(x): Place(place) for place, x in enumerate(tensors)}
        settled = tuple(places.get(id(x), x) for x in arguments)
        computation = Computation(core, settled, tuple(_input(x) for x in tensors))
        if computation not in noted:
            noted.append(computation)
        name = f"{DOMAIN}::{node_name(noted.index(computation))}"
        shape = (*q.shape[:3], v.shape[3])
        # The trace knows the shape of the result, not its numbers.
        return torch.onnx.ops.symbolic(name, tensors, dtype=v.dtype, shape=shape, version=1)

    return call


def _input(x: Tensor) -> Input:
    return Input(x.dtype, tuple(size if is_number(size) else _axis(size) for size in x.shape))


def _axis(size: Any) -> DynamicAxis:
    node = size.node
    bounds = node.shape_env.bound_sympy(node.expr)
    most = int(bounds.upper) if bounds.upper.is_Integer else None
    return DynamicAxis(str(node.expr), node.hint, int(bounds.lower), most)
