"""A rank's tokens together with their neighbours on other ranks (the halo)."""

import torch.nn.functional as F
from jaxtyping import Shaped
from torch import Tensor

from nystrom.parallel.communication import Ranks
from nystrom.parallel.positions_over_ranks import Tokens


def with_halo(
    ranks: Ranks, tokens: Tokens, x: Shaped[Tensor, "*b n d"], before: int, after: int
) -> Shaped[Tensor, "*b t d"]:
    """`before` + n + `after` tokens: the rank's own, and those next to them, from as many ranks as needed.

    Positions outside the sequence are zero. Ranks without tokens, which hold a single padding token, request none.
    """
    starts = [sum(tokens.lengths[:rank]) for rank in range(ranks.size)]
    spans = [
        (max(0, start - before), min(tokens.total, start + length + after)) if length else (0, 0)
        for start, length in zip(starts, tokens.lengths, strict=True)
    ]
    length, (first, last) = tokens.lengths[ranks.rank], spans[ranks.rank]
    slab = ranks.fetch(x[..., :length, :].movedim(-2, 0), tokens.lengths, spans).movedim(0, -2)
    missing = before - tokens.start + first if length else 0
    return F.pad(slab, (0, 0, missing, before + x.shape[-2] + after - missing - (last - first)))
