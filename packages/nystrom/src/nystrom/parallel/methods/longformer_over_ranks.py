"""Longformer across ranks: each fetches half a window of keys and values from either neighbour.

The global tokens are the first real ones across all ranks, and all ranks hold them. Their own outputs, attention to all
keys, are joined across the ranks. The communication depends on the window and the number of global tokens, not on n.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from nystrom.attention.methods.longformer import band_of, block_size_of, keys_around
from nystrom.attention.options import LongformerOptions
from nystrom.attention.parts.band import attend_blocks, pad_to_blocks
from nystrom.landmarks import take as take_places
from nystrom.parallel.communication import Ranks
from nystrom.parallel.halo import with_halo
from nystrom.parallel.joined_softmax import joined_softmax
from nystrom.parallel.positions_over_ranks import Tokens, take_first
from nystrom.shapes import score_scale


def longformer_over_ranks(
    ranks: Ranks,
    queries: Tokens,
    keys: Tokens,
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h n d"],
    v: Float[Tensor, "b h n e"],
    options: LongformerOptions,
) -> Float[Tensor, "b h n e"]:
    """`longformer_attention` of the tokens of all ranks."""
    # More than all tokens would only be padding.
    g, half = min(options.num_global, keys.total), min(options.window // 2, keys.total - 1)
    n, scale, size = q.shape[2], score_scale(q, options.scale), block_size_of(half)
    around = [with_halo(ranks, keys, x, half, half) for x in (k, v)]
    others = _others_around(ranks, keys, g, half)
    chosen = [take_first(ranks, keys, x, g) for x in (q, k, v)] if g else []
    # Global tokens come first, in blocks of their own, of which only the keys and values are used.
    front = -(-g // size) * size
    table = [_in_front(x, chosen[1:][i] if g else None, front) for i, x in enumerate(around)]
    padded_q, padded_k, padded_v = (pad_to_blocks(x, size) for x in (F.pad(q, (0, 0, front + half, half)), *table))
    bias = band_of(F.pad(others, (front, 0)), g, size, half, q.dtype)
    positions = torch.arange(g, device=q.device).expand(len(q), -1)

    def reach(x: Tensor, head: int, positions: Tensor) -> Tensor:
        return keys_around(x, positions, size, half)

    out = attend_blocks(padded_q, padded_k, padded_v, reach, bias, positions, size=size, scale=scale, copies=g > 0)
    out = out[:, :, front + half : front + half + n]
    if not g:
        return out
    rows, _ = joined_softmax(ranks, keys, chosen[0], k, v, scale=scale)
    mine = take_places(rows, keys.order.clamp(0, g - 1)).to(out.dtype)
    return torch.where((keys.keep & (keys.order < g))[:, None, :, None], mine, out)


def _others_around(ranks: Ranks, keys: Tokens, g: int, half: int) -> Bool[Tensor, "b t"]:
    """Which tokens around this rank's are real and not global."""
    others = keys.keep & (keys.order >= g)
    return with_halo(ranks, keys, others[..., None], half, half)[..., 0]


def _in_front(
    x: Float[Tensor, "b h t d"], chosen: Float[Tensor, "b h g d"] | None, front: int
) -> Float[Tensor, "b h t2 d"]:
    if chosen is None:
        return x
    return torch.cat([F.pad(chosen, (0, 0, 0, front - chosen.shape[2])).to(x.dtype), x], dim=2)
