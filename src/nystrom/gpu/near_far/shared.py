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
from nystrom.gpu.near_far.window import begin_of, outside_window


@triton.jit
def near_far_shared(
    q,
    grad,
    v,
    cluster,
    first,
    keys,
    values,
    number,
    logs,
    deltas,
    key_sums,
    value_sums,
    q_strides,
    grad_strides,
    v_strides,
    H,
    BH,
    N,
    S,
    M,
    SIZE,
    REACH,
    BLOCKS,
    SPAN,
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
    """Sums over a span of queries for M shared keys; with `NEAR`, keys are clusters, without the tokens of windows."""
    row_blocks, parts = (M + BLOCK_M - 1) // BLOCK_M, (SIZE + BLOCK_N - 1) // BLOCK_N
    pid = tl.program_id(0)
    c, bh, split = pid % row_blocks * BLOCK_M, pid // row_blocks % BH, pid // row_blocks // BH
    b, h = bh // H, bh % H
    rows, begin, length = c + tl.arange(0, BLOCK_M), begin_of(first, b), SIZE + 2 * REACH
    y = rounded(load_matrix(keys, bh * M + c, M - c, D, BLOCK_M, BLOCK_D), q.dtype.element_ty)
    whole = load_matrix(values, bh * M + c, M - c, E, BLOCK_M, BLOCK_E).to(ACC)
    all_of_them = tl.load(number + bh * M + rows, mask=rows < M, other=0.0)
    of_keys, of_values = tl.full((BLOCK_M, BLOCK_D), 0, ACC), tl.full((BLOCK_M, BLOCK_E), 0, ACC)
    for tile in range(split * SPAN, tl.minimum(split * SPAN + SPAN, BLOCKS * parts)):
        start, inside = begin + tile // parts * SIZE, tile % parts * BLOCK_N + tl.arange(0, BLOCK_N)
        positions, here = start + inside, start + tile % parts * BLOCK_N
        live = (inside < SIZE) & (positions < N)
        x = load_tokens(q, q_strides, b, h, here, live, D, BLOCK_N, BLOCK_D)
        grads = load_tokens(grad, grad_strides, b, h, here, live, E, BLOCK_N, BLOCK_E).to(LOW)
        place = bh * tl.full((), N, tl.int64) + positions
        top, log = load_normaliser(logs, place, live)
        delta = tl.load(deltas + place, mask=live, other=0.0)
        total, far = whole, all_of_them
        if NEAR:
            total, far = outside_window(
                total, far, rows, v, v_strides, cluster, b, h, bh, start - REACH, length, S, M, E, LOW, LOW_PRECISION,
                BLOCK_W, BLOCK_E,
            )  # fmt: skip
        mean = rounded(total / tl.maximum(far, 1.0)[:, None], LOW)
        counts = (far > 0.0)[:, None] & live[None, :]
        s = tl.where(counts, log_weights(y, x, SCALE, False, ACC, PRECISION), float("-inf"))
        p = weights_again(s, top[None, :], log[None, :])
        of_weights = product(mean, tl.trans(grads), LOW_PRECISION)
        of_scores = p * far[:, None] * (of_weights - delta[None, :])
        of_values += product(rounded(p, LOW), grads, LOW_PRECISION)
        of_keys += product(rounded(of_scores, LOW), x.to(LOW), LOW_PRECISION)
    row = (split * BH + bh) * M + c
    store_matrix(key_sums, row, M - c, of_keys * SCALE, D, BLOCK_M, BLOCK_D)
    store_matrix(value_sums, row, M - c, of_values, E, BLOCK_M, BLOCK_E)
