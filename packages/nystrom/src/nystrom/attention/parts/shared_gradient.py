"""Tokens and their segment means, with a single shared gradient.

Landmark attention uses queries and keys twice: directly, and as landmarks. Autograd would allocate a gradient of n x d
numbers for each use and add the two. Here the gradient of the means, m x d numbers, is added to that of the tokens in
place, a piece at a time. So the gradient of the tokens must come from operations that allocate it anew, as those of
attention do; nothing else may hold a reference to it.

If a graph of the backward pass is recorded, and inside `torch.vmap`, nothing is done in place.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from nystrom.attention.parts.stretches import pieces
from nystrom.autograd_modes import for_one_gradient, known_signature, needs_graph
from nystrom.landmarks import segment_means, segments, take


def with_segment_means(
    x: Float[Tensor, "b h n d"], m: int, *, keep: Bool[Tensor, "b n"] | None
) -> tuple[Float[Tensor, "b h n d"], Float[Tensor, "b h m d"]]:
    """The tokens, zeros where they are not real, and m `segment_means` of them."""
    return _WithMeans.apply(x, m, keep)


class _WithMeans(torch.autograd.Function):
    @staticmethod
    @known_signature
    def forward(x: Tensor, m: int, keep: Tensor | None) -> tuple[Tensor, Tensor]:
        return _plain(x, m, keep)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        x, ctx.m, keep = inputs
        ctx.shape = x.shape
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(keep)

    @staticmethod
    @for_one_gradient
    def backward(ctx, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad, of_means), (keep,), m, n = grads, ctx.saved_tensors, ctx.m, ctx.shape[2]
        if grad is None or of_means is None or needs_graph(grad, of_means):
            return _plain_gradient(ctx.shape, m, keep, grad, of_means), None, None
        if keep is None and n % m == 0:
            grad.unflatten(2, (m, n // m)).add_((of_means * (m / n))[:, :, :, None])
            return grad, None, None
        groups = segments(grad, m, keep)
        sizes = of_means.new_zeros(len(groups), m + 1).scatter_add(1, groups, of_means.new_ones(groups.shape))
        shares = F.pad(of_means / sizes[:, None, :m, None].clamp(min=1), (0, 0, 0, 1))
        b, h, _, d = ctx.shape
        for piece in pieces(b, n, h * d):
            place, here = grad[piece], groups[piece[0], piece[2]]
            place.add_(take(shares[piece[0]], here))
        return grad, None, None

    @staticmethod
    def vmap(info, in_dims, x, m, keep):  # pyright: ignore[reportIncompatibleMethodOverride]
        plain = torch.vmap(lambda x, keep: _plain(x, m, keep), (in_dims[0], in_dims[2]))
        return plain(x, keep), (0, 0)


def _plain(x: Tensor, m: int, keep: Tensor | None) -> tuple[Tensor, Tensor]:
    return x.view_as(x), segment_means(x, m, keep=keep)


def _plain_gradient(
    shape: torch.Size, m: int, keep: Tensor | None, grad: Tensor | None, of_means: Tensor | None
) -> Tensor | None:
    """The gradient of the tokens, by operations that have all derivatives, since they are linear."""
    some = grad if of_means is None else of_means
    if some is None:
        return None
    (tokens, means), pull, *_ = torch.func.vjp(lambda x: _plain(x, m, keep), some.new_zeros(shape))
    pulled = pull(
        (torch.zeros_like(tokens) if grad is None else grad, torch.zeros_like(means) if of_means is None else of_means)
    )
    return pulled[0]
