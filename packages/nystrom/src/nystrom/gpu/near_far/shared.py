# Pyright does not know the fields of `C`.
# pyright: reportAttributeAccessIssue=false
r"""Gradients of the keys that all queries of a head see: the heavy keys and the clusters.

A program holds a tile of these keys and loops over a span of the queries; the results of spans are stored separately
and then added.

A query gives such a key $y$ the weight $r e^{c\, q^\top y - \ln Z}$, where r is the number of its tokens that are far
from the query's block (1 for a heavy key). The gradient of their mean value is divided equally among the r tokens. Each
share is the sum of $e^{c\, q^\top y - \ln Z} G$ over the queries of all blocks. From this,
`nystrom.gpu.near_far.keys` subtracts, for each token, the queries of the blocks whose window holds it.
"""

import triton
import triton.language as tl

from nystrom.gpu.arithmetic import (
    load_matrix,
    load_normaliser,
    load_tokens,
    log_weights,
    product,
    rounded,
    store_matrix,
    weights_again,
)
from nystrom.gpu.near_far.window import begin_of, heavy_rows, outside_window


@triton.jit
def near_far_shared(
    q, grad, v, cluster, first, heavy, keys, values, number, logs, deltas, key_sums, value_sums, SPAN, sizes,
    C: tl.constexpr
):  # fmt: skip
    """Sums over a span of queries for M shared keys: tokens of `keys` and `values` at the positions `heavy`, or, where
    that is None, clusters; with `NEAR`, without the tokens of windows.
    """
    row_blocks, parts = (sizes.M + C.BLOCK_M - 1) // C.BLOCK_M, (sizes.SIZE + C.BLOCK_N - 1) // C.BLOCK_N
    pid = tl.program_id(0)
    c, bh, split = pid % row_blocks * C.BLOCK_M, pid // row_blocks % sizes.BH, pid // row_blocks // sizes.BH
    b, h = bh // sizes.H, bh % sizes.H
    rows, begin, length = c + tl.arange(0, C.BLOCK_M), begin_of(first, b), sizes.SIZE + 2 * sizes.REACH
    if heavy is not None:
        y = heavy_rows(keys, heavy, bh, b, h, c, sizes.M, C.D, C.BLOCK_M, C.BLOCK_D)
        whole = heavy_rows(values, heavy, bh, b, h, c, sizes.M, C.E, C.BLOCK_M, C.BLOCK_E).to(C.ACC)
    else:
        y = rounded(
            load_matrix(keys.at, bh * sizes.M + c, sizes.M - c, C.D, C.BLOCK_M, C.BLOCK_D), q.at.dtype.element_ty
        )
        whole = load_matrix(values.at, bh * sizes.M + c, sizes.M - c, C.E, C.BLOCK_M, C.BLOCK_E)
    all_of_them = tl.load(number + bh * sizes.M + rows, mask=rows < sizes.M, other=0).to(C.ACC)
    of_keys, of_values = tl.full((C.BLOCK_M, C.BLOCK_D), 0, C.ACC), tl.full((C.BLOCK_M, C.BLOCK_E), 0, C.ACC)
    for tile in range(split * SPAN, tl.minimum(split * SPAN + SPAN, sizes.BLOCKS * parts)):
        start, inside = begin + tile // parts * sizes.SIZE, tile % parts * C.BLOCK_N + tl.arange(0, C.BLOCK_N)
        positions, here = start + inside, start + tile % parts * C.BLOCK_N
        live = (inside < sizes.SIZE) & (positions < sizes.N)
        x = load_tokens(q, b, h, here, live, C.D, C.BLOCK_N, C.BLOCK_D)
        grads = load_tokens(grad, b, h, here, live, C.E, C.BLOCK_N, C.BLOCK_E).to(C.LOW)
        place = bh * tl.full((), sizes.N, tl.int64) + positions
        top, log = load_normaliser(logs, place, live)
        delta = tl.load(deltas + place, mask=live, other=0.0)
        total, far = whole, all_of_them
        if C.NEAR:
            total, far = outside_window(
                total, far, rows, v, cluster, b, h, bh, start - sizes.REACH, length, sizes.S, sizes.M, C
            )
        mean = rounded(total / tl.maximum(far, 1.0)[:, None], C.LOW)
        counts = (far > 0.0)[:, None] & live[None, :]
        s = tl.where(counts, log_weights(y, x, C), float("-inf"))
        p = weights_again(s, top[None, :], log[None, :])
        of_weights = product(mean, tl.trans(grads), C.LOW_PRECISION)
        of_scores = p * far[:, None] * (of_weights - delta[None, :])
        of_values += product(rounded(p, C.LOW), grads, C.LOW_PRECISION)
        of_keys += product(rounded(of_scores, C.LOW), x.to(C.LOW), C.LOW_PRECISION)
    row = (split * sizes.BH + bh) * sizes.M + c
    store_matrix(key_sums, row, sizes.M - c, of_keys * C.SCALE, C.D, C.BLOCK_M, C.BLOCK_D)
    store_matrix(value_sums, row, sizes.M - c, of_values, C.E, C.BLOCK_M, C.BLOCK_E)
