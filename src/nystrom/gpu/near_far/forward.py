r"""Outputs of a block of queries: one softmax over the tokens of its window, the heavy keys and the clusters.

A program holds a tile of the queries of one block. The tokens of the window are not copied: the sums of their values by
cluster are the product of a matrix of zeros and ones with the values.
"""

import triton
import triton.language as tl

from nystrom.gpu.arithmetic import load_matrix, load_tokens, product, rounded, store_normaliser
from nystrom.gpu.near_far.window import (
    begin_of,
    far_values,
    logarithm,
    scores_with_bias,
    store_rows,
    window_clusters,
)


@triton.jit
def _attend(s, values, top, total, total_v, LOW: tl.constexpr, LOW_PRECISION: tl.constexpr):
    """Add keys to a running softmax."""
    higher = tl.maximum(top, tl.max(s, 1))
    # Before the first key that counts, the maximum is -inf, and -inf - -inf would be NaN.
    base = tl.where(higher == float("-inf"), 0.0, higher)
    shrink, p = tl.exp(top - base), tl.exp(s - base[:, None])
    total = total * shrink + tl.sum(p, 1)
    total_v = total_v * shrink[:, None] + product(rounded(p, LOW), values, LOW_PRECISION)
    return higher, total, total_v


@triton.jit
def near_far_forward(
    q,
    k,
    v,
    heavy_k,
    heavy_v,
    found,
    cluster,
    first,
    means,
    sums,
    count,
    out,
    logs,
    left,
    q_strides,
    k_strides,
    v_strides,
    out_strides,
    H,
    N,
    S,
    G,
    M,
    SIZE,
    REACH,
    BLOCKS,
    NEAR: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    SCALE: tl.constexpr,
    ACC: tl.constexpr,
    LOW: tl.constexpr,
    PRECISION: tl.constexpr,
    LOW_PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Outputs, normalisers, and how many far tokens each cluster has for each block."""
    parts = (SIZE + BLOCK_N - 1) // BLOCK_N
    pid = tl.program_id(0)
    part, block, bh = pid % parts, pid // parts % BLOCKS, pid // parts // BLOCKS
    b, h = bh // H, bh % H
    start = begin_of(first, b) + block * SIZE
    window, length = start - REACH, SIZE + 2 * REACH
    inside = part * BLOCK_N + tl.arange(0, BLOCK_N)
    positions = start + inside
    live = (inside < SIZE) & (positions < N)
    x = load_tokens(q, q_strides, b, h, start + part * BLOCK_N, live, D, BLOCK_N, BLOCK_D)
    total_v = tl.full((BLOCK_N, BLOCK_E), 0, ACC)
    top, total = tl.full((BLOCK_N,), float("-inf"), ACC), tl.full((BLOCK_N,), 0, ACC)
    if NEAR:
        for w in range(0, length, BLOCK_W):
            seen = window_clusters(cluster, bh, window, w, length, S, M, BLOCK_W) < M
            y = load_tokens(k, k_strides, b, h, window + w, seen, D, BLOCK_W, BLOCK_D)
            values = load_tokens(v, v_strides, b, h, window + w, seen, E, BLOCK_W, BLOCK_E).to(LOW)
            s = scores_with_bias(x, y, tl.where(seen, 0.0, float("-inf")), SCALE, ACC, PRECISION)
            top, total, total_v = _attend(s, values, top, total, total_v, LOW, LOW_PRECISION)
    rows = tl.arange(0, BLOCK_M)
    for g in range(0, G, BLOCK_M):
        y = load_matrix(heavy_k, bh * G + g, G - g, D, BLOCK_M, BLOCK_D)
        values = load_matrix(heavy_v, bh * G + g, G - g, E, BLOCK_M, BLOCK_E).to(LOW)
        number = tl.load(found + bh * G + g + rows, mask=g + rows < G, other=0.0)
        s = scores_with_bias(x, y, logarithm(number), SCALE, ACC, PRECISION)
        top, total, total_v = _attend(s, values, top, total, total_v, LOW, LOW_PRECISION)
    for c in range(0, M, BLOCK_M):
        y = rounded(load_matrix(means, bh * M + c, M - c, D, BLOCK_M, BLOCK_D), q.dtype.element_ty)
        values, number = far_values(
            sums, count, c, v, v_strides, cluster, b, h, bh, window, length, S, M, NEAR, E, LOW, LOW_PRECISION,
            BLOCK_W, BLOCK_M, BLOCK_E,
        )  # fmt: skip
        if NEAR:
            place = left + (bh * tl.full((), BLOCKS, tl.int64) + block) * M + c + rows
            tl.store(place, number, mask=(c + rows < M) & (part == 0))
        s = scores_with_bias(x, y, logarithm(number), SCALE, ACC, PRECISION)
        top, total, total_v = _attend(s, values, top, total, total_v, LOW, LOW_PRECISION)
    sums_to = tl.where(total == 0.0, 1.0, total)
    # Places after the last block stand for the tokens before the first real one, which get zeros.
    turned = tl.where(positions >= BLOCKS * SIZE, positions - BLOCKS * SIZE, positions)
    there = (inside < SIZE) & (turned < N)
    total_v = tl.where(live[:, None], total_v / sums_to[:, None], 0.0)
    store_rows(out, out_strides, b, h, turned, total_v, there, E, BLOCK_N, BLOCK_E)
    total = tl.where(live, total, 0.0)
    store_normaliser(logs, bh * tl.full((), N, tl.int64) + turned, top, total, there)
