r"""Sums of the values of each cluster over all tokens except some, for all blocks, without a subtraction.

The tokens of a cluster stand one after the other, and after them a mark of its end. The tokens that a block leaves out
and the marks cut this row into ranges, each within one cluster. The sum of a range is that of at most one row of each
of log2 t tables: row i of table j is the sum of the 2^j rows from i on, made of two rows of table j - 1. In floating
point, a large value would take the digits of all others with it, if it were added and subtracted again.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from nystrom.attention.parts.clusters import cluster_sums, take_rows
from nystrom.shapes import cut_blocks, is_number

# Tables where the number of tokens is a symbol.
_TABLES = 24


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
    each = cuts.shape[2]
    cuts = cut_blocks(place.gather(1, cuts.flatten(1)), each).sort(dim=2).values
    sums = _of_ranges(values, F.pad(cuts[:, :, :-1] + 1, (1, 0)).flatten(1), cuts.flatten(1))
    return cluster_sums(cut_blocks(sums, each), cut_blocks(row.gather(1, cuts.flatten(1)), each), m)


def _of_ranges(
    x: Float[Tensor, "b t e"], first: Int[Tensor, "b r"], stop: Int[Tensor, "b r"]
) -> Float[Tensor, "b r e"]:
    """The sum of the rows from `first` to before `stop`, of each range that holds any."""
    t = x.shape[1]
    row, number = torch.arange(t, device=x.device), (stop - first).clamp(min=0)
    sums = torch.zeros_like(x[:, :1]).expand(-1, first.shape[1], -1)
    for table in range(t.bit_length() if is_number(t) else _TABLES):
        some = (number >> table) % 2
        sums = sums + torch.where(some[..., None] == 1, take_rows(x, first.clamp(max=t - 1)), 0.0)
        first = first + (some << table)
        # No range reads a row whose 2^j rows are not all there.
        x = x + x.index_select(1, (row + 2**table).clamp(max=t - 1))
    return sums
