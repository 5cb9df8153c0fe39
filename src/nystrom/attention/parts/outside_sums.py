r"""Sums of the values of each cluster over the tokens outside of a block's window, for all blocks.

With $w_l$ the window of block l, of the size B of a block and `reach` more on either side, and $V$ the sums of the
values of each cluster over some tokens,
$$\mathrm{sums}_l = \sum_{i < l} V(\text{first } B \text{ of } w_i) + \sum_{i > l} V(\text{last } B \text{ of } w_i):$$
the first B tokens of the windows follow each other up to where $w_l$ begins, and the last B from where it ends. Nothing
is added that would have to be taken off again: in floating point a large value would take the digits of all others
with it. The gradient is of the same kind, sums over the blocks before and after a token's own.
"""

from bisect import bisect_right
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from nystrom.attention.parts.band import add_windows, some_windows
from nystrom.attention.parts.clusters import cluster_sums, in_one_matrix, take_rows


def sums_outside(
    near: Float[Tensor, "b l w e"], inside: Int[Tensor, "b l w"], size: int, m: int
) -> Float[Tensor, "b l m e"]:
    """The sums.

    Args:
        near: The values in the windows; zeros outside of the sequence.
        inside: The cluster of each.
        size: Tokens of a block.
        m: Clusters.
    """
    first, last = (cluster_sums(near[:, :, some], inside[:, :, some], m) for some in (slice(size), slice(-size, None)))
    before = F.pad(first, (0, 0, 0, 0, 1, -1)).cumsum(dim=1)
    after = F.pad(last, (0, 0, 0, 0, -1, 1)).flip(1).cumsum(dim=1).flip(1)
    return before + after


