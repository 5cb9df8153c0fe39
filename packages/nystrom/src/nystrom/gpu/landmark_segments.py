"""The plan of landmarks, computed from masks and draws; see `nystrom.gpu.landmark_plan`.

A program counts the real tokens of a sequence, and those before its own part of them; these it ranks. With c real
tokens and u segments, the token of rank r is part of segment j = floor(r u / c), which begins at rank ceil(j c / u).
Plain form: `nystrom.landmarks.segments` and, for drawn tokens, `uniform_positions`.
"""

import triton
import triton.language as tl

from nystrom.gpu.arithmetic import real_tokens
from nystrom.landmarks import GOLDEN_RATIO

_GOLDEN = tl.constexpr(GOLDEN_RATIO)


@triton.jit
def _count(keep, b, stop, tokens, BLOCK: tl.constexpr):
    """Real tokens before `stop`."""
    count = tl.minimum(stop, tokens)
    if keep is not None:
        count = 0
        for first in range(0, tl.minimum(stop, tokens), BLOCK):
            count += tl.sum(real_tokens(keep, b, first + tl.arange(0, BLOCK), tokens).to(tl.int32), 0)
    return count


@triton.jit
def _segments(
    keep, group, starts, stops, draws, b, start, tokens, count, used, first_row, ROWS, DRAWN: tl.constexpr,
    BLOCK: tl.constexpr
):  # fmt: skip
    """Ranges, and groups, of a part of the tokens: segments whole, or a token drawn from each if DRAWN."""
    row = b * ROWS + first_row
    # Products of ranks and counts may exceed 2^31.
    wide, parts, before = (count + tl.full((), 0, tl.int64)), tl.maximum(used, 1), _count(keep, b, start, tokens, BLOCK)
    positions = start + tl.arange(0, BLOCK)
    live = real_tokens(keep, b, positions, tokens)
    rank = before + tl.cumsum(live.to(tl.int32), 0) - 1
    own = rank.to(tl.int64) * used // tl.maximum(count, 1)
    # None where no segment is used.
    live &= own < used
    begin, end = (own * wide + parts - 1) // parts, ((own + 1) * wide + parts - 1) // parts
    if DRAWN:
        which = first_row + own
        if draws is None:
            far = (which + 1).to(tl.float64) * _GOLDEN
            draw = (far - tl.floor(far)).to(tl.float32)
        else:
            draw = tl.load(draws + which, mask=live, other=0.0)
        length = end - begin
        begin += tl.minimum((draw * length.to(tl.float32)).to(tl.int64), length - 1)
        live &= rank == begin
        end = begin + 1
    if group is not None:
        here = tl.where(live, own.to(tl.int32) + first_row, -1)
        tl.store(group + b * tokens + positions, here, mask=positions < tokens)
    tl.store(starts + row + own, positions, mask=live & (rank == begin))
    tl.store(stops + row + own, positions + 1, mask=live & (rank + 1 == end))


@triton.jit
def _empty(starts, stops, b, first, stop, ROWS, BLOCK_M: tl.constexpr):
    """Landmarks without a token are empty ranges."""
    rows = first + tl.arange(0, BLOCK_M)
    tl.store(starts + b * ROWS + rows, tl.full((BLOCK_M,), 0, tl.int32), mask=rows < stop)
    tl.store(stops + b * ROWS + rows, tl.full((BLOCK_M,), 0, tl.int32), mask=rows < stop)


@triton.jit
def plan(
    query_keep, keep, draws, starts, stops, of_keys, query_group, key_group, few, real, N, S, M, CHUNKS,
    DRAWN: tl.constexpr, BLOCK: tl.constexpr, BLOCK_M: tl.constexpr
):  # fmt: skip
    """A part of one side of one sequence; the first part of the queries also records which side is short."""
    part, side = tl.program_id(0) % CHUNKS, tl.program_id(0) // CHUNKS
    b, start, of_side = side // 2, part * BLOCK, side % 2
    count, others = _count(query_keep, b, N, N, BLOCK), _count(keep, b, S, S, BLOCK)
    kind = tl.where(others <= M, 1, tl.where(count <= M, 2, 0))
    if DRAWN:
        # Half of the landmarks are queries; or all of them are, or none, where these are few.
        rows, queries = M, tl.where(kind == 1, 0, tl.where(kind == 2, M, M // 2))
    else:
        rows, queries = 2 * M, M
    if of_side == 0:
        used = tl.minimum(count, queries)
        _segments(query_keep, query_group, starts, stops, draws, b, start, N, count, used, 0, rows, DRAWN, BLOCK)
        if part == 0:
            _empty(starts, stops, b, used, queries, rows, BLOCK_M)
            tl.store(few + b, kind)
            tl.store(real + b, tl.minimum(others, M))
            if DRAWN:
                row = tl.arange(0, BLOCK_M)
                tl.store(of_keys + b * M + row, (row >= queries).to(tl.int32), mask=row < M)
    else:
        used = tl.minimum(others, rows - queries)
        _segments(keep, key_group, starts, stops, draws, b, start, S, others, used, queries, rows, DRAWN, BLOCK)
        if part == 0:
            _empty(starts, stops, b, queries + used, rows, rows, BLOCK_M)
