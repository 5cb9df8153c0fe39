# Pyright does not know the fields of `C`.
# pyright: reportAttributeAccessIssue=false
"""Sums of the keys and of the values of each cluster, and how many tokens it has.

A program holds a tile of clusters and loops over a span of the tokens; the sums of spans are stored separately and then
added.
"""

import triton
import triton.language as tl

from nystrom.gpu.arithmetic import load_tokens, product, store_matrix
from nystrom.gpu.near_far.window import clusters_of, ones_of


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
