# Pyright takes a kernel that calls kernels for one that never returns.
# pyright: reportGeneralTypeIssues=false
"""Gradients of the left factor, see `nystrom.gpu.left`."""

import triton
import triton.language as tl

from nystrom.gpu.arithmetic import (
    landmark_rows,
    load_normaliser,
    load_tokens,
    moved,
    product,
    real_tokens,
    rounded,
    softmax_rows,
    store_matrix,
    store_normaliser,
    store_tokens,
    weights_again,
)
from nystrom.gpu.left import left_scores


@triton.jit
def left_statistics(
    q,
    land,
    middle,
    grad,
    query_keep,
    group,
    few,
    real,
    logs,
    deltas,
    q_strides,
    grad_strides,
    H,
    N,
    M,
    ROWS,
    D: tl.constexpr,
    E: tl.constexpr,
    SCALE: tl.constexpr,
    ACC: tl.constexpr,
    LOW: tl.constexpr,
    PRECISION: tl.constexpr,
    LOW_PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """For each query of a tile, the normaliser and the weighted mean of the gradients of its weights."""
    tiles = (N + BLOCK_N - 1) // BLOCK_N
    pid = tl.program_id(0)
    bh, start = pid // tiles, pid % tiles * BLOCK_N
    b, h = bh // H, bh % H
    positions = start + tl.arange(0, BLOCK_N)
    live = real_tokens(query_keep, b, positions, N)
    x = load_tokens(q, q_strides, b, h, start, live, D, BLOCK_N, BLOCK_D)
    grads = load_tokens(grad, grad_strides, b, h, start, live, E, BLOCK_N, BLOCK_E).to(LOW)
    count, own, exact = M, positions, False
    if few is not None:
        exact = tl.load(few + b) == 2
        count = tl.load(real + b)
        own = tl.load(group + b * N + positions, mask=live, other=-1)
    top, total = tl.full((BLOCK_N,), float("-inf"), ACC), tl.full((BLOCK_N,), 0, ACC)
    mean = tl.full((BLOCK_N,), 0, ACC)
    for first in range(0, M, BLOCK_M):
        y, values = landmark_rows(
            land, middle, bh, first, M, ROWS, q.dtype.element_ty, LOW, D, E, BLOCK_M, BLOCK_D, BLOCK_E
        )
        columns = first + tl.arange(0, BLOCK_M)
        s = left_scores(x, y, columns, count, own, exact, few is not None, SCALE, False, ACC, PRECISION)
        higher = tl.maximum(top, tl.max(s, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        shrink, p = tl.exp(top - base), tl.exp(s - base[:, None])
        total = total * shrink + tl.sum(p, 1)
        mean = mean * shrink + tl.sum(p * product(grads, tl.trans(values), LOW_PRECISION), 1)
        top = higher
    place = bh.to(tl.int64) * N + positions
    store_normaliser(logs, place, top, total, positions < N)
    tl.store(deltas + place, mean / tl.where(total == 0.0, 1.0, total), mask=positions < N)


@triton.jit
def _gradients(
    s,
    of_weights,
    top,
    log,
    delta,
    exact,
    WHOLE: tl.constexpr,
    SHORT: tl.constexpr,
    GAUSSIAN: tl.constexpr,
):
    """Weights, and the gradients of their scores without the factor on the scores."""
    if GAUSSIAN:
        p = tl.exp(s)
        of_scores = p * of_weights
    else:
        if WHOLE:
            p = softmax_rows(s)
            delta = tl.sum(p * of_weights, 1)
        else:
            p = weights_again(s, top[:, None], log[:, None])
        of_scores = p * (of_weights - delta[:, None])
    if SHORT:
        of_scores = tl.where(exact, 0.0, of_scores)
    return p, of_scores


@triton.jit
def left_landmarks(
    q,
    land,
    centre,
    middle,
    grad,
    query_keep,
    group,
    few,
    real,
    logs,
    deltas,
    land_sums,
    middle_sums,
    q_strides,
    grad_strides,
    H,
    BH,
    N,
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
    WHOLE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Gradients of a block of landmarks as keys, and of their rows of the middle, from one span of queries."""
    blocks = (M + BLOCK_M - 1) // BLOCK_M
    pid = tl.program_id(0)
    first, bh, split = pid % blocks * BLOCK_M, pid // blocks % BH, pid // blocks // BH
    b, h = bh // H, bh % H
    y, values = landmark_rows(
        land, middle, bh, first, M, ROWS, q.dtype.element_ty, LOW, D, E, BLOCK_M, BLOCK_D, BLOCK_E
    )
    columns = first + tl.arange(0, BLOCK_M)
    count, exact = M, False
    if few is not None:
        exact = tl.load(few + b) == 2
        count = tl.load(real + b)
    of_land, mass = tl.full((BLOCK_M, BLOCK_D), 0, ACC), tl.full((BLOCK_M,), 0, ACC)
    of_middle = tl.full((BLOCK_M, BLOCK_E), 0, ACC)
    for start in range(split * SPAN, tl.minimum(split * SPAN + SPAN, N), BLOCK_N):
        positions = start + tl.arange(0, BLOCK_N)
        live = real_tokens(query_keep, b, positions, N)
        x = moved(load_tokens(q, q_strides, b, h, start, live, D, BLOCK_N, BLOCK_D), centre, bh, D, BLOCK_D)
        grads = load_tokens(grad, grad_strides, b, h, start, live, E, BLOCK_N, BLOCK_E).to(LOW)
        own, delta = positions, tl.full((BLOCK_N,), 0, ACC)
        most, log = delta, delta
        if few is not None:
            own = tl.load(group + b * N + positions, mask=live, other=-1)
        if not (WHOLE or GAUSSIAN):
            most, log = load_normaliser(logs, bh.to(tl.int64) * N + positions, live)
            delta = tl.load(deltas + bh.to(tl.int64) * N + positions, mask=live, other=0.0)
        s = left_scores(x, y, columns, count, own, exact, few is not None, SCALE, GAUSSIAN, ACC, PRECISION)
        of_weights = product(grads, tl.trans(values), LOW_PRECISION)
        p, of_scores = _gradients(s, of_weights, most, log, delta, exact, WHOLE, few is not None, GAUSSIAN)
        # A padding query is zero, but its weights are not.
        of_scores = tl.where(live[:, None], of_scores, 0.0)
        of_middle += product(tl.trans(rounded(p, LOW)), grads, LOW_PRECISION)
        of_land += product(tl.trans(rounded(of_scores, LOW)), x.to(LOW), LOW_PRECISION)
        if GAUSSIAN:
            mass += tl.sum(of_scores, 0)
    if GAUSSIAN:
        of_land -= mass[:, None] * y.to(ACC)
    row = (split * BH + bh) * M + first
    store_matrix(land_sums, row, M - first, of_land * SCALE, D, BLOCK_M, BLOCK_D)
    store_matrix(middle_sums, row, M - first, of_middle, E, BLOCK_M, BLOCK_E)


@triton.jit
def left_queries(
    q,
    land,
    centre,
    middle,
    grad,
    query_keep,
    group,
    few,
    real,
    logs,
    deltas,
    land_grad,
    q_grad,
    q_strides,
    grad_strides,
    q_grad_strides,
    H,
    BH,
    N,
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
    WHOLE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Gradients of one span of queries, including what each receives as part of a landmark."""
    pid = tl.program_id(0)
    bh, split = pid % BH, pid // BH
    b, h = bh // H, bh % H
    count, exact = M, False
    if few is not None:
        exact = tl.load(few + b) == 2
        count = tl.load(real + b)
    all_y, all_values = landmark_rows(
        land, middle, bh, 0, M, ROWS, q.dtype.element_ty, LOW, D, E, BLOCK_M, BLOCK_D, BLOCK_E
    )
    wide = tl.arange(0, BLOCK_D)
    for start in range(split * SPAN, tl.minimum(split * SPAN + SPAN, N), BLOCK_N):
        positions = start + tl.arange(0, BLOCK_N)
        live = real_tokens(query_keep, b, positions, N)
        x = moved(load_tokens(q, q_strides, b, h, start, live, D, BLOCK_N, BLOCK_D), centre, bh, D, BLOCK_D)
        grads = load_tokens(grad, grad_strides, b, h, start, live, E, BLOCK_N, BLOCK_E).to(LOW)
        if group is not None:
            own = tl.load(group + b * N + positions, mask=live, other=-1)
        else:
            own = (positions.to(tl.int64) * M // N).to(tl.int32)
        delta = tl.full((BLOCK_N,), 0, ACC)
        most, log = delta, delta
        if not (WHOLE or GAUSSIAN):
            most, log = load_normaliser(logs, bh.to(tl.int64) * N + positions, live)
            delta = tl.load(deltas + bh.to(tl.int64) * N + positions, mask=live, other=0.0)
        total, mass = tl.full((BLOCK_N, BLOCK_D), 0, ACC), tl.full((BLOCK_N,), 0, ACC)
        for block in range(0, 1 if WHOLE else (M + BLOCK_M - 1) // BLOCK_M):
            first = block * BLOCK_M
            if WHOLE:
                y, values = all_y, all_values
            else:
                y, values = landmark_rows(
                    land, middle, bh, first, M, ROWS, q.dtype.element_ty, LOW, D, E, BLOCK_M, BLOCK_D, BLOCK_E
                )
            columns = first + tl.arange(0, BLOCK_M)
            s = left_scores(x, y, columns, count, own, exact, few is not None, SCALE, GAUSSIAN, ACC, PRECISION)
            of_weights = product(grads, tl.trans(values), LOW_PRECISION)
            _, of_scores = _gradients(s, of_weights, most, log, delta, exact, WHOLE, few is not None, GAUSSIAN)
            total += product(rounded(of_scores, LOW), y.to(LOW), LOW_PRECISION)
            if GAUSSIAN:
                mass += tl.sum(of_scores, 1)
        if GAUSSIAN:
            total -= mass[:, None] * x.to(ACC)
        part = live & (own >= 0)
        places = land_grad + ((bh * ROWS + own).to(tl.int64) * D)[:, None] + wide[None, :]
        total = total * SCALE + tl.load(places, mask=part[:, None] & (wide < D)[None, :], other=0.0)
        total = tl.where(live[:, None], total, 0.0)
        store_tokens(q_grad, q_grad_strides, b, h, start, total, positions < N, D, BLOCK_N, BLOCK_D)
