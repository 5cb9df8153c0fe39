"""Sums over the ranks before or after each rank, by recursive doubling: about log2(ranks) exchanges."""

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from nystrom.parallel.communication import Ranks


def hops(size: int) -> list[int]:
    """The distance, in ranks, from which each exchange adds a partial sum.

    The first brings the next rank's tensor; each later one doubles the number of ranks in the sum.
    """
    distances = [1] if size > 1 else []
    while sum(distances) < size - 1:
        distances.append(sum(distances))
    return distances


def sum_before(ranks: Ranks, x: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m d"]:
    """The sum of tensors of equal shape over the ranks before this one; zeros on the first."""
    return _sum_beside(ranks, x, -1)


def sum_after(ranks: Ranks, x: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m d"]:
    """The sum over the ranks after this one; zeros on the last."""
    return _sum_beside(ranks, x, 1)


def _sum_beside(ranks: Ranks, x: Float[Tensor, "*b m d"], side: int) -> Float[Tensor, "*b m d"]:
    total = None
    for distance in hops(ranks.size):
        came = _from(ranks, x if total is None else total, side * distance)
        total = came if total is None else total + came
    return x * 0 if total is None else total


def _from(ranks: Ranks, x: Float[Tensor, "*b m d"], offset: int) -> Float[Tensor, "*b m d"]:
    """The tensor of the rank `offset` away; zeros if there is none."""
    m = x.shape[-2]
    partners = [rank + offset for rank in range(ranks.size)]
    spans = [(m * other, m * (other + 1)) if 0 <= other < ranks.size else (0, 0) for other in partners]
    came = ranks.fetch(x.movedim(-2, 0), [m] * ranks.size, spans).movedim(0, -2)
    return F.pad(came, (0, 0, 0, m - came.shape[-2]))
