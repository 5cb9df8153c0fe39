"""A `backward` in graphs, batches of gradients and transforms, and recomputation by checkpointing."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from nystrom.private_torch import graph_task, is_batched_gradient, is_transformed

F = TypeVar("F", bound=Callable[..., object])


def pull_back(function: Callable[..., Any], inputs: Sequence[Tensor], *grads: Tensor) -> tuple[Tensor, ...]:
    """The gradients of the inputs by plain operations, in a `backward` whose graph is recorded.

    Inside transforms of torch.func a saved input may be the wrapper of a transform that has ended, which
    `torch.func.vjp` takes for a tensor of its own; a view of it is none.
    """
    return torch.func.vjp(function, *(x.view_as(x) for x in inputs))[1](*grads)


def needs_graph(*grads: Tensor | None) -> bool:
    """Whether a `backward` is to use plain operations, such as those of `pull_back`.

    True if its graph is recorded; for a batch of gradients, by `is_grads_batched`; and inside a transform of
    torch.func, whose gradients come for a graph that was recorded outside.
    """
    if torch.is_grad_enabled() or is_transformed():
        return True
    return any(x is not None and is_batched_gradient(x) for x in grads)


def is_computed_again() -> bool:
    """Whether this is the recomputed forward pass of gradient checkpointing, which runs inside a backward pass."""
    return not torch.compiler.is_compiling() and graph_task() >= 0


def for_one_gradient(backward: F) -> F:
    """Let the `backward` of an autograd.Function raise a helpful error if it is given a batch of gradients.

    For `is_grads_batched`, torch uses an older vmap, which lacks batching rules for operations on views that a backward
    pass writes to. `torch.vmap` over `torch.func.vjp` has all of them.
    """

    @functools.wraps(backward)
    def named(*inputs: object) -> object:
        try:
            return backward(*inputs)
        except RuntimeError as error:
            # An operator of torch raises the first message, a compiled loop of ours the second.
            if not any(
                words in str(error) for words in ("Batching rule not implemented", "Cannot access data pointer")
            ):
                raise
            raise RuntimeError(
                "is_grads_batched is True, which this backward pass does not support: use torch.vmap over the "
                "function that torch.func.vjp returns, or one gradient at a time."
            ) from error

    return cast("F", named)


def known_signature(forward: F) -> F:
    """Keep the signature of the `forward` of an autograd.Function.

    torch binds the arguments of each call to it; computing it each time takes longer than a short stretch.
    """
    forward.__signature__ = inspect.signature(forward)  # pyright: ignore[reportFunctionMemberAccess]
    return forward