class OutsideSums:
    """The sums, and their gradient, a stretch of blocks at a time, in the same memory.

    Blocks make groups. The windows of a group hold a span of tokens, cut into pieces that no window holds in part: the
    sums of its blocks are a matrix of zeros and ones, which says what is outside of which window, times the sums over
    the pieces and over all tokens outside of the span. These are for spans what the sums are for windows, and are found
    by running sums, once for some rows. The gradient is the transpose of it all.
    """

    def __init__(self, v: Tensor, cluster: Tensor, m: int, *, size: int, reach: int, blocks: int):
        """Cut tokens and spans.

        Args:
            v: Values (b, t, e) of a whole number of blocks.
            cluster: The cluster of each; m for none.
            m: Clusters.
            size: Tokens of a block.
            reach: Tokens on either side of its block that a query sees.
            blocks: Blocks of a group; the last one may have fewer.
        """
        self.v, self.size, self.reach, self.blocks, self.length = v, size, reach, blocks, blocks * size
        # One more cluster takes the tokens of none.
        self.clusters, tokens = m + 1, v.shape[1]
        self.padding = -tokens % self.length
        self.cluster = F.pad(cluster, (reach, reach + self.padding), value=m)
        piece, ranges = _cut(range(0, self.length, size), size + 2 * reach, self.length + 2 * reach)
        number, (low, high) = torch.arange(ranges[-1][1] + 1), torch.tensor(ranges).T[..., None]
        # The last column is what is outside of the span.
        self.outside, self.piece = ((number < low) | (number >= high)).to(v.dtype), piece * self.clusters
        part, self.ranges = _cut(range(-reach, tokens - reach, self.length), self.length + 2 * reach, tokens)
        self.parts, self.part = int(part[-1]) + 1, part * self.clusters
        self.pieces = self.shares = self.beyond = v.new_empty(0)
        self.place, self.given = part, [self.beyond]

    def of_stretch(self, rows: slice, start: int, stop: int) -> Float[Tensor, "rows blocks m e"]:
        """The sums of the blocks of whole groups, to be read before the next call.

        Args:
            rows: Rows.
            start: The first block.
            stop: The one after the last.
        """
        values = self.v[rows]
        if start == 0:
            self.beyond = values.new_zeros(len(values), len(self.ranges), self.clusters, values.shape[-1])
            if self.parts > 1:
                sums = cluster_sums(values, self._cluster_of_part(rows), self.parts * self.clusters)
                _add_beside(self.beyond, sums.unflatten(1, (self.parts, self.clusters)), self.ranges)
        beyond = self.beyond[:, start // self.blocks : -(-stop // self.blocks)]
        shape = *beyond.shape[:2], self.outside.shape[1], *beyond.shape[2:]
        if self.pieces.shape != shape:
            self.pieces = values.new_empty(shape)
        first, last = start * self.size, start * self.size + shape[1] * self.length
        cluster = self.cluster[rows, first : last + 2 * self.reach].unfold(1, len(self.piece), self.length)
        self.place = in_one_matrix(cluster + self.piece, shape[2] * self.clusters)
        values = some_windows(values, first, last, self.length, self.reach).flatten(0, 2)
        self.pieces.zero_().flatten(0, 3).scatter_add_(0, self.place[:, None].expand_as(values), values)
        self.pieces[:, :, -1] = beyond
        sums = _product(self.outside, self.pieces.flatten(3))
        return sums.view(shape[0], -1, *shape[3:])[:, : stop - start, :-1]

    def add_gradient(
        self,
        whole: Float[Tensor, "b p e"],
        means: Float[Tensor, "rows blocks m e"],
        number: Float[Tensor, "rows blocks m"],
        rows: slice,
        start: int,
    ) -> None:
        """Add what the gradient of the sums gives to that of the values, in place.

        Args:
            whole: Gradient of the values, with as many tokens before and after as `cluster` has.
            means: Gradient of the means of the blocks of which `of_stretch` gave the sums last.
            number: Tokens that the means are of.
            rows: Rows.
            start: The first of the blocks.
        """
        blocks, width = means.shape[1], whole.shape[2]
        groups = -(-blocks // self.blocks)
        shape = len(means), groups * self.blocks, self.clusters, width
        if self.shares.shape != shape:
            self.shares = means.new_zeros(shape)
        torch.div(means, number[..., None], out=self.shares[:, :blocks, :-1])
        self.shares[:, blocks:].zero_()
        pieces = _product(self.outside.mT, self.shares.unflatten(1, (groups, self.blocks)).flatten(3))
        pieces = pieces.unflatten(3, (self.clusters, width))
        self.given = [*self.given, pieces[:, :, -1].clone()] if start else [pieces[:, :, -1].clone()]
        taken = pieces.flatten(0, 3).index_select(0, self.place).view(len(means), groups, -1, width)
        first = start * self.size
        add_windows(whole[rows, first : first + groups * self.length + 2 * self.reach], taken, self.length)
        if self.parts > 1 and (start + blocks) * self.size == self.v.shape[1]:
            # A part is outside of the spans of which it is not a part.
            lows, highs = zip(*self.ranges, strict=True)
            ranges = [(bisect_right(highs, part), bisect_right(lows, part)) for part in range(self.parts)]
            given = whole.new_zeros(len(means), self.parts, self.clusters, width)
            _add_beside(given, torch.cat(self.given, dim=1), ranges)
            taken = take_rows(given.flatten(1, 2), self._cluster_of_part(rows))
            whole[rows, self.reach : self.reach + self.v.shape[1]] += taken

    def _cluster_of_part(self, rows: slice) -> Int[Tensor, "rows t"]:
        return self.cluster[rows, self.reach : self.reach + self.v.shape[1]] + self.part


def _cut(begins: range, width: int, tokens: int) -> tuple[Int[Tensor, " tokens"], list[tuple[int, int]]]:
    """Cut tokens where windows begin and end.

    Returns:
        The part that each token is in, and for each window its first part and the one after its last.
    """
    edges = sorted({edge for first in begins for edge in (first, first + width) if 0 < edge < tokens})
    part = torch.bucketize(torch.arange(tokens), torch.tensor(edges, dtype=torch.long), right=True)

    def part_at(place: int) -> int:
        return len(edges) + 1 if place >= tokens else bisect_right(edges, place)

    return part, [(part_at(first), part_at(first + width)) for first in begins]


def _add_beside(
    sums: Float[Tensor, "rows ranges m e"], parts: Float[Tensor, "rows p m e"], ranges: Sequence[tuple[int, int]]
) -> None:
    """Add the parts before and after each range, of which neither end decreases."""
    steps, total, done = parts.unbind(1), torch.zeros_like(parts[:, 0]), 0
    for beside, (low, _) in zip(sums.unbind(1), ranges, strict=True):
        for step in steps[done:low]:
            total += step
        done = max(done, low)
        beside += total
    total, done = total.zero_(), len(steps)
    for beside, (_, high) in zip(reversed(sums.unbind(1)), reversed(ranges), strict=True):
        for step in reversed(steps[high:done]):
            total += step
        done = min(done, high)
        beside += total


def _product(matrix: Float[Tensor, "i j"], x: Float[Tensor, "rows groups j k"]) -> Float[Tensor, "rows groups i k"]:
    return torch.bmm(matrix.expand(x.shape[:2].numel(), -1, -1), x.flatten(0, 1)).unflatten(0, x.shape[:2])
