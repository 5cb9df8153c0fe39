r"""Gradients of the queries; see `nystrom.gpu.near_far.forward`.

With the weights $P$ of a query, recomputed from its normaliser, and the gradient $G$ of its output $O$, the gradient of
its scores is $P \circ (G V^\top - \delta)$, where $\delta = \mathrm{rowsum}(G \circ O)$.
"""

import triton
import triton.language as tl

from nystrom.gpu.arithmetic import load_matrix, load_normaliser, load_tokens, product, rounded, weights_again
from nystrom.gpu.near_far.window import (
    begin_of,
    far_values,
    logarithm,
    scores_with_bias,
    store_rows,
    window_clusters,
)


@triton.jit
def _gradient(s, top, log, delta, grads, y, values, LOW: tl.constexpr, LOW_PRECISION: tl.constexpr):
    """The contribution of some keys to the gradient of the queries, without the factor on the scores."""
    of_weights = product(grads, tl.trans(values), LOW_PRECISION)
    of_scores = weights_again(s, top[:, None], log[:, None]) * (of_weights - delta[:, None])
    return product(rounded(of_scores, LOW), y.to(LOW), LOW_PRECISION)


@triton.jit
def near_far_queries(
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
    grad,
    q_grad,
    deltas,
    q_strides,
    k_strides,
    v_strides,
    out_strides,
    grad_strides,
    q_grad_strides,
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
    """Gradients of the queries, and their deltas, which the kernels for keys and values read."""
    parts = (SIZE + BLOCK_N - 1) // BLOCK_N
    pid = tl.program_id(0)
    part, block, bh = pid % parts, pid // parts % BLOCKS, pid // parts // BLOCKS
    b, h = bh // H, bh % H
    start = begin_of(first, b) + block * SIZE
    window, length = start - REACH, SIZE + 2 * REACH
    inside = part * BLOCK_N + tl.arange(0, BLOCK_N)
    positions, here = start + inside, start + part * BLOCK_N
    live = (inside < SIZE) & (positions < N)
    x = load_tokens(q, q_strides, b, h, here, live, D, BLOCK_N, BLOCK_D)
    grads = load_tokens(grad, grad_strides, b, h, here, live, E, BLOCK_N, BLOCK_E)
    result = load_tokens(out, out_strides, b, h, here, live, E, BLOCK_N, BLOCK_E)
    delta = tl.sum(grads.to(ACC) * result.to(ACC), 1)
    top, log = load_normaliser(logs, bh * tl.full((), N, tl.int64) + positions, live)
    grads = grads.to(LOW)
    total = tl.full((BLOCK_N, BLOCK_D), 0, ACC)
    if NEAR:
        for w in range(0, length, BLOCK_W):
            seen = window_clusters(cluster, bh, window, w, length, S, M, BLOCK_W) < M
            y = load_tokens(k, k_strides, b, h, window + w, seen, D, BLOCK_W, BLOCK_D)
            values = load_tokens(v, v_strides, b, h, window + w, seen, E, BLOCK_W, BLOCK_E).to(LOW)
            s = scores_with_bias(x, y, tl.where(seen, 0.0, float("-inf")), SCALE, ACC, PRECISION)
            total += _gradient(s, top, log, delta, grads, y, values, LOW, LOW_PRECISION)
    rows = tl.arange(0, BLOCK_M)
    for g in range(0, G, BLOCK_M):
        y = load_matrix(heavy_k, bh * G + g, G - g, D, BLOCK_M, BLOCK_D)
        values = load_matrix(heavy_v, bh * G + g, G - g, E, BLOCK_M, BLOCK_E).to(LOW)
        number = tl.load(found + bh * G + g + rows, mask=g + rows < G, other=0.0)
        s = scores_with_bias(x, y, logarithm(number), SCALE, ACC, PRECISION)
        total += _gradient(s, top, log, delta, grads, y, values, LOW, LOW_PRECISION)
    for c in range(0, M, BLOCK_M):
        y = rounded(load_matrix(means, bh * M + c, M - c, D, BLOCK_M, BLOCK_D), q.dtype.element_ty)
        values, number = far_values(
            sums, count, c, v, v_strides, cluster, b, h, bh, window, length, S, M, NEAR, E, LOW, LOW_PRECISION,
            BLOCK_W, BLOCK_M, BLOCK_E,
        )  # fmt: skip
        s = scores_with_bias(x, y, logarithm(number), SCALE, ACC, PRECISION)
        total += _gradient(s, top, log, delta, grads, y, values, LOW, LOW_PRECISION)
    # Places after the last block stand for the tokens before the first real one, which get zeros.
    turned = tl.where(positions >= BLOCKS * SIZE, positions - BLOCKS * SIZE, positions)
    there = (inside < SIZE) & (turned < N)
    total = tl.where(live[:, None], total * SCALE, 0.0)
    store_rows(q_grad, q_grad_strides, b, h, turned, total, there, D, BLOCK_N, BLOCK_D)
    tl.store(deltas + bh * tl.full((), N, tl.int64) + turned, tl.where(live, delta, 0.0), mask=there)
