r"""Outputs of a block of queries: one softmax over the tokens of its window, the heavy keys and the clusters; and the
gradients of the queries.

A program holds a tile of the queries of one block. The tokens of the window are not copied: the sums of their values by
cluster are the product of a matrix of zeros and ones with the values.

With the weights $P$ of a query, recomputed from its normaliser, and the gradient $G$ of its output $O$, the gradient of
its scores is $P \circ (G V^\top - \delta)$, where $\delta = \mathrm{rowsum}(G \circ O)$.
"""

import triton
import triton.language as tl

from nystrom.gpu.arithmetic import (
    load_matrix,
    load_normaliser,
    load_tokens,
    product,
    rounded,
    store_normaliser,
    weights_again,
)
from nystrom.gpu.near_far.window import (
    at_distance,
    begin_of,
    far_values,
    heavy_rows,
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
    q, k, v, heavy, exists, cluster, first, means, sums, count, out, logs, left, strip, sizes, C: tl.constexpr
):
    """Outputs, normalisers, and how many far tokens each cluster has for each block."""
    parts = (sizes.SIZE + C.BLOCK_N - 1) // C.BLOCK_N
    pid = tl.program_id(0)
    part, block, bh = pid % parts, pid // parts % sizes.BLOCKS, pid // parts // sizes.BLOCKS
    b, h = bh // sizes.H, bh % sizes.H
    start = begin_of(first, b) + block * sizes.SIZE
    window, length = start - sizes.REACH, sizes.SIZE + 2 * sizes.REACH
    inside = part * C.BLOCK_N + tl.arange(0, C.BLOCK_N)
    positions = start + inside
    live = (inside < sizes.SIZE) & (positions < sizes.N)
    x = load_tokens(q, b, h, start + part * C.BLOCK_N, live, C.D, C.BLOCK_N, C.BLOCK_D)
    total_v = tl.full((C.BLOCK_N, C.BLOCK_E), 0, C.ACC)
    top, total = tl.full((C.BLOCK_N,), float("-inf"), C.ACC), tl.full((C.BLOCK_N,), 0, C.ACC)
    if C.NEAR:
        for w in range(0, length, C.BLOCK_W):
            seen = window_clusters(cluster, bh, window, w, length, sizes.S, sizes.M, C.BLOCK_W) < sizes.M
            y = load_tokens(k, b, h, window + w, seen, C.D, C.BLOCK_W, C.BLOCK_D)
            values = load_tokens(v, b, h, window + w, seen, C.E, C.BLOCK_W, C.BLOCK_E).to(C.LOW)
            s = scores_with_bias(x, y, tl.where(seen, 0.0, float("-inf")), C)
            place = window + w + tl.arange(0, C.BLOCK_W)
            s = at_distance(s, strip, h, place[None, :] - positions[:, None], sizes.FURTHEST)
            top, total, total_v = _attend(s, values, top, total, total_v, C.LOW, C.LOW_PRECISION)
    rows = tl.arange(0, C.BLOCK_M)
    for g in range(0, sizes.G, C.BLOCK_M):
        y = heavy_rows(k, heavy, bh, b, h, g, sizes.G, C.D, C.BLOCK_M, C.BLOCK_D)
        values = heavy_rows(v, heavy, bh, b, h, g, sizes.G, C.E, C.BLOCK_M, C.BLOCK_E).to(C.LOW)
        number = tl.load(exists + bh * sizes.G + g + rows, mask=g + rows < sizes.G, other=0).to(C.ACC)
        s = scores_with_bias(x, y, logarithm(number), C)
        place = tl.load(heavy + bh * sizes.G + g + rows, mask=g + rows < sizes.G, other=0)
        s = at_distance(s, strip, h, place[None, :] - positions[:, None], sizes.FURTHEST)
        top, total, total_v = _attend(s, values, top, total, total_v, C.LOW, C.LOW_PRECISION)
    for c in range(0, sizes.M, C.BLOCK_M):
        y = rounded(load_matrix(means, bh * sizes.M + c, sizes.M - c, C.D, C.BLOCK_M, C.BLOCK_D), q.at.dtype.element_ty)
        values, log, number = far_values(sums, count, c, v, cluster, b, h, bh, block, window, length, strip, sizes, C)
        if left is not None:
            place = left + (bh * tl.full((), sizes.BLOCKS, tl.int64) + block) * sizes.M + c + rows
            tl.store(place, number, mask=c + rows < tl.where(part == 0, sizes.M, 0))
        s = scores_with_bias(x, y, log, C)
        top, total, total_v = _attend(s, values, top, total, total_v, C.LOW, C.LOW_PRECISION)
    sums_to = tl.where(total == 0.0, 1.0, total)
    # Places after the last block stand for the tokens before the first real one, which get zeros.
    turned = tl.where(positions >= sizes.BLOCKS * sizes.SIZE, positions - sizes.BLOCKS * sizes.SIZE, positions)
    there = (inside < sizes.SIZE) & (turned < sizes.N)
    total_v = tl.where(live[:, None], total_v / sums_to[:, None], 0.0)
    store_rows(out, b, h, turned, total_v, there, C.E, C.BLOCK_N, C.BLOCK_E)
    total = tl.where(live, total, 0.0)
    store_normaliser(logs, bh * tl.full((), sizes.N, tl.int64) + turned, top, total, there)


