"""Exact attention with a bias of positions, a stretch of queries at a time.

The bias of a stretch exists only while the stretch is computed, and is made again for the gradient, so that memory
grows linearly with the tokens. If the length is symbolic, or a compiler traces, all queries are one stretch.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from nystrom.attention.exact_limit import may_branch
from nystrom.attention.fused import bias_of, unmask_empty_rows
from nystrom.attention.position_bias import PositionBias
from nystrom.autograd_modes import pull_back
from nystrom.landmarks import first_tokens, real_index, take
from nystrom.shapes import is_number, score_scale, zero_masked

# Scores of a stretch, over batch and heads: at least _FEWEST, or some for each number of the keys, at most _MOST.
_FEWEST, _MOST = 2**14, 2**23
_EACH = 8


def biased_softmax(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h n d"],
    v: Float[Tensor, "b h n e"],
    bias: PositionBias,
    places: Shaped[Tensor, "#b n p"],
    *,
    keep: Bool[Tensor, "b n"] | None = None,
    scale: float | None = None,
) -> Float[Tensor, "b h n e"]:
    """Exact self-attention of tokens at these places; masked values must be zero."""
    d, e = q.shape[-1], v.shape[-1]
    factor, weight = score_scale(q, scale), bias.weight.to(torch.promote_types(q.dtype, torch.float32))
    if d != e:
        q, k, v = (F.pad(x, (0, max(d, e) - x.shape[-1])) for x in (q, k, v))
    n = q.shape[2]
    real = None if keep is None else bias_of(unmask_empty_rows(keep), q.dtype)[:, None, None]
    if torch.compiler.is_compiling() or not is_number(n):
        return _attend(bias, factor, q, places, k, v, weight, places, real)[..., :e]
    scores = min(max(_FEWEST, _EACH * k.numel()), _MOST)
    length = max(1, scores // max(1, q.shape[0] * q.shape[1] * n))
    parts = []
    for start in range(0, n, length):
        some = slice(start, start + length)
        parts.append(_Stretch.apply(bias, factor, q[:, :, some], places[:, some], k, v, weight, places, real))
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=2))[..., :e]


def exact_or_not(
    exact: Callable[..., Tensor],
    approximate: Callable[..., Tensor],
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h n d"],
    v: Float[Tensor, "b h n e"],
    places: Shaped[Tensor, "#b n p"],
    keep: Bool[Tensor, "b n"],
    m: int,
) -> Float[Tensor, "b h n e"]:
    """`approximate`, or `exact` for sequences of at most m real tokens; both take tokens, places and the mask."""
    short, places = keep.sum(dim=1) <= m, places.expand(len(keep), -1, -1)

    def of_first(rows: slice | Int[Tensor, " r"]) -> Tensor:
        place, real = first_tokens(keep[rows], m)
        first = [zero_masked(take(x[rows], place), real) for x in (q, k, v)]
        out = exact(*first, places[rows].gather(1, place[..., None].expand(-1, -1, places.shape[2])), real)
        return take(out, real_index(keep[rows])[0].clamp(0, m - 1))

    if not may_branch(q):
        return torch.where(short[:, None, None, None], of_first(slice(None)), approximate(q, k, v, places, keep))
    if not short.any():
        return approximate(q, k, v, places, keep)
    rows, others = short.nonzero()[:, 0], (~short).nonzero()[:, 0]
    if not len(others):
        return of_first(slice(None))
    far = approximate(*(x[others] for x in (q, k, v, places, keep)))
    return torch.cat([of_first(rows).to(far.dtype), far])[torch.cat([rows, others]).argsort()]


def _attend(
    bias: PositionBias,
    scale: float,
    q: Float[Tensor, "b h r d"],
    at: Shaped[Tensor, "#b r p"],
    k: Float[Tensor, "b h n d"],
    v: Float[Tensor, "b h n d"],
    weight: Float[Tensor, "h w"],
    places: Shaped[Tensor, "#b n p"],
    real: Float[Tensor, "b 1 1 n"] | None,
) -> Float[Tensor, "b h r d"]:
    distance = bias.distance(at, places)
    scores = torch.stack([bias.at_distance(each, distance) for each in weight.unbind(0)], dim=1)
    scores = scores if real is None else scores + real
    return F.scaled_dot_product_attention(q, k, v, attn_mask=scores.to(q.dtype), scale=scale)


class _Stretch(torch.autograd.Function):
    """`_attend` of some queries; the backward pass makes the bias again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(bias: PositionBias, scale: float, *tensors: Any) -> Tensor:
        return _attend(bias, scale, *tensors)

    @staticmethod
    def setup_context(ctx, inputs, output: Tensor) -> None:
        ctx.fixed = inputs[:2]
        ctx.save_for_backward(*inputs[2:])

    @staticmethod
    def backward(ctx, *grads: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        q, at, k, v, weight, places, real = ctx.saved_tensors
        bias, scale = ctx.fixed

        def attend(q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> Tensor:
            return _attend(bias, scale, q, at, k, v, weight, places, real)

        of_q, of_k, of_v, of_weight = pull_back(attend, (q, k, v, weight), *grads)
        return None, None, of_q, None, of_k, of_v, of_weight, None, None
