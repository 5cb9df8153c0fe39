"""Detect forward mode and transforms, which some calls do not support, and recomputation by checkpointing.

`torch.func.jvp`, `jacfwd`, `hessian` and `torch.autograd.forward_ad` use forward mode.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad


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
