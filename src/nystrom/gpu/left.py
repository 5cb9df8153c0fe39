r"""The left factor, $\mathrm{out} = \mathrm{softmax}(c\, Q \tilde K^\top) \cdot \mathrm{middle}$, with the skip
convolution of the values added in the same pass, and its gradients.

A program holds a tile of queries and loops over the landmarks, block by block. With at most BLOCK_M landmarks, all
weights of a tile are computed at once, and the backward passes recompute them without stored normalisers. With more,
`left_backward.left_statistics` first computes each query's normaliser and the weighted mean of the gradients of its
weights.

The convolution is a product of two matrices: a band with the kernel in row i shifted by i, and the values around the
tile.

If a sequence has at most m real queries, landmark j is query j and holds its exact result. The weights of such a query
are 1 for its own landmark and 0 for the others, and have no gradient.
"""

import triton
import triton.language as tl

from nystrom.gpu.arithmetic import (
    load_matrix,
    load_tokens,
    log_weights,
    moved,
    product,
    real_tokens,
    rounded,
    store_tokens,
)


@triton.jit
def left_scores(
    x,
    y,
    columns,
    count,
    own,
    exact,
    SHORT: tl.constexpr,
    SCALE: tl.constexpr,
    GAUSSIAN: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Scores against a block of landmarks: -inf beyond `count`, and for `exact` queries 0 at their own landmark."""
    s = tl.where((columns < count)[None, :], log_weights(x, y, SCALE, GAUSSIAN, ACC, PRECISION), float("-inf"))
    if SHORT:
        s = tl.where(exact, tl.where(own[:, None] == columns[None, :], 0.0, float("-inf")), s)
    return s


@triton.jit
def left_forward(
    q,
    land,
    centre,
    middle,
    v,
    conv,
    out,
    query_keep,
    keep,
    group,
    few,
    real,
    q_strides,
    v_strides,
    out_strides,
    H,
    N,
    M,
    ROWS,
    D: tl.constexpr,
    E: tl.constexpr,
    SCALE: tl.constexpr,
    GAUSSIAN: tl.constexpr,
    ACC: tl.constexpr,
    LOW: tl.constexpr,
    PRECISION: tl.constexpr,
    LOW_PRECISION: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Outputs of a tile of queries."""
    tiles = (N + BLOCK_N - 1) // BLOCK_N
    pid = tl.program_id(0)
    bh, start = pid // tiles, pid % tiles * BLOCK_N
    b, h = bh // H, bh % H
    positions = start + tl.arange(0, BLOCK_N)
    live = real_tokens(query_keep, b, positions, N)
    x = moved(load_tokens(q, q_strides, b, h, start, live, D, BLOCK_N, BLOCK_D), centre, bh, D, BLOCK_D)
    count, own, exact = M, positions, False
    if few is not None:
        exact = tl.load(few + b) == 2
        count = tl.load(real + b)
        own = tl.load(group + b * N + positions, mask=live, other=-1)
    total_v = tl.full((BLOCK_N, BLOCK_E), 0, ACC)
    top, total = tl.full((BLOCK_N,), float("-inf"), ACC), tl.full((BLOCK_N,), 0, ACC)
    for first in range(0, M, BLOCK_M):
        y = rounded(load_matrix(land, bh * ROWS + first, M - first, D, BLOCK_M, BLOCK_D), q.dtype.element_ty)
        values = rounded(load_matrix(middle, bh * M + first, M - first, E, BLOCK_M, BLOCK_E), LOW)
        columns = first + tl.arange(0, BLOCK_M)
        s = left_scores(x, y, columns, count, own, exact, few is not None, SCALE, GAUSSIAN, ACC, PRECISION)
        if GAUSSIAN:
            p = tl.exp(s)
        else:
            higher = tl.maximum(top, tl.max(s, 1))
            base = tl.where(higher == float("-inf"), 0.0, higher)
            shrink = tl.exp(top - base)
            p = tl.exp(s - base[:, None])
            total = total * shrink + tl.sum(p, 1)
            total_v = total_v * shrink[:, None]
            top = higher
        total_v += product(rounded(p, LOW), values, LOW_PRECISION)
    if not GAUSSIAN:
        total_v = total_v / tl.where(total == 0.0, 1.0, total)[:, None]
    if TAPS > 0:
        # Token i adds token j with the weight w[j - i + half].
        mine, others = tl.arange(0, BLOCK_N)[:, None], tl.arange(0, BLOCK_N)[None, :]
        for block in tl.static_range(0, (BLOCK_N + TAPS - 2) // BLOCK_N + 1):
            away = block * BLOCK_N
            near = start - TAPS // 2 + away
            tap = others + away - mine
            band = tl.load(conv + h * TAPS + tap, mask=(tap >= 0) & (tap < TAPS), other=0.0)
            lit = real_tokens(keep, b, near + tl.arange(0, BLOCK_N), N)
            neighbours = load_tokens(v, v_strides, b, h, near, lit, E, BLOCK_N, BLOCK_E)
            total_v += product(band.to(neighbours.dtype), neighbours, PRECISION)
    total_v = tl.where(live[:, None], total_v, 0.0)
    store_tokens(out, out_strides, b, h, start, total_v, positions < N, E, BLOCK_N, BLOCK_E)
