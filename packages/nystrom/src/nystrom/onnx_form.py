"""Whether a model is being exported to ONNX, which lacks some operations of torch.

In an export, an operation uses a form that ONNX supports, with the same results; otherwise it uses the faster form.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_written = ContextVar("_written", default=False)


def is_for_onnx() -> bool:
    """Whether torch traces a model for ONNX: by `torch.onnx.export`, or `nystrom.models.export`."""
    if not torch.compiler.is_exporting() or torch.compiler.is_dynamo_compiling():
        return False
    return _written.get() or torch.onnx.is_in_onnx_export()


@contextmanager
def for_onnx() -> Iterator[None]:
    """Context in which `torch.export` traces for ONNX."""
    before = _written.set(True)
    try:
        yield
    finally:
        _written.reset(before)
