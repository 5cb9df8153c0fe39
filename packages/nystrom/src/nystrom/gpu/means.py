"""Landmarks: the mean of the real tokens in each range of tokens, for queries and keys in one launch.

A program reads one range, once. Without masks, range j of m begins at token ceil(j c / m) of c, as in
`nystrom.landmarks`; with masks, a plan (`nystrom.gpu.landmark_plan`) holds the ranges, and padding tokens are left out.
Plain form: `nystrom.reference.segment_means`.
"""

import triton
import triton.language as tl

from nystrom.gpu.arithmetic import load_tokens, real_tokens


@triton.jit
def _mean(x, keep, out, reciprocal, row, b, h, start, stop, count, C: tl.constexpr):
    total, size = tl.full((C.BLOCK_N, C.BLOCK_D), 0, C.ACC), tl.full((C.BLOCK_N,), 0, C.ACC)
    for first in range(start, stop, C.BLOCK_N):
        positions = first + tl.arange(0, C.BLOCK_N)
        live = real_tokens(keep, b, positions, count) & (positions < stop)
        total += load_tokens(x, b, h, first, live, C.D, C.BLOCK_N, C.BLOCK_D).to(C.ACC)
        size += live.to(C.ACC)
    share = 1.0 / tl.maximum(tl.sum(size, 0), 1.0)
    columns = tl.arange(0, C.BLOCK_D)
    tl.store(out + (row + tl.full((), 0, tl.int64)) * C.D + columns, tl.sum(total, 0) * share, mask=columns < C.D)
    tl.store(reciprocal + row, share)


@triton.jit
def means(q, k, query_keep, keep, starts, stops, of_keys, out, reciprocal, sizes, C: tl.constexpr):
    """Landmark `row % ROWS` of sequence and head `row // ROWS`, and the reciprocal of its number of tokens."""
    row = tl.program_id(0)
    j, bh = row % sizes.ROWS, row // sizes.ROWS
    b, h = bh // sizes.H, bh % sizes.H
    if starts is not None:
        start, stop = tl.load(starts + b * sizes.ROWS + j), tl.load(stops + b * sizes.ROWS + j)
        key = j >= sizes.M
        if of_keys is not None:
            key = tl.load(of_keys + b * sizes.ROWS + j) != 0
    else:
        key = j >= sizes.M
        i, count = (j % sizes.M).to(tl.int64), tl.where(key, sizes.S, sizes.N).to(tl.int64)
        start, stop = (
            ((i * count + sizes.M - 1) // sizes.M).to(tl.int32),
            (((i + 1) * count + sizes.M - 1) // sizes.M).to(tl.int32),
        )
    if key:
        _mean(k, keep, out, reciprocal, row, b, h, start, stop, sizes.S, C)
    else:
        _mean(q, query_keep, out, reciprocal, row, b, h, start, stop, sizes.N, C)
