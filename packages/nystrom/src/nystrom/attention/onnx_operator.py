"""Methods as one operator of an ONNX graph each, for onnxruntime with the loops of `native.cpp`.

`nystrom.native.onnx_library` is the library that has the operators. They take float32 and numbers alone: what depends
on the number of tokens, such as exact attention of short sequences, is decided where they run.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from nystrom.checks import StartValue
from nystrom.landmarks import all_real
from nystrom.shapes import score_scale

DOMAIN = "nystrom"
_WRITES_LOOPS = ContextVar("_WRITES_LOOPS", default=False)


class OnnxOperator(NamedTuple):
    """An operator: its name, the options that are its attributes, and the only values that it takes of others."""

    name: str
    attributes: tuple[str, ...]
    only: Mapping[str, Any]


_SIZES = "block_size", "reach", "num_heavy", "num_clusters", "iterations", "exact_up_to", "num_selected"
# The name of the method gives its operator.
OPERATORS = {
    "near_far": OnnxOperator("NearFar", _SIZES, {"tolerance": None}),
    "nystrom": OnnxOperator(
        "Nystrom",
        ("num_landmarks", "pinv_steps", "z0"),
        {"landmarks": "segment_means", "pinv": "iterative", "tolerance": None},
    ),
}


@contextmanager
def onnx_loops() -> Iterator[None]:
    """Context in which methods are traced as one operator, for `torch.onnx.export`."""
    before = _WRITES_LOOPS.set(True)
    try:
        yield
    finally:
        _WRITES_LOOPS.reset(before)


def writes_onnx_loops() -> bool:
    """Whether an export traces a method as one operator."""
    # First what a compiler traces.
    return not torch.compiler.is_dynamo_compiling() and _WRITES_LOOPS.get()


def check_operator(method: str, options: Any) -> None:
    """Raise ValueError for an option that the operator of a method does not take."""
    for name, wanted in OPERATORS[method].only.items():
        if (value := getattr(options, name)) != wanted:
            raise ValueError(
                f"{name} is {value!r}, which the operator of {method} for onnxruntime does not take: use {wanted!r}, "
                "or leave loops out."
            )


def onnx_operator(
    method: str,
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    v: Float[Tensor, "b h s e"],
    keep: Bool[Tensor, "b s"] | None,
    query_keep: Bool[Tensor, "b n"] | None,
    options: Any,
    *rest: Any,
) -> Float[Tensor, "b h n e"]:
    """A method as its operator; the trace knows the shape of its result, not its numbers.

    Args:
        *rest: Further arguments of the method's core, of which the kernels of the skip convolution are an input.
    """
    check_operator(method, options)
    operator = OPERATORS[method]
    numbers = {name: getattr(options, name) for name in operator.attributes} | {"scale": score_scale(q, options.scale)}
    inputs = [q, k, v, all_real(k) if keep is None else keep]
    if method == "nystrom":
        # onnx_operators.cpp knows it by its place there.
        numbers["z0"] = get_args(StartValue).index(options.z0)
        inputs.append(all_real(q) if query_keep is None else query_keep)
        inputs += [x[:, 0, :, 0] for x in rest if isinstance(x, Tensor)]
    name, shape = f"{DOMAIN}::{operator.name}", (*q.shape[:3], v.shape[3])
    return torch.onnx.ops.symbolic(name, inputs, numbers, dtype=v.dtype, shape=shape, version=1)
