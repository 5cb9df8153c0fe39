"""Landmarks: the mean of the real tokens in each range of tokens, for queries and keys in one launch.

A program reads one range, once. Without masks, range j of m begins at token ceil(j c / m) of c, as in
`nystrom.landmarks`; with masks, a plan (`nystrom.gpu.plan`) holds the ranges, and padding tokens are left out.
"""

import triton
import triton.language as tl

from nystrom.gpu.arithmetic import load_tokens, real_tokens


@triton.jit
def _mean(
    x,
    keep,
    strides,
    out,
    reciprocal,
    row,
    b,
    h,
    start,
    stop,
    count,
    D: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    total, size = tl.full((BLOCK_N, BLOCK_D), 0, ACC), tl.full((BLOCK_N,), 0, ACC)
    for first in range(start, stop, BLOCK_N):
        positions = first + tl.arange(0, BLOCK_N)
        live = real_tokens(keep, b, positions, count) & (positions < stop)
        total += load_tokens(x, strides, b, h, first, live, D, BLOCK_N, BLOCK_D).to(ACC)
        size += live.to(ACC)
    share = 1.0 / tl.maximum(tl.sum(size, 0), 1.0)
    columns = tl.arange(0, BLOCK_D)
    tl.store(out + (row + tl.full((), 0, tl.int64)) * D + columns, tl.sum(total, 0) * share, mask=columns < D)
    tl.store(reciprocal + row, share)


@triton.jit
def means(
    q,
    k,
    query_keep,
    keep,
    starts,
    stops,
    of_keys,
    out,
    reciprocal,
    q_strides,
    k_strides,
    H,
    N,
    S,
    ROWS,
    M,
    D: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Landmark `row % ROWS` of sequence and head `row // ROWS`, and the reciprocal of its number of tokens."""
    row = tl.program_id(0)
    j, bh = row % ROWS, row // ROWS
    b, h = bh // H, bh % H
    if starts is not None:
        start, stop = tl.load(starts + b * ROWS + j), tl.load(stops + b * ROWS + j)
        key = j >= M
        if of_keys is not None:
            key = tl.load(of_keys + b * ROWS + j) != 0
    else:
        key = j >= M
        i, count = (j % M).to(tl.int64), tl.where(key, S, N).to(tl.int64)
        start, stop = ((i * count + M - 1) // M).to(tl.int32), (((i + 1) * count + M - 1) // M).to(tl.int32)
    if key:
        _mean(k, keep, k_strides, out, reciprocal, row, b, h, start, stop, S, D, ACC, BLOCK_N, BLOCK_D)
    else:
        _mean(q, query_keep, q_strides, out, reciprocal, row, b, h, start, stop, N, D, ACC, BLOCK_N, BLOCK_D)