@triton.jit
def _gradient(s, top, log, delta, grads, y, values, LOW: tl.constexpr, LOW_PRECISION: tl.constexpr):
    """The contribution of some keys to the gradient of the queries, without the factor on the scores, and that of the
    scores.
    """
    of_weights = product(grads, tl.trans(values), LOW_PRECISION)
    of_scores = weights_again(s, top[:, None], log[:, None]) * (of_weights - delta[:, None])
    return product(rounded(of_scores, LOW), y.to(LOW), LOW_PRECISION), of_scores


@triton.jit
def near_far_queries(
    q, k, v, heavy, exists, cluster, first, means, sums, count, out, logs, grad, q_grad, deltas, strip, of_heavy, sizes,
    C: tl.constexpr
):  # fmt: skip
    """Gradients of the queries, and their deltas, which the kernels for keys and values read; if `of_heavy` is
    given, also those of the scores of heavy keys.
    """
    parts = (sizes.SIZE + C.BLOCK_N - 1) // C.BLOCK_N
    pid = tl.program_id(0)
    part, block, bh = pid % parts, pid // parts % sizes.BLOCKS, pid // parts // sizes.BLOCKS
    b, h = bh // sizes.H, bh % sizes.H
    start = begin_of(first, b) + block * sizes.SIZE
    window, length = start - sizes.REACH, sizes.SIZE + 2 * sizes.REACH
    inside = part * C.BLOCK_N + tl.arange(0, C.BLOCK_N)
    positions, here = start + inside, start + part * C.BLOCK_N
    live = (inside < sizes.SIZE) & (positions < sizes.N)
    x = load_tokens(q, b, h, here, live, C.D, C.BLOCK_N, C.BLOCK_D)
    grads = load_tokens(grad, b, h, here, live, C.E, C.BLOCK_N, C.BLOCK_E)
    result = load_tokens(out, b, h, here, live, C.E, C.BLOCK_N, C.BLOCK_E)
    delta = tl.sum(grads.to(C.ACC) * result.to(C.ACC), 1)
    row = bh * tl.full((), sizes.N, tl.int64) + positions
    top, log = load_normaliser(logs, row, live)
    grads = grads.to(C.LOW)
    total = tl.full((C.BLOCK_N, C.BLOCK_D), 0, C.ACC)
    if C.NEAR:
        for w in range(0, length, C.BLOCK_W):
            seen = window_clusters(cluster, bh, window, w, length, sizes.S, sizes.M, C.BLOCK_W) < sizes.M
            y = load_tokens(k, b, h, window + w, seen, C.D, C.BLOCK_W, C.BLOCK_D)
            values = load_tokens(v, b, h, window + w, seen, C.E, C.BLOCK_W, C.BLOCK_E).to(C.LOW)
            s = scores_with_bias(x, y, tl.where(seen, 0.0, float("-inf")), C)
            place = window + w + tl.arange(0, C.BLOCK_W)
            s = at_distance(s, strip, h, place[None, :] - positions[:, None], sizes.FURTHEST)
            more, _ = _gradient(s, top, log, delta, grads, y, values, C.LOW, C.LOW_PRECISION)
            total += more
    rows = tl.arange(0, C.BLOCK_M)
    for g in range(0, sizes.G, C.BLOCK_M):
        y = heavy_rows(k, heavy, bh, b, h, g, sizes.G, C.D, C.BLOCK_M, C.BLOCK_D)
        values = heavy_rows(v, heavy, bh, b, h, g, sizes.G, C.E, C.BLOCK_M, C.BLOCK_E).to(C.LOW)
        number = tl.load(exists + bh * sizes.G + g + rows, mask=g + rows < sizes.G, other=0).to(C.ACC)
        s = scores_with_bias(x, y, logarithm(number), C)
        place = tl.load(heavy + bh * sizes.G + g + rows, mask=g + rows < sizes.G, other=0)
        s = at_distance(s, strip, h, place[None, :] - positions[:, None], sizes.FURTHEST)
        more, of_scores = _gradient(s, top, log, delta, grads, y, values, C.LOW, C.LOW_PRECISION)
        total += more
        if of_heavy is not None:
            places = of_heavy + (row * sizes.G)[:, None] + (g + rows)[None, :]
            tl.store(places, of_scores, mask=live[:, None] & (g + rows < sizes.G)[None, :])
    for c in range(0, sizes.M, C.BLOCK_M):
        y = rounded(load_matrix(means, bh * sizes.M + c, sizes.M - c, C.D, C.BLOCK_M, C.BLOCK_D), q.at.dtype.element_ty)
        values, far, _ = far_values(sums, count, c, v, cluster, b, h, bh, block, window, length, strip, sizes, C)
        s = scores_with_bias(x, y, far, C)
        more, _ = _gradient(s, top, log, delta, grads, y, values, C.LOW, C.LOW_PRECISION)
        total += more
    # Places after the last block stand for the tokens before the first real one, which get zeros.
    turned = tl.where(positions >= sizes.BLOCKS * sizes.SIZE, positions - sizes.BLOCKS * sizes.SIZE, positions)
    there = (inside < sizes.SIZE) & (turned < sizes.N)
    total = tl.where(live[:, None], total * C.SCALE, 0.0)
    store_rows(q_grad, b, h, turned, total, there, C.D, C.BLOCK_N, C.BLOCK_D)
    tl.store(deltas + bh * tl.full((), sizes.N, tl.int64) + turned, tl.where(live, delta, 0.0), mask=there)
