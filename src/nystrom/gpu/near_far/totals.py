"""Sums of the keys and of the values of each cluster, and how many tokens it has.

A program holds a tile of clusters and loops over a span of the tokens; the sums of spans are stored separately and then
added.
"""

import triton
import triton.language as tl

from nystrom.gpu.arithmetic import load_tokens, product, store_matrix
from nystrom.gpu.near_far.window import clusters_of, ones_of


@triton.jit
def near_far_totals(
    k,
    v,
    cluster,
    key_sums,
    value_sums,
    counts,
    k_strides,
    v_strides,
    H,
    BH,
    S,
    M,
    SPAN,
    D: tl.constexpr,
    E: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Sums over a span of tokens, computed as products with a matrix of zeros and ones."""
    row_blocks = (M + BLOCK_M - 1) // BLOCK_M
    pid = tl.program_id(0)
    c, bh, split = pid % row_blocks * BLOCK_M, pid // row_blocks % BH, pid // row_blocks // BH
    b, h = bh // H, bh % H
    rows = c + tl.arange(0, BLOCK_M)
    of_keys, of_values = tl.full((BLOCK_M, BLOCK_D), 0, ACC), tl.full((BLOCK_M, BLOCK_E), 0, ACC)
    count = tl.full((BLOCK_M,), 0, ACC)
    for start in range(split * SPAN, tl.minimum(split * SPAN + SPAN, S), BLOCK_N):
        positions = start + tl.arange(0, BLOCK_N)
        own = clusters_of(cluster, bh, positions, positions < S, S, M)
        y = load_tokens(k, k_strides, b, h, start, own < M, D, BLOCK_N, BLOCK_D)
        values = load_tokens(v, v_strides, b, h, start, own < M, E, BLOCK_N, BLOCK_E)
        member = rows[:, None] == own[None, :]
        of_keys += product(ones_of(member, y.dtype), y, PRECISION)
        of_values += product(ones_of(member, y.dtype), values, PRECISION)
        count += tl.sum(member.to(ACC), 1)
    row = (split * BH + bh) * M + c
    store_matrix(key_sums, row, M - c, of_keys, D, BLOCK_M, BLOCK_D)
    store_matrix(value_sums, row, M - c, of_values, E, BLOCK_M, BLOCK_E)
    tl.store(counts + row + tl.arange(0, BLOCK_M), count, mask=rows < M)
