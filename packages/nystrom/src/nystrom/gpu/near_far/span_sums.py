"""Sums over spans, stored separately and then added: statistics and gradients of clusters, gradients of heavy keys.

Also where a sequence begins.
"""

import triton
import triton.language as tl

from nystrom.gpu.arithmetic import load_matrix, load_tokens, product, store_matrix
from nystrom.gpu.near_far.window import clusters_of, ones_of, store_rows


@triton.jit
def near_far_totals(k, v, cluster, key_sums, value_sums, counts, SPAN, sizes, C: tl.constexpr):
    """Sums over a span of tokens, computed as products with a matrix of zeros and ones."""
    row_blocks = (sizes.M + C.BLOCK_M - 1) // C.BLOCK_M
    pid = tl.program_id(0)
    c, bh, split = pid % row_blocks * C.BLOCK_M, pid // row_blocks % sizes.BH, pid // row_blocks // sizes.BH
    b, h = bh // sizes.H, bh % sizes.H
    rows = c + tl.arange(0, C.BLOCK_M)
    of_keys, of_values = tl.full((C.BLOCK_M, C.BLOCK_D), 0, C.ACC), tl.full((C.BLOCK_M, C.BLOCK_E), 0, C.ACC)
    count = tl.full((C.BLOCK_M,), 0, C.ACC)
    for start in range(split * SPAN, tl.minimum(split * SPAN + SPAN, sizes.S), C.BLOCK_N):
        positions = start + tl.arange(0, C.BLOCK_N)
        own = clusters_of(cluster, bh, positions, positions < sizes.S, sizes.S, sizes.M)
        y = load_tokens(k, b, h, start, own < sizes.M, C.D, C.BLOCK_N, C.BLOCK_D)
        values = load_tokens(v, b, h, start, own < sizes.M, C.E, C.BLOCK_N, C.BLOCK_E)
        member = rows[:, None] == own[None, :]
        of_keys += product(ones_of(member, y.dtype), y, C.PRECISION)
        of_values += product(ones_of(member, y.dtype), values, C.PRECISION)
        count += tl.sum(member.to(C.ACC), 1)
    row = (split * sizes.BH + bh) * sizes.M + c
    store_matrix(key_sums, row, sizes.M - c, of_keys, C.D, C.BLOCK_M, C.BLOCK_D)
    store_matrix(value_sums, row, sizes.M - c, of_values, C.E, C.BLOCK_M, C.BLOCK_E)
    tl.store(counts + row + tl.arange(0, C.BLOCK_M), count, mask=rows < sizes.M)


@triton.jit
def _added(
    sums, first, rows, ROWS, SPANS, WIDTH: tl.constexpr, ACC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr
):
    total = tl.full((BLOCK_M, BLOCK), 0, ACC)
    for span in range(SPANS):
        total += load_matrix(sums, span * ROWS + first, rows, WIDTH, BLOCK_M, BLOCK)
    return total


@triton.jit
def near_far_joined(key_sums, value_sums, counts, keys, values, number, ROWS, SPANS, C: tl.constexpr):
    """Rows of clusters: keys are divided by the number of tokens, which is added up too if `counts` is given."""
    first, rows = tl.program_id(0) * C.BLOCK_M, tl.program_id(0) * C.BLOCK_M + tl.arange(0, C.BLOCK_M)
    there = rows < ROWS
    if counts is not None:
        count = tl.full((C.BLOCK_M,), 0, C.ACC)
        for span in range(SPANS):
            count += tl.load(counts + span * ROWS + rows, mask=there, other=0.0)
        tl.store(number + rows, count, mask=there)
    else:
        count = tl.load(number + rows, mask=there, other=0.0)
    total = _added(key_sums, first, ROWS - first, ROWS, SPANS, C.D, C.ACC, C.BLOCK_M, C.BLOCK_D)
    store_matrix(keys, first, ROWS - first, total / tl.maximum(count, 1.0)[:, None], C.D, C.BLOCK_M, C.BLOCK_D)
    total = _added(value_sums, first, ROWS - first, ROWS, SPANS, C.E, C.ACC, C.BLOCK_M, C.BLOCK_E)
    store_matrix(values, first, ROWS - first, total, C.E, C.BLOCK_M, C.BLOCK_E)


@triton.jit
def near_far_heavy(key_sums, value_sums, heavy, exists, k_grad, v_grad, SPANS, sizes, C: tl.constexpr):
    """Write the gradients of a block of heavy keys, and of their values, to their positions."""
    blocks = (sizes.G + C.BLOCK_M - 1) // C.BLOCK_M
    bh, g = tl.program_id(0) // blocks, tl.program_id(0) % blocks * C.BLOCK_M
    rows = g + tl.arange(0, C.BLOCK_M)
    positions = tl.load(heavy + bh * sizes.G + rows, mask=rows < sizes.G, other=0)
    there = tl.load(exists + bh * sizes.G + rows, mask=rows < sizes.G, other=0) != 0
    total = _added(key_sums, bh * sizes.G + g, sizes.G - g, sizes.BH * sizes.G, SPANS, C.D, C.ACC, C.BLOCK_M, C.BLOCK_D)
    store_rows(k_grad, bh // sizes.H, bh % sizes.H, positions, total, there, C.D, C.BLOCK_M, C.BLOCK_D)
    total = _added(
        value_sums, bh * sizes.G + g, sizes.G - g, sizes.BH * sizes.G, SPANS, C.E, C.ACC, C.BLOCK_M, C.BLOCK_E
    )
    store_rows(v_grad, bh // sizes.H, bh % sizes.H, positions, total, there, C.E, C.BLOCK_M, C.BLOCK_E)


@triton.jit
def near_far_first(keep, first, N, BLOCK: tl.constexpr):
    """The position of the first real token of a sequence; N if there is none."""
    b, result = tl.program_id(0), N
    for start in range(0, N, BLOCK):
        positions = start + tl.arange(0, BLOCK)
        live = tl.load(keep + b * tl.full((), N, tl.int64) + positions, mask=positions < N, other=0) != 0
        result = tl.minimum(result, tl.min(tl.where(live, positions, N), 0))
    tl.store(first + b, result)
