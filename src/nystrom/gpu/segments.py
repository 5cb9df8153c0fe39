"""The plan of segment means, computed from masks by one program per side of each sequence; see `nystrom.gpu.plan`.

A program goes over its mask twice: to count the real tokens, then to rank them. With c real tokens and u = min(c, m)
segments, the token of rank r is part of segment j = floor(r u / c), which begins at rank ceil(j c / u).
"""

import triton
import triton.language as tl

from nystrom.gpu.arithmetic import real_tokens


@triton.jit
def _count(keep, b, tokens, BLOCK: tl.constexpr):
    count = 0
    for first in range(0, tokens, BLOCK):
        count += tl.sum(real_tokens(keep, b, first + tl.arange(0, BLOCK), tokens).to(tl.int32), 0)
    return count


@triton.jit
def _segments(keep, group, starts, stops, b, tokens, count, first_row, M, BLOCK: tl.constexpr, BLOCK_M: tl.constexpr):
    used = tl.minimum(count, M)
    rows = tl.arange(0, BLOCK_M)
    row = b * 2 * M + first_row
    # A landmark without a token is an empty range.
    empty = (rows >= used) & (rows < M)
    tl.store(starts + row + rows, tl.full((BLOCK_M,), 0, tl.int32), mask=empty)
    tl.store(stops + row + rows, tl.full((BLOCK_M,), 0, tl.int32), mask=empty)
    # Products of ranks and counts may exceed 2^31.
    wide, parts, before = (count + tl.full((), 0, tl.int64)), tl.maximum(used, 1), 0
    for first in range(0, tokens, BLOCK):
        positions = first + tl.arange(0, BLOCK)
        live = real_tokens(keep, b, positions, tokens)
        rank = before + tl.cumsum(live.to(tl.int32), 0) - 1
        own = rank.to(tl.int64) * used // tl.maximum(count, 1)
        here = tl.where(live, own.to(tl.int32) + first_row, -1)
        tl.store(group + b * tokens + positions, here, mask=positions < tokens)
        begins = live & (rank == (own * wide + parts - 1) // parts)
        ends = live & (rank + 1 == ((own + 1) * wide + parts - 1) // parts)
        tl.store(starts + row + own, positions, mask=begins)
        tl.store(stops + row + own, positions + 1, mask=ends)
        before += tl.sum(live.to(tl.int32), 0)


@triton.jit
def segment_plan(
    query_keep,
    keep,
    starts,
    stops,
    query_group,
    key_group,
    few,
    real,
    N,
    S,
    M,
    BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Ranges and groups of one side of one sequence; the program of the queries also records which side is short."""
    b, keys = tl.program_id(0) // 2, tl.program_id(0) % 2 == 1
    if keys:
        _segments(keep, key_group, starts, stops, b, S, _count(keep, b, S, BLOCK), M, M, BLOCK, BLOCK_M)
    else:
        count, others = _count(query_keep, b, N, BLOCK), _count(keep, b, S, BLOCK)
        _segments(query_keep, query_group, starts, stops, b, N, count, 0, M, BLOCK, BLOCK_M)
        tl.store(few + b, tl.where(others <= M, 1, tl.where(count <= M, 2, 0)))
        tl.store(real + b, tl.minimum(others, M))
