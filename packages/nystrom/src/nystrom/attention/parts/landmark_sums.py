r"""Attention to few landmarks plus the convolution of the values, on a CPU, a stretch of tokens at a time.

$$\mathrm{softmax}(c\, Q \tilde K^\top)\, \tilde V + \mathrm{skip}(V)$$
A stretch of the convolution is computed, and the attention is added to it while it is in the cache. The backward pass
computes the gradients from the inputs in the same way: neither the result nor n x m numbers are stored. If a graph of
the backward pass is recorded, and inside `torch.vmap`, the plain formula is used, which stores them and has all
derivatives.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from nystrom.attention.fused import bias_of_keys, softmax_rows, unmask_empty_rows
from nystrom.attention.parts.stretches import Piece, groups_of_pieces, in_threads
from nystrom.attention.parts.windows import Convolution
from nystrom.autograd_modes import for_one_gradient, known_signature, needs_graph, pull_back
from nystrom.native import as_rows, room_like, run_landmarks, runs_natively
from nystrom.private_torch import softmax_backward


def landmark_sums(
    out: Float[Tensor, "b h n e"],
    q: Float[Tensor, "b h n d"],
    landmarks: Float[Tensor, "b h m d"],
    middle: Float[Tensor, "b h m e"],
    v: Float[Tensor, "b h n e"],
    w: Float[Tensor, "h k"],
    *,
    keep: Bool[Tensor, "b m"] | None,
    scale: float,
) -> Float[Tensor, "b h n e"]:
    """The attention of many queries to few landmarks, plus the convolution of the values.

    Args:
        out: Memory for the result, which has the gradients of v and w, see `attention.skip.padded_values_and_buffer`.
        landmarks: Landmarks of the keys.
        middle: Values of the landmarks, to be summed.
        v: Values; zeros at padding tokens.
        w: A kernel of odd size per head.
        keep: Landmarks that may be attended to; None if all may. The middle of the others must be zero.
    """
    return _LandmarkSums.apply(out, q, landmarks, middle, v, w, keep, scale)


class _LandmarkSums(torch.autograd.Function):
    @staticmethod
    @known_signature
    def forward(
        out: Tensor,
        q: Tensor,
        landmarks: Tensor,
        middle: Tensor,
        v: Tensor,
        w: Tensor,
        keep: Tensor | None,
        scale: float,
    ) -> Tensor:
        if runs_natively(out, q, landmarks, middle, v, w):
            inputs = {"q": q, "landmarks": landmarks, "middle": middle, "v": v}
            run_landmarks(
                "landmarks_forward", scale, **inputs, w=as_rows(w, v), bias=bias_of_keys(keep, landmarks), out=out
            )
            return out
        keys, middle, convolution = (scale * landmarks).mT.contiguous(), middle.contiguous(), Convolution(v, w)

        def stretch(piece: Piece) -> Tensor:
            here = convolution.at(piece)
            weights = _weights(q[piece].flatten(0, 1), keys, piece, keep)
            if len(here) == 1:
                here[0].baddbmm_(weights, middle[piece[0]][0])
                return here
            return here.add_(torch.bmm(weights, middle[piece[0]].flatten(0, 1)).unflatten(0, here.shape[:2]))

        def write(some: list[Piece]) -> None:
            for piece in some:
                out[piece] = stretch(piece)

        in_threads(write, _groups(q, landmarks, v))
        return out

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        out, q, landmarks, middle, _, _, keep, ctx.scale = inputs
        if output is out:
            ctx.mark_dirty(out)
        ctx.save_for_backward(q, landmarks, middle, keep)

    @staticmethod
    @for_one_gradient
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad,), (q, landmarks, middle, keep) = grads, ctx.saved_tensors
        if needs_graph(grad):
            inputs = q, landmarks, middle
            gradients = pull_back(lambda q, k, v: _attention(q, k, v, keep, ctx.scale), inputs, grad)
            return grad, *gradients, None, None, None, None
        of_q = room_like(q) if ctx.needs_input_grad[1] else None
        if runs_natively(grad, q, landmarks, middle):
            inputs = {
                "q": q,
                "landmarks": landmarks,
                "middle": middle,
                "grad": grad,
                "bias": bias_of_keys(keep, landmarks),
            }
            of_landmarks, of_middle = (x.new_empty(x.shape) for x in (landmarks, middle))
            written = {"of_q": of_q, "of_landmarks": of_landmarks, "of_middle": of_middle}
            run_landmarks("landmarks_backward", ctx.scale, **inputs, **written)
            return grad, of_q, of_landmarks, of_middle, None, None, None, None
        scaled = (ctx.scale * landmarks).contiguous()
        keys, values = scaled.mT.contiguous(), middle.mT.contiguous()

        def of_pieces(some: list[Piece]) -> tuple[Tensor, Tensor]:
            of_landmarks, of_middle = (
                torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (landmarks, middle)
            )
            for piece in some:
                queries, coming = (x[piece].flatten(0, 1) for x in (q, grad))
                of_weights = torch.bmm(coming, values[piece[0]].flatten(0, 1))
                weights = _weights(queries, keys, piece, keep)
                of_middle[piece[0]].flatten(0, 1).baddbmm_(weights.mT, coming)
                of_scores = softmax_backward(of_weights, weights, -1, weights.dtype)
                of_landmarks[piece[0]].flatten(0, 1).baddbmm_(of_scores.mT, queries)
                if of_q is not None:
                    place = of_q[piece]
                    place.copy_(torch.bmm(of_scores, scaled[piece[0]].flatten(0, 1)).unflatten(0, place.shape[:2]))
            return of_landmarks, of_middle

        (of_landmarks, of_middle), *others = in_threads(of_pieces, _groups(q, landmarks, grad))
        for more in others:
            of_landmarks, of_middle = of_landmarks.add_(more[0]), of_middle.add_(more[1])
        return grad, of_q, of_landmarks.mul_(ctx.scale), of_middle, None, None, None, None

    @staticmethod
    def vmap(info, in_dims, out, q, landmarks, middle, v, w, keep, scale):  # pyright: ignore[reportIncompatibleMethodOverride]
        # There, `out` is the convolution.
        add = torch.vmap(lambda out, *x: out + _attention(*x), (*in_dims[:4], *in_dims[6:]))
        return add(out, q, landmarks, middle, keep, scale), 0


def _attention(
    q: Tensor, landmarks: Tensor, middle: Tensor, keep: Tensor | None, scale: float
) -> Float[Tensor, "b h n e"]:
    """The sums by operations that have all derivatives."""
    return softmax_rows(q, landmarks, keep=keep, scale=scale) @ middle


def _weights(
    queries: Float[Tensor, "rows n d"], keys: Float[Tensor, "b h d m"], piece: Piece, keep: Bool[Tensor, "b m"] | None
) -> Float[Tensor, "rows n m"]:
    scores = torch.bmm(queries, keys[piece[0]].flatten(0, 1))
    if keep is not None:
        closed = ~unmask_empty_rows(keep[piece[0]])
        scores.unflatten(0, (len(closed), -1)).masked_fill_(closed[:, None, None, :], -torch.inf)
    return torch.softmax(scores, dim=-1, out=scores)


def _groups(q: Tensor, landmarks: Tensor, *more: Tensor) -> list[list[Piece]]:
    return groups_of_pieces(q, landmarks.shape[1] * landmarks.shape[2], *more)
