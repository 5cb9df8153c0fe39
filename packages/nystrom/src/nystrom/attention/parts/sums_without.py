r"""Sums of the values of each cluster over all tokens except some, for all blocks, without a subtraction.

The tokens of a cluster stand one after the other, and after them a mark of its end. The tokens that a block leaves out
and the marks cut this row into ranges, each within one cluster. The sum of a range is that of at most two nodes of each
level of a binary tree over the row, whose nodes are the sums of pairs of nodes of the level below. In floating point, a
large value would take the digits of all others with it, if it were added and subtracted again.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from nystrom.attention.parts.clusters import cluster_sums, take_rows
from nystrom.shapes import is_number

# Levels of the tree where the number of tokens is a symbol.
_LEVELS = 24


def sums_without(
    v: Float[Tensor, "b t e"], cluster: Int[Tensor, "b t"], left_out: Int[Tensor, "b l x"], m: int
) -> Float[Tensor, "b l m e"]:
    """Compute the sums for the tokens at `left_out`, each once; t or more for none."""
    t = v.shape[1]
    marks = torch.arange(m + 1, device=v.device).expand(len(v), -1)
    cluster = torch.cat([cluster, marks], dim=1)
    order = cluster.argsort(dim=1, stable=True)
    place, row = order.argsort(dim=1), cluster.gather(1, order)
    values = take_rows(F.pad(v, (0, 0, 0, m + 1)), order)
    # The mark after the tokens of no cluster stands for none.
    left_out = left_out.clamp(max=t)
    left_out = torch.where(left_out < t, left_out, t + m)
    cuts = torch.cat([left_out, (t + marks[:, None]).expand(-1, left_out.shape[1], -1)], dim=2)
    cuts = place.gather(1, cuts.flatten(1)).view_as(cuts).sort(dim=2).values
    sums = _of_ranges(values, F.pad(cuts[:, :, :-1] + 1, (1, 0)).flatten(1), cuts.flatten(1))
    return cluster_sums(sums.unflatten(1, cuts.shape[1:]), row.gather(1, cuts.flatten(1)).view_as(cuts), m)


def _of_ranges(
    x: Float[Tensor, "b t e"], first: Int[Tensor, "b r"], stop: Int[Tensor, "b r"]
) -> Float[Tensor, "b r e"]:
    """The sum of the rows from `first` to before `stop`, of each range that holds any."""
    sums = torch.zeros_like(x[:, :1]).expand(-1, first.shape[1], -1)
    levels = (x.shape[1] + 1).bit_length() if is_number(x.shape[1]) else _LEVELS
    for _ in range(levels):
        some = first < stop
        before, last = some & (first % 2 == 1), some & (stop % 2 == 1)
        for here, place in ((before, first), (last, stop - 1)):
            node = take_rows(x, place.clamp(min=0, max=x.shape[1] - 1))
            sums = sums + torch.where(here[..., None], node, 0.0)
        first, stop = (first + before) // 2, stop // 2
        x = F.pad(x, (0, 0, 0, x.shape[1] % 2)) if is_number(x.shape[1]) else F.pad(x, (0, 0, 0, 2 - x.shape[1] % 2))
        x = x[:, 0::2] + x[:, 1::2]
    return sums
