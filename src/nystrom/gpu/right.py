# Pyright takes a kernel that calls kernels for one that never returns.
# pyright: reportGeneralTypeIssues=false
r"""The right factor, $R = \mathrm{softmax}(c\, \tilde Q K^\top) V$, of few queries and many keys; and its gradients.

In the forward pass, the keys are split over programs, each with a running maximum and sum; `combine` joins the splits.
In the backward pass, weights are recomputed from the largest scores and the logarithms of the sums:

- `right_queries` computes the gradient of the landmarks, split over the keys.
- `right_keys` computes the gradients of keys and values, span by span. It also adds the gradient of a key as part of a
  landmark and that of the skip convolution, so each gradient is written once.

With the Gaussian kernel, the weights are not normalised: splits are added, and there is no maximum.
"""

import triton
import triton.language as tl

from nystrom.gpu.arithmetic import (
    landmark_rows,
    load_matrix,
    load_normaliser,
    load_tokens,
    log_weights,
    moved,
    product,
    real_tokens,
    rounded,
    store_matrix,
    store_normaliser,
    store_tokens,
    weights_again,
)
from nystrom.gpu.skip import add_neighbours, bands


@triton.jit
def right_forward(
    land,
    centre,
    k,
    v,
    keep,
    sums,
    tops,
    totals,
    k_strides,
    v_strides,
    H,
    BH,
    S,
    M,
    ROWS,
    SPAN,
    D: tl.constexpr,
    E: tl.constexpr,
    SCALE: tl.constexpr,
    GAUSSIAN: tl.constexpr,
    ACC: tl.constexpr,
    LOW: tl.constexpr,
    PRECISION: tl.constexpr,
    LOW_PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Sum, maximum and normaliser over one span of keys, for a block of landmarks."""
    blocks = (M + BLOCK_M - 1) // BLOCK_M
    pid = tl.program_id(0)
    first, bh, split = pid % blocks * BLOCK_M, pid // blocks % BH, pid // blocks // BH
    b, h = bh // H, bh % H
    x = rounded(load_matrix(land, bh * ROWS + first, M - first, D, BLOCK_M, BLOCK_D), k.dtype.element_ty)
    total_v = tl.full((BLOCK_M, BLOCK_E), 0, ACC)
    top, total = tl.full((BLOCK_M,), float("-inf"), ACC), tl.full((BLOCK_M,), 0, ACC)
    for start in range(split * SPAN, tl.minimum(split * SPAN + SPAN, S), BLOCK_N):
        live = real_tokens(keep, b, start + tl.arange(0, BLOCK_N), S)
        y = moved(load_tokens(k, k_strides, b, h, start, live, D, BLOCK_N, BLOCK_D), centre, bh, D, BLOCK_D)
        values = load_tokens(v, v_strides, b, h, start, live, E, BLOCK_N, BLOCK_E)
        s = tl.where(live[None, :], log_weights(x, y, SCALE, GAUSSIAN, ACC, PRECISION), float("-inf"))
        if GAUSSIAN:
            p = tl.exp(s)
        else:
            higher = tl.maximum(top, tl.max(s, 1))
            # Before the first real key, the maximum is -inf, and -inf - -inf would be NaN.
            base = tl.where(higher == float("-inf"), 0.0, higher)
            shrink = tl.exp(top - base)
            p = tl.exp(s - base[:, None])
            total = total * shrink + tl.sum(p, 1)
            total_v = total_v * shrink[:, None]
            top = higher
        total_v += product(rounded(p, LOW), values.to(LOW), LOW_PRECISION)
    row = (split * BH + bh) * M + first
    store_matrix(sums, row, M - first, total_v, E, BLOCK_M, BLOCK_E)
    if not GAUSSIAN:
        rows = tl.arange(0, BLOCK_M)
        tl.store(tops + row + rows, top, mask=first + rows < M)
        tl.store(totals + row + rows, total, mask=first + rows < M)


@triton.jit
def joined(
    sums,
    tops,
    totals,
    bh,
    first,
    BH,
    M,
    SPLITS,
    E: tl.constexpr,
    GAUSSIAN: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """The right factor of a block of landmarks from its splits, with the largest score and the sum of each row."""
    rows = tl.arange(0, BLOCK_M)
    there = first + rows < M
    total_v = tl.full((BLOCK_M, BLOCK_E), 0, ACC)
    top, total = tl.full((BLOCK_M,), float("-inf"), ACC), tl.full((BLOCK_M,), 0, ACC)
    for split in range(SPLITS):
        row = (split * BH + bh) * M + first
        part = load_matrix(sums, row, M - first, E, BLOCK_M, BLOCK_E)
        if GAUSSIAN:
            total_v += part
        else:
            own = tl.load(tops + row + rows, mask=there, other=float("-inf"))
            higher = tl.maximum(top, own)
            base = tl.where(higher == float("-inf"), 0.0, higher)
            before, now = tl.exp(top - base), tl.exp(own - base)
            total = total * before + tl.load(totals + row + rows, mask=there, other=0.0) * now
            total_v = total_v * before[:, None] + part * now[:, None]
            top = higher
    if not GAUSSIAN:
        total_v = total_v / tl.where(total == 0.0, 1.0, total)[:, None]
    return total_v, top, total


@triton.jit
def combine(
    sums,
    tops,
    totals,
    right,
    logs,
    BH,
    M,
    SPLITS,
    E: tl.constexpr,
    GAUSSIAN: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Join the splits of a block of landmarks; `logs` are the normalisers, see `store_normaliser`."""
    blocks = (M + BLOCK_M - 1) // BLOCK_M
    pid = tl.program_id(0)
    first, bh = pid % blocks * BLOCK_M, pid // blocks
    rows = tl.arange(0, BLOCK_M)
    total_v, top, total = joined(sums, tops, totals, bh, first, BH, M, SPLITS, E, GAUSSIAN, ACC, BLOCK_M, BLOCK_E)
    if not GAUSSIAN:
        store_normaliser(logs, bh * M + first + rows, top, total, first + rows < M)
    store_matrix(right, bh * M + first, M - first, total_v, E, BLOCK_M, BLOCK_E)


@triton.jit
def right_queries(
    land,
    centre,
    k,
    v,
    keep,
    grad,
    logs,
    deltas,
    sums,
    k_strides,
    v_strides,
    H,
    BH,
    S,
    M,
    ROWS,
    SPAN,
    D: tl.constexpr,
    E: tl.constexpr,
    SCALE: tl.constexpr,
    GAUSSIAN: tl.constexpr,
    ACC: tl.constexpr,
    LOW: tl.constexpr,
    PRECISION: tl.constexpr,
    LOW_PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Gradient of a block of landmarks, as queries, from one span of keys."""
    blocks = (M + BLOCK_M - 1) // BLOCK_M
    pid = tl.program_id(0)
    first, bh, split = pid % blocks * BLOCK_M, pid // blocks % BH, pid // blocks // BH
    b, h = bh // H, bh % H
    rows = tl.arange(0, BLOCK_M)
    there = first + rows < M
    x, grads = landmark_rows(land, grad, bh, first, M, ROWS, k.dtype.element_ty, LOW, D, E, BLOCK_M, BLOCK_D, BLOCK_E)
    if not GAUSSIAN:
        top, log = load_normaliser(logs, bh * M + first + rows, there)
        delta = tl.load(deltas + bh * M + first + rows, mask=there, other=0.0)
    total, mass = tl.full((BLOCK_M, BLOCK_D), 0, ACC), tl.full((BLOCK_M,), 0, ACC)
    for start in range(split * SPAN, tl.minimum(split * SPAN + SPAN, S), BLOCK_N):
        live = real_tokens(keep, b, start + tl.arange(0, BLOCK_N), S)
        y = moved(load_tokens(k, k_strides, b, h, start, live, D, BLOCK_N, BLOCK_D), centre, bh, D, BLOCK_D)
        values = load_tokens(v, v_strides, b, h, start, live, E, BLOCK_N, BLOCK_E)
        s = tl.where(live[None, :], log_weights(x, y, SCALE, GAUSSIAN, ACC, PRECISION), float("-inf"))
        of_weights = product(grads, tl.trans(values.to(LOW)), LOW_PRECISION)
        if GAUSSIAN:
            of_scores = tl.exp(s) * of_weights
            mass += tl.sum(of_scores, 1)
        else:
            of_scores = weights_again(s, top[:, None], log[:, None]) * (of_weights - delta[:, None])
        total += product(rounded(of_scores, LOW), y.to(LOW), LOW_PRECISION)
    if GAUSSIAN:
        total -= mass[:, None] * x.to(ACC)
    store_matrix(sums, (split * BH + bh) * M + first, M - first, total * SCALE, D, BLOCK_M, BLOCK_D)


@triton.jit
def right_keys(
    land,
    centre,
    k,
    v,
    keep,
    group,
    few,
    grad,
    logs,
    deltas,
    land_grad,
    middle_grad,
    conv,
    out_grad,
    query_keep,
    k_grad,
    v_grad,
    k_strides,
    v_strides,
    out_strides,
    k_grad_strides,
    v_grad_strides,
    H,
    BH,
    S,
    M,
    ROWS,
    FIRST,
    SPAN,
    D: tl.constexpr,
    E: tl.constexpr,
    SCALE: tl.constexpr,
    GAUSSIAN: tl.constexpr,
    ACC: tl.constexpr,
    LOW: tl.constexpr,
    PRECISION: tl.constexpr,
    LOW_PRECISION: tl.constexpr,
    WHOLE: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Complete gradients of one span of keys and values: nothing is added to them later."""
    pid = tl.program_id(0)
    bh, split = pid % BH, pid // BH
    b, h = bh // H, bh % H
    rows = tl.arange(0, BLOCK_M)
    all_x, all_grads = landmark_rows(
        land, grad, bh, 0, M, ROWS, k.dtype.element_ty, LOW, D, E, BLOCK_M, BLOCK_D, BLOCK_E
    )
    if not GAUSSIAN:
        all_top, all_log = load_normaliser(logs, bh * M + rows, rows < M)
        all_deltas = tl.load(deltas + bh * M + rows, mask=rows < M, other=0.0)
    if TAPS > 0:
        near, tail = bands(conv, h, v.dtype.element_ty, True, TAPS, BLOCK_T, BLOCK_N)
    wide, wide_e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    for start in range(split * SPAN, tl.minimum(split * SPAN + SPAN, S), BLOCK_N):
        positions = start + tl.arange(0, BLOCK_N)
        live = real_tokens(keep, b, positions, S)
        y = moved(load_tokens(k, k_strides, b, h, start, live, D, BLOCK_N, BLOCK_D), centre, bh, D, BLOCK_D)
        values = load_tokens(v, v_strides, b, h, start, live, E, BLOCK_N, BLOCK_E).to(LOW)
        of_keys, mass = tl.full((BLOCK_N, BLOCK_D), 0, ACC), tl.full((BLOCK_N,), 0, ACC)
        of_values = tl.full((BLOCK_N, BLOCK_E), 0, ACC)
        for block in range(0, 1 if WHOLE else (M + BLOCK_M - 1) // BLOCK_M):
            columns = block * BLOCK_M + rows
            if WHOLE:
                x, grads = all_x, all_grads
            else:
                x, grads = landmark_rows(
                    land, grad, bh, block * BLOCK_M, M, ROWS, k.dtype.element_ty, LOW, D, E, BLOCK_M, BLOCK_D, BLOCK_E
                )
            there = live[:, None] & (columns < M)[None, :]
            s = tl.where(there, log_weights(y, x, SCALE, GAUSSIAN, ACC, PRECISION), float("-inf"))
            of_weights = product(values, tl.trans(grads), LOW_PRECISION)
            if GAUSSIAN:
                p = tl.exp(s)
                of_scores = p * of_weights
                mass += tl.sum(of_scores, 1)
            else:
                if WHOLE:
                    top, log, delta = all_top, all_log, all_deltas
                else:
                    top, log = load_normaliser(logs, bh * M + columns, columns < M)
                    delta = tl.load(deltas + bh * M + columns, mask=columns < M, other=0.0)
                p = weights_again(s, top[None, :], log[None, :])
                of_scores = p * (of_weights - delta[None, :])
            of_values += product(rounded(p, LOW), grads, LOW_PRECISION)
            of_keys += product(rounded(of_scores, LOW), x.to(LOW), LOW_PRECISION)
        if GAUSSIAN:
            of_keys -= mass[:, None] * y.to(ACC)
        of_keys *= SCALE

        if group is not None:
            own = tl.load(group + b * S + positions, mask=live, other=-1)
        else:
            own = FIRST + (positions.to(tl.int64) * M // S).to(tl.int32)
        part = live & (own >= 0)
        places = land_grad + ((bh * ROWS + own).to(tl.int64) * D)[:, None] + wide[None, :]
        of_keys += tl.load(places, mask=part[:, None] & (wide < D)[None, :], other=0.0)
        if few is not None:
            # In a sequence with few keys, landmark j is key j, and the middle holds the values of the keys.
            middle = part & (tl.load(few + b) == 1)
            places = middle_grad + ((bh * M + own - FIRST).to(tl.int64) * E)[:, None] + wide_e[None, :]
            of_values += tl.load(places, mask=middle[:, None] & (wide_e < E)[None, :], other=0.0)
        if TAPS > 0:
            # Token j has the weight w[j - i + half] in the output of token i. A padding token has no output; here
            # `query_keep` is `keep`.
            of_values = add_neighbours(
                of_values, near, tail, conv, out_grad, out_strides, b, h, start, query_keep, S, True, PRECISION,
                TAPS, BLOCK_T, E, BLOCK_N, BLOCK_E,
            )  # fmt: skip
        inside = positions < S
        of_keys, of_values = tl.where(live[:, None], of_keys, 0.0), tl.where(live[:, None], of_values, 0.0)
        store_tokens(k_grad, k_grad_strides, b, h, start, of_keys, inside, D, BLOCK_N, BLOCK_D)
        store_tokens(v_grad, v_grad_strides, b, h, start, of_values, inside, E, BLOCK_N, BLOCK_E)
