"""`biased_blocks` by the loops of `native.cpp`, for buckets: several heads at a time, and no copies of keys.

In a block the bias of a key of the window depends on the distance of two places, which a strip of one number for each
distance gives to all queries; that of a heavy key is looked up by its distance where queries differ in it. The weights
of far keys are those of `biased_blocks.weights_by_sides`: running sums over the tokens on either side, and the few
blocks between added one by one. The gradient of all these numbers is made by the loops, and that of the table from it.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from nystrom.attention.options import NearFarOptions
from nystrom.attention.parts.band import MovedTokens
from nystrom.attention.parts.biased_blocks import (
    OfAllHeads,
    attend_head,
    blocks_beside,
    piece_of_each_place,
    weights_by_sides,
)
from nystrom.attention.parts.block_stretches import sizes_of
from nystrom.attention.parts.clusters import Chosen
from nystrom.attention.position_bias import RelativeBuckets
from nystrom.autograd_modes import for_one_gradient, needs_graph, pull_back
from nystrom.native import Positions, room_like, run_blocks, runs_natively
from nystrom.precision import at_least_float32
from nystrom.shapes import score_scale


def attend_by_loops(tokens: MovedTokens, bias: RelativeBuckets, options: NearFarOptions) -> Float[Tensor, "r t e"]:
    """Self-attention of tokens moved to whole blocks, a head in each row, with a bias of as many heads."""
    settings = OfAllHeads(bias, options, score_scale(tokens.q, options.scale))
    weight = at_least_float32(bias.table).to(tokens.q.dtype)
    return _Loops.apply(settings, tokens.q, tokens.k, tokens.v, weight, *tokens.chosen)


def _positions(settings: OfAllHeads, weight: Float[Tensor, "h w"]) -> Positions:
    """The bias as the loops have it, from the tables of heads."""
    bias, options = settings.bias, settings.options
    assert isinstance(bias, RelativeBuckets)
    top, near, sides = weights_by_sides(bias, weight, bias.max_distance, options)
    around = near[..., piece_of_each_place(options, weight.device)].flatten(1)
    numbers = torch.cat([bias.of_each_distance(weight), around, sides, top], dim=1)
    return Positions(numbers, bias.max_distance, blocks_beside(bias.max_distance, options))


def _attend(
    settings: OfAllHeads,
    q: Float[Tensor, "r t d"],
    k: Float[Tensor, "r t d"],
    v: Float[Tensor, "r t e"],
    weight: Float[Tensor, "h w"],
    chosen: Chosen,
) -> Float[Tensor, "r t e"]:
    """The attention by torch's operators, one head after the other."""
    heads, place = len(weight), torch.arange(q.shape[1], device=q.device)[None, :, None]
    of_head = [x.unflatten(0, (-1, heads)).unbind(1) for x in (q, k, v, *chosen)]
    real = torch.ones_like(place[..., 0], dtype=torch.bool)
    out = [
        attend_head(settings, q, k, v, weight[head], heavy, exists, cluster, real, place)
        for head, (q, k, v, heavy, exists, cluster) in enumerate(zip(*of_head, strict=True))
    ]
    return torch.stack(out, dim=1).flatten(0, 1)


class _Loops(torch.autograd.Function):
    @staticmethod
    def forward(
        settings: OfAllHeads,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        weight: Tensor,
        heavy: Tensor,
        exists: Tensor,
        cluster: Tensor,
    ) -> Tensor:
        out = room_like(q) if q.shape[-1] == v.shape[-1] else v.new_empty(*q.shape[:2], v.shape[-1])
        positions, chosen = _positions(settings, weight), Chosen(heavy, exists, cluster)
        sizes = sizes_of(q, settings.options)
        run_blocks("blocks_forward", chosen, *sizes, positions=positions, q=q, k=k, v=v, out=out)
        return out

    @staticmethod
    def setup_context(ctx, inputs, output: Tensor) -> None:
        ctx.settings, *tensors = inputs
        ctx.save_for_backward(*tensors, output)

    @staticmethod
    @for_one_gradient
    def backward(ctx, *grads: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad,), (q, k, v, weight, *choice, out), settings = grads, ctx.saved_tensors, ctx.settings
        chosen, nothing = Chosen(*choice), (None,) * 3
        if needs_graph(grad) or not runs_natively(q, k, v, grad):
            inputs = q, k, v, weight
            gradients = pull_back(lambda q, k, v, weight: _attend(settings, q, k, v, weight, chosen), inputs, grad)
            return None, *gradients, *nothing
        positions = _positions(settings, weight)
        given = q.new_empty(len(q), positions.numbers.shape[1])
        of_q, of_k, of_v = (room_like(x) for x in (q, k, v))
        tensors = {"q": q, "k": k, "v": v, "out": out, "grad": grad, "of_q": of_q, "of_k": of_k, "of_v": of_v}
        positions = positions._replace(gradient=given)
        run_blocks("blocks_backward", chosen, *sizes_of(q, settings.options), positions=positions, **tensors)
        given = given.unflatten(0, (-1, len(weight))).sum(dim=0)
        (of_weight,) = pull_back(lambda weight: _positions(settings, weight).numbers, (weight,), given)
        return None, of_q, of_k, of_v, of_weight, *nothing
