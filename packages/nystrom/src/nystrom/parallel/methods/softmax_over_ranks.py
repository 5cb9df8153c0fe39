r"""Exact attention across ranks: each rank broadcasts its keys and values, one rank after the other.

At any time, a rank holds its own tokens and the piece of one other rank. With $\ell$ the logarithm of a query's
normaliser over the pieces so far, a piece with the scores S gives the update
$$\ell' = \ln(e^\ell + \textstyle\sum_j e^{S_j}), \qquad
\mathrm{out}' = e^{\ell - \ell'}\, \mathrm{out} + e^{S - \ell'}\, V.$$
The backward pass sends the pieces again and recomputes the weights from the inputs and $\ell$: with $P = e^{S - \ell}$
and G the gradient of the outputs, $\mathrm{d}S = P \circ (G V^\top - \mathrm{rowsum}(G \circ \mathrm{out}))$. The
gradients of a piece are added up on the rank that it belongs to. Weights exist for some queries at a time.

The communication grows with the number of tokens, as exact attention requires. Everything is computed in float32 at
least.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from nystrom.attention.options import SoftmaxOptions
from nystrom.parallel.communication import Ranks, refuse_second_derivative
from nystrom.parallel.positions_over_ranks import Tokens
from nystrom.precision import at_least_float32
from nystrom.shapes import score_scale

# Weights held at a time, over all heads: 16 MB of float32.
_WEIGHTS = 2**22


def softmax_over_ranks(
    ranks: Ranks,
    queries: Tokens,
    keys: Tokens,
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    v: Float[Tensor, "b h s e"],
    options: SoftmaxOptions,
) -> Float[Tensor, "b h n e"]:
    """`softmax_attention` of the tokens of all ranks."""
    if options.form == "materialised":
        raise ValueError(
            "form is 'materialised', which stores the scores of all pairs, and group is given: pass form='fused'."
        )
    q, k, v = (at_least_float32(x) for x in (q, k, v))
    # Keys and values are sent together, with the mask as the last column.
    sent = torch.cat([k, v, keys.keep[:, None, :, None].expand(*k.shape[:3], 1).to(k)], dim=-1)
    sizes = tuple(max(1, length) for length in keys.lengths)
    return ranks.in_order(_OverPieces, q, sent, sizes, score_scale(q, options.scale))


class _OverPieces(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, link: Tensor, ranks: Ranks, q: Tensor, sent: Tensor, sizes: Sequence[int], scale: float
    ) -> tuple[Tensor, Tensor]:
        d, e = q.shape[-1], sent.shape[-1] - q.shape[-1] - 1
        out, logs = q.new_zeros(*q.shape[:3], e), q.new_full((*q.shape[:3], 1), -torch.inf)
        for _, piece in _pieces(ranks, sent, sizes):
            keys, values, keep = piece.split((d, e, 1), dim=-1)
            for part in _parts(q, keys):
                scores = _scores(q[:, :, part], keys, keep, scale)
                before = logs[:, :, part].clone()
                after = torch.logaddexp(before, scores.logsumexp(dim=-1, keepdim=True))
                logs[:, :, part] = after
                # Without a real key so far, weights are zero, not 0 / 0.
                level = after.clamp(min=torch.finfo(q.dtype).min)
                weights = scores.sub_(level).exp_()
                out[:, :, part] = (before - level).exp() * out[:, :, part] + weights @ values
        ctx.ranks, ctx.sizes, ctx.scale = ranks, sizes, scale
        ctx.save_for_backward(q, sent, out, logs)
        return out, link.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        (grad, link), (q, sent, out, logs) = grads, ctx.saved_tensors
        d, e = q.shape[-1], out.shape[-1]
        level, along = logs.clamp(min=torch.finfo(q.dtype).min), (grad * out).sum(dim=-1, keepdim=True)
        grad_q, grad_sent = torch.zeros_like(q), torch.zeros_like(sent)
        for rank, piece in _pieces(ctx.ranks, sent, ctx.sizes):
            (keys, values, keep), of_piece = piece.split((d, e, 1), dim=-1), torch.zeros_like(piece)
            for part in _parts(q, keys):
                weights = _scores(q[:, :, part], keys, keep, ctx.scale).sub_(level[:, :, part]).exp_()
                of_piece[..., d : d + e] += weights.mT @ grad[:, :, part]
                of_scores = (grad[:, :, part] @ values.mT).sub_(along[:, :, part]).mul_(weights).mul_(ctx.scale)
                grad_q[:, :, part] += of_scores @ keys
                of_piece[..., :d] += of_scores.mT @ q[:, :, part]
            of_piece = ctx.ranks.sum_at(rank, of_piece)
            grad_sent = of_piece if rank == ctx.ranks.rank else grad_sent
        return link, None, grad_q, grad_sent, None, None


def _pieces(ranks: Ranks, sent: Tensor, sizes: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
    """Each rank's number, and the tensor that it sends."""
    for rank, size in enumerate(sizes):
        here = sent.contiguous() if rank == ranks.rank else sent.new_empty(*sent.shape[:2], size, sent.shape[3])
        yield rank, ranks.send_from(rank, here)


def _parts(q: Tensor, keys: Tensor) -> Iterator[slice]:
    """Slices of queries whose weights are computed together."""
    length = max(1, _WEIGHTS // keys.shape[:3].numel())
    for start in range(0, q.shape[2], length):
        yield slice(start, start + length)


def _scores(q: Tensor, keys: Tensor, keep: Tensor, scale: float) -> Tensor:
    return (scale * (q @ keys.mT)).masked_fill_(keep.mT == 0, -torch.inf)
