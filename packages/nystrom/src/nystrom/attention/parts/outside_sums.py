r"""Sums of the values of each cluster over the tokens outside a block's window, for all blocks.

Let $w_l$ be the window of block l: its B tokens and `reach` more on either side. Let $V$ be the sums of the values of
each cluster over some tokens. Then
$$\mathrm{sums}_l = \sum_{i < l} V(\text{first } B \text{ of } w_i) + \sum_{i > l} V(\text{last } B \text{ of } w_i):$$
the first B tokens of the earlier windows are exactly the tokens before $w_l$, and the last B tokens of the later
windows are those after it. Nothing is added that would have to be subtracted again: in floating point, a large value
would take the digits of all others with it. The gradient has the same form: sums over the blocks before and after a
token's own.
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
    """Compute the sums from the values in the windows, zeros outside the sequence, and the cluster of each."""
    first, last = (cluster_sums(near[:, :, some], inside[:, :, some], m) for some in (slice(size), slice(-size, None)))
    before = F.pad(first, (0, 0, 0, 0, 1, -1)).cumsum(dim=1)
    after = F.pad(last, (0, 0, 0, 0, -1, 1)).flip(1).cumsum(dim=1).flip(1)
    return before + after


class OutsideSums:
    """The sums and their gradient, for a stretch of blocks at a time, in the same memory.

    Blocks form groups. The windows of a group cover a span of tokens, which is cut into pieces such that each window
    consists of whole pieces. The sums of the blocks are a matrix product: a matrix of zeros and ones, which marks the
    pieces outside each window, times the sums over the pieces and over all tokens outside the span. The latter are to
    spans what the sums are to windows; running sums give them, once per slice of rows. The gradient is the transpose of
    these operations.
    """

    def __init__(self, v: Tensor, cluster: Tensor, m: int, *, size: int, reach: int, blocks: int):
        """Cut tokens and spans.

        Args:
            v: Values (b, t, e) of a whole number of blocks of `size` tokens.
            cluster: The cluster of each value; m for none.
            reach: Tokens on either side of its block that a query sees.
            blocks: Blocks of a group; the last one may have fewer.
        """
        self.v, self.size, self.reach, self.blocks, self.length = v, size, reach, blocks, blocks * size
        # An extra cluster takes the tokens without one.
        self.clusters, tokens = m + 1, v.shape[1]
        self.padding = -tokens % self.length
        self.cluster = F.pad(cluster, (reach, reach + self.padding), value=m)
        piece, ranges = _cut(range(0, self.length, size), size + 2 * reach, self.length + 2 * reach, v.device)
        number, ends = (torch.arange(ranges[-1][1] + 1, device=v.device), torch.tensor(ranges, device=v.device))
        low, high = ends.T[..., None]
        # The last column stands for everything outside the span.
        self.outside, self.piece = ((number < low) | (number >= high)).to(v.dtype), piece * self.clusters
        part, self.ranges = _cut(range(-reach, tokens - reach, self.length), self.length + 2 * reach, tokens, v.device)
        # The last span ends behind the last part.
        self.parts, self.part = self.ranges[-1][1], part * self.clusters
        self.pieces = self.shares = self.beyond = v.new_empty(0)
        self.place, self.given = part, [self.beyond]

    def of_stretch(self, rows: slice, start: int, stop: int) -> Float[Tensor, "rows blocks m e"]:
        """The sums for blocks `start` to `stop`, whole groups; read them before the next call overwrites them."""
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
        """Add the contribution of the sums to the gradient of the values, in place.

        Args:
            whole: Gradient of the values, with as many tokens before and after as `cluster` has.
            means: Gradient of the mean values, for the blocks of the last call of `of_stretch`.
            number: How many tokens each mean is taken over.
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
            # The spans that a part lies outside of.
            lows, highs = zip(*self.ranges, strict=True)
            ranges = [(bisect_right(highs, part), bisect_right(lows, part)) for part in range(self.parts)]
            given = whole.new_zeros(len(means), self.parts, self.clusters, width)
            _add_beside(given, torch.cat(self.given, dim=1), ranges)
            taken = take_rows(given.flatten(1, 2), self._cluster_of_part(rows))
            whole[rows, self.reach : self.reach + self.v.shape[1]] += taken

    def _cluster_of_part(self, rows: slice) -> Int[Tensor, "rows t"]:
        return self.cluster[rows, self.reach : self.reach + self.v.shape[1]] + self.part


def _cut(
    begins: range, width: int, tokens: int, device: torch.device
) -> tuple[Int[Tensor, " tokens"], list[tuple[int, int]]]:
    """The part of each token, cut where windows begin and end; each window's first part, and that after its last."""
    edges = sorted({edge for first in begins for edge in (first, first + width) if 0 < edge < tokens})
    borders = torch.tensor(edges, dtype=torch.long, device=device)
    part = torch.bucketize(torch.arange(tokens, device=device), borders, right=True)

    def part_at(place: int) -> int:
        return len(edges) + 1 if place >= tokens else bisect_right(edges, place)

    return part, [(part_at(first), part_at(first + width)) for first in begins]


def _add_beside(
    sums: Float[Tensor, "rows ranges m e"], parts: Float[Tensor, "rows p m e"], ranges: Sequence[tuple[int, int]]
) -> None:
    """Add to each range the parts before and after it; the ends of the ranges must not decrease."""
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
