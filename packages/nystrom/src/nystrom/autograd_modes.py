"""Detect forward mode and `torch.jit.trace`, which some calls do not support, and recomputation by checkpointing.

`torch.func.jvp`, `jacfwd`, `hessian` and `torch.autograd.forward_ad` use forward mode.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.jit._trace import is_tracing

_OF_TORCH = re.compile(r"forward (mode )?AD")


def is_forward_mode() -> bool:
    """Whether any tensor is being differentiated in forward mode."""
    # Tensors cannot be asked: inside a gradient of torch.func their tangents are hidden.
    return forward_ad._current_level >= 0  # pyright: ignore[reportPrivateUsage]


def is_transformed() -> bool:
    """Whether this runs inside a transform of torch.func, such as vmap or grad."""
    return torch._C._are_functorch_transforms_active()


def pull_back(function: Callable[..., Any], inputs: Sequence[Tensor], *grads: Tensor) -> tuple[Tensor, ...]:
    """The gradients of the inputs by plain operations, in a `backward` whose graph is recorded.

    Inside transforms of torch.func a saved input may be the wrapper of a transform that has ended, which
    `torch.func.vjp` takes for a tensor of its own; a view of it is none.
    """
    return torch.func.vjp(function, *(x.view_as(x) for x in inputs))[1](*grads)


def is_computed_again() -> bool:
    """Whether this is the recomputed forward pass of gradient checkpointing, which runs inside a backward pass."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() >= 0


def refusing_by_name() -> AbstractContextManager[None]:
    """Context in which an operation that forward mode or `torch.jit.trace` cannot take names alternatives."""
    return nullcontext() if torch.compiler.is_compiling() else _refusing()


@contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except NotImplementedError as error:
        if not _OF_TORCH.search(str(error)):
            raise
        raise NotImplementedError(
            "this attention is made of fused calls, which have no derivative in forward mode (torch.func.jvp, jacfwd, "
            "hessian): use reverse mode, such as torch.func.vjp or jacrev, or a method with second derivatives (see "
            "`nystrom methods`)."
        ) from error
    except (AssertionError, TypeError, ValueError) as error:
        if not is_tracing():
            raise
        raise NotImplementedError(
            "torch.jit.trace, for which lengths are tensors, does not support this attention: use torch.export or "
            "torch.compile."
        ) from error
