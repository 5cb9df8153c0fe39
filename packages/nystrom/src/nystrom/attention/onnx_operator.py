"""near_far as one operator of an ONNX graph, for onnxruntime with the loops of `native.cpp`.

The operator is `nystrom::NearFar(q, k, v, keep)`, and `nystrom.native.onnx_library` is the library that has it. The
attributes are the options of the method. It takes self-attention in float32 and numbers alone: what depends on the
number of tokens, such as exact attention of short sequences, is decided where it runs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from nystrom.attention.options import NearFarOptions
from nystrom.shapes import score_scale

DOMAIN = "nystrom"
_ATTRIBUTES = "block_size", "reach", "num_heavy", "num_clusters", "iterations", "exact_up_to", "num_selected"
WRITES_LOOPS = ContextVar("WRITES_LOOPS", default=False)


@contextmanager
def onnx_loops() -> Iterator[None]:
    """Context in which near_far is traced as one operator, for `torch.onnx.export`."""
    before = WRITES_LOOPS.set(True)
    try:
        yield
    finally:
        WRITES_LOOPS.reset(before)


def near_far_operator(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h n d"],
    v: Float[Tensor, "b h n e"],
    keep: Bool[Tensor, "b n"],
    options: NearFarOptions,
) -> Float[Tensor, "b h n e"]:
    """Self-attention as one operator; the trace knows the shape of its result, not its numbers."""
    numbers = {name: getattr(options, name) for name in _ATTRIBUTES} | {"scale": score_scale(q, options.scale)}
    shape = (*q.shape[:3], v.shape[3])
    return torch.onnx.ops.symbolic(
        f"{DOMAIN}::NearFar", (q, k, v, keep), numbers, dtype=v.dtype, shape=shape, version=1
    )
