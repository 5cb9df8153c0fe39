r"""near_far with a bias of positions, see `nystrom.attention.position_bias`.

Near and heavy keys get their bias $b(x_i, x_j)$. A far key of block l gets one for the whole block, so that a cluster
takes part with its mean key, and weights in place of counts:
$$e^{c\, q_i^\top \mu(a)}\; \sum_j e^{\beta(l, j)}, \qquad
\frac{\sum_j e^{\beta(l, j)} v_j}{\sum_j e^{\beta(l, j)}}$$
over the far keys j of cluster a. Blocks are cut into pieces where windows begin and end (three if `reach` is less than
half a block), and $\beta(l, j)$ is that of the piece of j:

- Buckets: $\log \mathrm{mean}\, e^{b}$ over the pairs of a query place and a key place, in blocks so near that
  distances differ in bias; further away each side has one bias, which is exact.
- ALiBi: minus the slope times the distance between the middles of block and piece, over their real tokens.

Sums of the values of each cluster by pieces are made once. The sums of a block are a product of weights and these sums,
plus for buckets the sums over all blocks on either side; nothing is subtracted. The product of ALiBi takes
$3\, l^2 m e$ steps for l blocks: it grows with the square of the tokens, at a thousandth of exact attention's rate.

Heads are computed one after the other, and again for the gradient, so that copies of keys exist for one head. For
buckets `biased_loops` computes this on a CPU, and `biased_kernels` on a GPU.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from nystrom.attention.fused import bias_of
from nystrom.attention.options import NearFarOptions
from nystrom.attention.parts.band import MovedTokens, from_first_real, pad_to_blocks, windows, without_padding
from nystrom.attention.parts.clusters import cluster_sizes, cluster_sums, open_where_empty, take_rows
from nystrom.attention.parts.far_keys import SeenKeys, attend_with_bias
from nystrom.attention.position_bias import PositionBias
from nystrom.autograd_modes import pull_back
from nystrom.precision import at_least_float32
from nystrom.shapes import cut_blocks, is_number, score_scale

# Blocks whose sums over near pieces are one product.
_GROUP = 16
# Scores of blocks that attend in one call: at least _FEWEST, or half as many as keys have numbers, at most _MOST.
_FEWEST, _MOST = 2**14, 2**21
# A weight is at least e to this: less would vanish, and a cluster of such keys with it.
_LEAST = -80.0


class OfAllHeads(NamedTuple):
    """Bias, options and scale, which all heads share."""

    bias: PositionBias
    options: NearFarOptions
    scale: float


def attend_with_positions(
    tokens: MovedTokens,
    bias: PositionBias,
    places: Shaped[Tensor, "#b n p"],
    keep: Bool[Tensor, "b n"] | None,
    options: NearFarOptions,
) -> Float[Tensor, "b t e"]:
    """Self-attention of the tokens of one head, moved to whole blocks, with the bias of where they are."""
    q, k, v, _, chosen, _ = tokens
    size, t = options.block_size, q.shape[1]
    if keep is None:
        real = pad_to_blocks(torch.ones_like(places[..., :1], dtype=torch.bool), size)[..., 0]
        places = pad_to_blocks(places, size)
    else:
        positions, real, _, _ = from_first_real(keep, size)
        places = take_rows(places.expand(len(keep), -1, -1), positions)
    if not places.is_floating_point():
        # Only differences of position numbers count.
        places = torch.arange(t, device=q.device)[None, :, None]
    settings = OfAllHeads(bias, options, score_scale(q, options.scale))
    weight = at_least_float32(bias.weight[0]).to(q.dtype)
    return attend_again(attend_head, settings, q, k, v, weight, *chosen, real, places)


def attend_head(
    settings: OfAllHeads,
    q: Float[Tensor, "b t d"],
    k: Float[Tensor, "b t d"],
    v: Float[Tensor, "b t e"],
    weight: Float[Tensor, " w"],
    heavy: Int[Tensor, "b g"],
    exists: Bool[Tensor, "b g"],
    cluster: Int[Tensor, "b t"],
    real: Bool[Tensor, "#b t"],
    places: Shaped[Tensor, "#b t p"],
) -> Float[Tensor, "b t e"]:
    """Self-attention of the tokens of one head, which keeps all that its gradient needs."""
    bias, options, scale = settings
    size, reach, m = options.block_size, options.reach, options.num_clusters
    blocks = cut_blocks(q, size)
    shape = (-1, blocks.shape[1], -1, -1)
    near = [windows(x, size, reach) for x in (k, v)]
    inside = windows((cluster - m)[..., None], size, reach)[..., 0] < 0
    far = far_keys_of_blocks(settings, k, v, weight[None], exists, cluster, real, places)
    means, logs, values = (x[:, 0] for x in far)
    heavies = [take_rows(x, heavy)[:, None].expand(shape) for x in (k, v)]
    at = cut_blocks(places, size)
    if places.is_floating_point():
        around = bias.distance(at, windows(places, size, reach))
    else:
        around = bias.distance(at[:, :1], at[:, :1, :1] + torch.arange(-reach, size + reach, device=q.device)[:, None])
    of_heavy = bias.distance(at, take_rows(places.expand(len(k), -1, -1), heavy)[:, None])
    means = means[:, None].expand(shape)
    parts, step = [], _blocks_at_once(k, size * (inside.shape[2] + heavy.shape[1] + m))

    def attend(some: slice) -> Tensor:
        of_window = bias.at_distance(weight, around if around.shape[1] == 1 else around[:, some])
        scores = [
            of_window + bias_of(inside[:, some], q.dtype)[:, :, None],
            bias.at_distance(weight, of_heavy[:, some]) + bias_of(exists, q.dtype)[:, None, None],
            logs[:, some, None].expand(-1, -1, size, -1),
        ]
        scores = [x.expand(len(k), -1, -1, -1).to(q.dtype) for x in scores]
        seen = SeenKeys(
            torch.cat([near[0][:, some], heavies[0][:, some], means[:, some]], dim=2),
            torch.cat([near[1][:, some], heavies[1][:, some], values[:, some]], dim=2),
            torch.cat(scores, dim=3),
        )
        return attend_with_bias(blocks[:, some], seen, scale).flatten(1, 2)

    if step is None:
        return attend(slice(None))
    for start in range(0, blocks.shape[1], step):
        parts.append(attend(slice(start, start + step)))
    return torch.cat(parts, dim=1)


def _blocks_at_once(k: Float[Tensor, "b t d"], scores: int) -> int | None:
    """How many blocks, each with so many scores in a row, attend in one call; None for all."""
    if torch.compiler.is_compiling() or not is_number(k.shape[1]):
        return None
    return max(1, min(max(_FEWEST, k.numel() // 2), _MOST) // (len(k) * scores))


def far_keys_of_blocks(
    settings: OfAllHeads,
    k: Float[Tensor, "r t d"],
    v: Float[Tensor, "r t e"],
    weight: Float[Tensor, "h w"],
    exists: Bool[Tensor, "r g"],
    cluster: Int[Tensor, "r t"],
    real: Bool[Tensor, "#r t"],
    places: Shaped[Tensor, "#r t p"],
) -> tuple[Float[Tensor, "b h m d"], Float[Tensor, "b h l m"], Float[Tensor, "b h l m e"]]:
    """Mean keys of the clusters, and for each block the logarithms of their weights, and mean values; of h heads."""
    bias, options, e, heads = settings.bias, settings.options, v.shape[-1], len(weight)
    size, m = options.block_size, options.num_clusters
    numbers = open_where_empty(counted := cluster_sizes(k, cluster, m), exists)
    means = cluster_sums(k, cluster, m) / numbers.clamp(min=1)[..., None]
    starts = _starts(size, options.reach)
    piece, none = piece_of_each_place(options, v.device), len(starts) * m
    inside = cut_blocks(cluster, size)
    inside = torch.where(inside < m, inside + piece * m, none)
    # A column of ones counts.
    sums = cluster_sums(cut_blocks(F.pad(v, (0, 1), value=1.0), size), inside, none).unflatten(2, (len(starts), m))
    if bias.furthest is None:
        top, sums = (x[:, None] for x in _by_middles(settings, sums, weight[0], real, places))
    else:
        top, sums = _by_sides(settings, sums, weight)
    total = sums[..., e] + (numbers - counted).unflatten(0, (-1, heads))[:, :, None]
    safe = torch.where(total > 0, total, 1.0)
    logs = (safe.log() + top).masked_fill(total <= 0, -torch.inf)
    return means.unflatten(0, (-1, heads)), logs, sums[..., :e] / safe[..., None]


def blocks_beside(furthest: int, options: NearFarOptions) -> int:
    """How many blocks on either side of a block have distances that differ in bias, or are partly in its window."""
    size = options.block_size
    return max(-(-(furthest + size - 1) // size) - 1, -(-options.reach // size))


def weights_by_sides(
    bias: PositionBias, weight: Float[Tensor, "*h w"], furthest: int, options: NearFarOptions
) -> tuple[Float[Tensor, "*h 1"], Float[Tensor, "*h s c"], Float[Tensor, "*h 2"]]:
    """The logarithm of the largest weight of a far key, and its shares: of pieces beside a block, and further away.

    The pieces are those of s blocks around a block, zeros where it sees them; further away each side has one weight.
    """
    size, reach, z = options.block_size, options.reach, blocks_beside(furthest, options)
    starts = _starts(size, reach)
    place, steps = torch.arange(size, device=weight.device), torch.arange(-z, z + 1, device=weight.device)
    pairs = bias.at_distance(weight, steps[:, None, None] * size + place[:, None] - place).logsumexp(dim=-1)
    ends = [*starts[1:], size]
    means = [
        pairs[..., start:end].logsumexp(dim=-1) - math.log((end - start) * size)
        for start, end in zip(starts, ends, strict=True)
    ]
    seen = torch.stack([_in_window(steps * size + start, size, reach) for start in starts], dim=1)
    near = torch.stack(means, dim=-1).masked_fill(seen, -torch.inf)
    sides = bias.at_distance(weight, torch.arange(-furthest, furthest + 1, 2 * furthest, device=weight.device))
    top = torch.cat([near.flatten(-2), sides], dim=-1).amax(dim=-1, keepdim=True).detach()
    sides = (sides - top).clamp(min=_LEAST).exp()
    near = (near.masked_fill(seen, 0.0) - top[..., None]).clamp(min=_LEAST).exp()
    return top, torch.where(seen, 0.0, near), sides


def _by_sides(
    settings: OfAllHeads, sums: Float[Tensor, "r l c m x"], weight: Float[Tensor, "h w"]
) -> tuple[Float[Tensor, "h 1 1"], Float[Tensor, "b h l m x"]]:
    """The logarithm of the largest weight, and weighted sums, where each side has one bias from a distance on."""
    bias, options = settings.bias, settings.options
    assert bias.furthest is not None
    (pieces, m, width), z = sums.shape[2:], blocks_beside(bias.furthest, options)
    top, near, sides = weights_by_sides(bias, weight, bias.furthest, options)
    # Row g has the weights of the blocks around the g-th of its group.
    shift = torch.arange(_GROUP + 2 * z, device=weight.device) - torch.arange(_GROUP, device=weight.device)[:, None]
    around = ((shift >= 0) & (shift <= 2 * z))[..., None]
    matrix = torch.where(around, near[:, shift.clamp(0, 2 * z)], 0.0).flatten(2)
    groups = windows(pad_to_blocks(sums.flatten(2), _GROUP), _GROUP, z)
    groups = groups.unflatten(3, (pieces, m * width)).flatten(2, 3).unflatten(0, (-1, len(weight)))
    groups = (matrix[:, None] @ groups).flatten(2, 3)
    out = without_padding(groups, sums.shape[1]).unflatten(3, (m, width))
    cells = sums.sum(dim=2)
    before = F.pad(cells, (0, 0, 0, 0, z + 1, 0)).cumsum(dim=1)[:, : -z - 1]
    after = F.pad(cells.flip(1), (0, 0, 0, 0, z + 1, 0)).cumsum(dim=1)[:, : -z - 1].flip(1)
    of_side, rows = sides[:, :, None, None, None], (-1, len(weight))
    return top[:, None], out + of_side[:, 0] * before.unflatten(0, rows) + of_side[:, 1] * after.unflatten(0, rows)


def _by_middles(
    settings: OfAllHeads,
    sums: Float[Tensor, "b l c m x"],
    weight: Float[Tensor, " w"],
    real: Bool[Tensor, "#b t"],
    places: Shaped[Tensor, "#b t p"],
) -> tuple[Float[Tensor, "b l 1"], Float[Tensor, "b l m x"]]:
    """The logarithm of the largest weight of each block, and weighted sums, by distances between middles."""
    bias, size, reach = settings.bias, settings.options.block_size, settings.options.reach
    starts, device = _starts(size, reach), weight.device
    exists = cut_blocks(real, size)[..., None].to(weight)
    held = exists * cut_blocks(places, size)
    piece = piece_of_each_place(settings.options, device)
    members = (piece[:, None] == torch.arange(len(starts), device=device)).to(weight)
    middle = held.sum(dim=2) / exists.sum(dim=2).clamp(min=1)
    middles = (members.mT @ held) / (members.mT @ exists).clamp(min=1)
    block = torch.arange(sums.shape[1], device=device)
    first = torch.stack([block * size + start for start in starts], dim=1)
    seen = _in_window(first.flatten() - block[:, None] * size, size, reach)
    seen = seen | (sums[..., -1].sum(dim=3) == 0).flatten(1)[:, None]
    scores = bias.at_distance(weight, bias.distance(middle, middles.flatten(1, 2)))
    top = scores.detach().masked_fill(seen, -torch.inf).amax(dim=2, keepdim=True)
    top = torch.where(top == -torch.inf, 0.0, top)
    weights = torch.where(seen, 0.0, (scores - top).clamp(min=_LEAST, max=0.0).exp())
    return top, (weights @ sums.flatten(3).flatten(1, 2)).unflatten(2, sums.shape[3:])


def _starts(size: int, reach: int) -> list[int]:
    """The first place of each piece of a block."""
    return sorted({0, reach % size, -reach % size})


def piece_of_each_place(options: NearFarOptions, device: torch.device) -> Int[Tensor, " c"]:
    """The number of the piece of each place of a block."""
    place = torch.arange(options.block_size, device=device)
    piece = torch.zeros_like(place)
    for start in _starts(options.block_size, options.reach)[1:]:
        piece = piece + (place >= start)
    return piece


def _in_window(start: Int[Tensor, "*p"], size: int, reach: int) -> Bool[Tensor, "*p"]:
    """Which pieces are in the window of a block, by where they begin, counted from the begin of the block."""
    return (start >= -reach) & (start < size + reach)


def attend_again(attend: Callable[..., Tensor], settings: OfAllHeads, q: Tensor, *rest: Tensor) -> Tensor:
    """`attend(settings, q, k, v, weight, ...)`, of which nothing is kept: the backward pass calls it again."""
    if torch.compiler.is_compiling() or not is_number(q.shape[1]):
        return attend(settings, q, *rest)
    return _Again.apply(attend, settings, q, *rest)


class _Again(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(attend: Callable[..., Tensor], settings: OfAllHeads, *tensors: Any) -> Tensor:
        return attend(settings, *tensors)

    @staticmethod
    def setup_context(ctx, inputs, output: Tensor) -> None:
        ctx.attend, ctx.settings = inputs[:2]
        ctx.save_for_backward(*inputs[2:])

    @staticmethod
    def backward(ctx, *grads: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        saved = ctx.saved_tensors

        def attend(*tensors: Any) -> Tensor:
            return ctx.attend(ctx.settings, *tensors, *saved[4:])

        return None, None, *pull_back(attend, saved[:4], *grads), *(None for _ in saved[4:])
