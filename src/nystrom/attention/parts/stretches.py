r"""Work on a CPU in stretches of tokens that fit into its cache; and attention to few landmarks, added in place.

A fused call keeps its result for the backward pass. `add_attention` does not: it computes the gradient of
$\mathrm{softmax}(c\, Q \tilde K^\top) \tilde V$ from the inputs, a stretch of tokens at a time. Nothing of size n x m
is stored, and the result is added to an existing tensor. If a graph of the backward pass is recorded, and inside
`torch.vmap`, the plain formula is used, which stores n x m numbers and has all derivatives.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import TypeVar, cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from nystrom.attention.fused import open_empty, softmax_rows

# Numbers in a stretch, over all heads: 2 MB of float32, about the L2 cache of a core.
_NUMBERS = 2**19
_SHORTEST = 32

Piece = tuple[slice, slice, slice]
F = TypeVar("F", bound=Callable[..., object])


def runs_in_stretches(*inputs: Tensor) -> bool:
    """Whether to work in stretches: on a CPU, in float32 or float64, with known sizes, and outside a compiler."""
    return not torch.compiler.is_compiling() and all(
        x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64) and isinstance(x.shape[2], int)
        for x in inputs
    )


def pieces(batch: int, tokens: int, numbers: int) -> Iterator[Piece]:
    """Cut (batch, heads, tokens, ...) into indices of pieces that fit into the cache.

    Args:
        batch: Sequences; several short ones form a piece.
        tokens: Tokens of a sequence; a long one is cut into stretches of a multiple of 32.
        numbers: How many numbers a piece needs per token, over all heads.
    """
    length = max(1, _NUMBERS // max(1, numbers) // _SHORTEST) * _SHORTEST
    group = max(1, length // max(1, tokens))
    for first in range(0, batch, group):
        for start in range(0, tokens, length):
            yield slice(first, first + group), slice(None), slice(start, min(tokens, start + length))


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
            if "Batching rule not implemented" not in str(error):
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


def add_attention(
    out: Float[Tensor, "b h n e"],
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h m d"],
    v: Float[Tensor, "b h m e"],
    *,
    keep: Bool[Tensor, "b m"] | None,
    scale: float,
) -> Float[Tensor, "b h n e"]:
    """Add the attention of many queries to few keys to `out`, in place.

    Args:
        out: Tensor to add to.
        q: Queries.
        k: Keys, landmarks.
        v: Their values.
        keep: Landmarks that may be attended to; None if all may. The values of the others must be zero.
        scale: Factor on the scores.
    """
    return _AddAttention.apply(out, q, k, v, keep, scale)


class _AddAttention(torch.autograd.Function):
    @staticmethod
    @known_signature
    def forward(
        out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        keep: Tensor | None,
        scale: float,
    ) -> Tensor:
        keys, v = (scale * k).mT.contiguous(), v.contiguous()
        for piece in pieces(q.shape[0], q.shape[2], k.shape[1] * k.shape[2]):
            queries, values = q[piece].flatten(0, 1), v[piece[0]].flatten(0, 1)
            scores = _scores(queries, keys, piece, keep)
            weights = torch.softmax(scores, dim=-1, out=scores)
            place = out[piece]
            if len(place) == 1:
                place[0].baddbmm_(weights, values)
            else:
                place.add_(torch.bmm(weights, values).unflatten(0, place.shape[:2]))
        return out

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        out, q, k, v, keep, ctx.scale = inputs
        if output is out:
            ctx.mark_dirty(out)
        ctx.save_for_backward(q, k, v, keep)

    @staticmethod
    @for_one_gradient
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad,), (q, k, v, keep) = grads, ctx.saved_tensors
        if torch.is_grad_enabled():
            pull = torch.func.vjp(lambda q, k, v: _plain(q, k, v, keep, ctx.scale), q, k, v)[1]
            return (grad, *pull(grad), None, None)
        scaled = (ctx.scale * k).contiguous()
        keys, values = scaled.mT.contiguous(), v.mT.contiguous()
        grad_q = torch.empty_like(q) if ctx.needs_input_grad[1] else None
        grad_k, grad_v = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (k, v))
        for piece in pieces(q.shape[0], q.shape[2], k.shape[1] * k.shape[2]):
            queries, coming = (x[piece].flatten(0, 1) for x in (q, grad))
            scores = _scores(queries, keys, piece, keep).requires_grad_()
            with torch.enable_grad():
                weights = scores.softmax(dim=-1)
            grad_weights = torch.bmm(coming, values[piece[0]].flatten(0, 1))
            (grad_scores,) = torch.autograd.grad(weights, scores, grad_weights)
            grad_v[piece[0]].flatten(0, 1).baddbmm_(weights.detach().mT, coming)
            grad_k[piece[0]].flatten(0, 1).baddbmm_(grad_scores.mT, queries)
            if grad_q is not None:
                place, keys_here = grad_q[piece], scaled[piece[0]].flatten(0, 1)
                if len(place) == 1:
                    torch.bmm(grad_scores, keys_here, out=place[0])
                else:
                    place.copy_(torch.bmm(grad_scores, keys_here).unflatten(0, place.shape[:2]))
        return grad, grad_q, grad_k.mul_(ctx.scale), grad_v, None, None

    @staticmethod
    def vmap(info, in_dims, out, *inputs):  # pyright: ignore[reportIncompatibleMethodOverride]
        add = torch.vmap(lambda out, *x: out + _plain(*x), in_dims)
        return add(out, *inputs), 0


def _plain(q, k, v, keep, scale):
    """The attention that is added, by operations that have all derivatives."""
    return softmax_rows(q, k, keep=keep, scale=scale) @ v


def _scores(
    queries: Float[Tensor, "rows n d"], keys: Float[Tensor, "b h d m"], piece: Piece, keep: Bool[Tensor, "b m"] | None
) -> Float[Tensor, "rows n m"]:
    scores = torch.bmm(queries, keys[piece[0]].flatten(0, 1))
    if keep is not None:
        closed = ~open_empty(keep[piece[0]])
        scores.unflatten(0, (len(closed), -1)).masked_fill_(closed[:, None, None, :], -torch.inf)
    return scores
