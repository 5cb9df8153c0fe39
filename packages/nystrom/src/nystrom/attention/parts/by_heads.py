"""Heads on threads of their own, forward and backward, for methods that are chains of torch's operators.

Each operator then runs on one thread, and a call waits once, see `stretches`.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from nystrom.attention.parts.stretches import cut, in_threads, num_parts
from nystrom.autograd_modes import for_one_gradient, needs_graph, pull_back
from nystrom.native import room_like
from nystrom.private_torch import keeps_graph, saved_tensors_hooks

Attend = Callable[..., Tensor]
# For each thread: one that other work holds up leaves some to the others.
_PARTS = 2


def by_heads(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The result of `attend`, some heads at a time where the tensors are large and on a CPU.

    Args:
        attend: Gets a slice of the heads, and these heads' q, k and v; no head's result depends on another head.
        q: Queries (b, h, n, d).
        k: Keys (b, h, s, d).
        v: Values (b, h, s, e).
    """
    if num_parts(q, k, v) < 2 or q.shape[1] < 2:
        return attend(slice(None), q, k, v)
    # Hooks, as those of a checkpoint, belong to the calling thread.
    if saved_tensors_hooks(True) is not None:
        return attend(slice(None), q, k, v)
    return _ByHeads.apply(attend, torch.is_grad_enabled(), q, k, v)


class _ByHeads(torch.autograd.Function):
    """The graph of some heads is recorded on the thread that computes them, and gone back through on any."""

    @staticmethod
    def forward(ctx, attend: Attend, records: bool, *tensors: Tensor) -> Tensor:
        # torch says which inputs need a gradient even if it records none.
        q, v, needed = tensors[0], tensors[-1], [records and need for need in ctx.needs_input_grad[2:]]
        out = room_like(q) if q.shape[-1] == v.shape[-1] else q.new_empty(*q.shape[:3], v.shape[-1])

        def some(heads: slice) -> tuple[slice, list[Tensor], GradientEdge | None]:
            with torch.set_grad_enabled(any(needed)):
                inputs = [x[:, heads].detach().requires_grad_(need) for x, need in zip(tensors, needed, strict=True)]
                result = attend(heads, *inputs)
            out[:, heads] = result.detach()
            return heads, inputs, get_gradient_edge(result) if result.requires_grad else None

        ctx.parts, ctx.attend = in_threads(some, cut(q.shape[1], _PARTS * torch.get_num_threads())), attend
        ctx.save_for_backward(*tensors)
        return out

    @staticmethod
    @for_one_gradient
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad,), tensors = grads, ctx.saved_tensors
        if needs_graph(grad):
            return None, None, *pull_back(functools.partial(ctx.attend, slice(None)), tensors, grad)
        made = [room_like(x) if need else None for x, need in zip(tensors, ctx.needs_input_grad[2:], strict=True)]
        parts, keeps = ctx.parts, keeps_graph()
        if not keeps:
            # Torch frees its saved tensors here; so do we.
            del ctx.parts

        def some(part: tuple[slice, list[Tensor], GradientEdge]) -> None:
            heads, inputs, edge = part
            wanted = [x for x in inputs if x.requires_grad]
            gradients = torch.autograd.grad(edge, wanted, grad[:, heads], retain_graph=keeps, allow_unused=True)
            for whole, gradient in zip((x for x in made if x is not None), gradients, strict=True):
                whole[:, heads] = 0.0 if gradient is None else gradient

        in_threads(some, parts)
        return None, None, *made
