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
def left_statistics(q, land, middle, grad, query_keep, group, few, real, logs, deltas, sizes, C: tl.constexpr):
    """For each query of a tile, the normaliser and the weighted mean of the gradients of its weights."""
    tiles = (sizes.N + C.BLOCK_N - 1) // C.BLOCK_N
    pid = tl.program_id(0)
    bh, start = pid // tiles, pid % tiles * C.BLOCK_N
    b, h = bh // sizes.H, bh % sizes.H
    positions = start + tl.arange(0, C.BLOCK_N)
    live = real_tokens(query_keep, b, positions, sizes.N)
    x = load_tokens(q, b, h, start, live, C.D, C.BLOCK_N, C.BLOCK_D)
    grads = load_tokens(grad, b, h, start, live, C.E, C.BLOCK_N, C.BLOCK_E).to(C.LOW)
    count, own, exact = sizes.M, positions, False
    if few is not None:
        exact = tl.load(few + b) == 2
        count = tl.load(real + b)
        own = tl.load(group + b * sizes.N + positions, mask=live, other=-1)
    top, total = tl.full((C.BLOCK_N,), float("-inf"), C.ACC), tl.full((C.BLOCK_N,), 0, C.ACC)
    mean = tl.full((C.BLOCK_N,), 0, C.ACC)
    for first in range(0, sizes.M, C.BLOCK_M):
        y, values = landmark_rows(land, middle, bh, first, sizes, q.at.dtype.element_ty, C)
        columns = first + tl.arange(0, C.BLOCK_M)
        s = left_scores(x, y, columns, count, own, exact, few is not None, C)
        higher = tl.maximum(top, tl.max(s, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        shrink, p = tl.exp(top - base), tl.exp(s - base[:, None])
        total = total * shrink + tl.sum(p, 1)
        mean = mean * shrink + tl.sum(p * product(grads, tl.trans(values), C.LOW_PRECISION), 1)
        top = higher
    place = bh.to(tl.int64) * sizes.N + positions
    store_normaliser(logs, place, top, total, positions < sizes.N)
    tl.store(deltas + place, mean / tl.where(total == 0.0, 1.0, total), mask=positions < sizes.N)


@triton.jit
def _gradients(s, of_weights, top, log, delta, exact, SHORT: tl.constexpr, C: tl.constexpr):
    """Weights, and the gradients of their scores without the factor on the scores."""
    if C.GAUSSIAN:
        p = tl.exp(s)
        of_scores = p * of_weights
    else:
        if C.WHOLE:
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
    q, land, centre, middle, grad, query_keep, group, few, real, logs, deltas, land_sums, middle_sums, SPAN, sizes,
    C: tl.constexpr
):  # fmt: skip
    """Gradients of a block of landmarks as keys, and of their rows of the middle, from one span of queries."""
    blocks = (sizes.M + C.BLOCK_M - 1) // C.BLOCK_M
    pid = tl.program_id(0)
    first, bh, split = pid % blocks * C.BLOCK_M, pid // blocks % sizes.BH, pid // blocks // sizes.BH
    b, h = bh // sizes.H, bh % sizes.H
    y, values = landmark_rows(land, middle, bh, first, sizes, q.at.dtype.element_ty, C)
    columns = first + tl.arange(0, C.BLOCK_M)
    count, exact = sizes.M, False
    if few is not None:
        exact = tl.load(few + b) == 2
        count = tl.load(real + b)
    of_land, mass = tl.full((C.BLOCK_M, C.BLOCK_D), 0, C.ACC), tl.full((C.BLOCK_M,), 0, C.ACC)
    of_middle = tl.full((C.BLOCK_M, C.BLOCK_E), 0, C.ACC)
    for start in range(split * SPAN, tl.minimum(split * SPAN + SPAN, sizes.N), C.BLOCK_N):
        positions = start + tl.arange(0, C.BLOCK_N)
        live = real_tokens(query_keep, b, positions, sizes.N)
        x = moved(load_tokens(q, b, h, start, live, C.D, C.BLOCK_N, C.BLOCK_D), centre, bh, C)
        grads = load_tokens(grad, b, h, start, live, C.E, C.BLOCK_N, C.BLOCK_E).to(C.LOW)
        own, delta = positions, tl.full((C.BLOCK_N,), 0, C.ACC)
        top, log = delta, delta
        if few is not None:
            own = tl.load(group + b * sizes.N + positions, mask=live, other=-1)
        if not (C.WHOLE or C.GAUSSIAN):
            top, log = load_normaliser(logs, bh.to(tl.int64) * sizes.N + positions, live)
            delta = tl.load(deltas + bh.to(tl.int64) * sizes.N + positions, mask=live, other=0.0)
        s = left_scores(x, y, columns, count, own, exact, few is not None, C)
        of_weights = product(grads, tl.trans(values), C.LOW_PRECISION)
        p, of_scores = _gradients(s, of_weights, top, log, delta, exact, few is not None, C)
        # A padding query is zero, but its weights are not.
        of_scores = tl.where(live[:, None], of_scores, 0.0)
        of_middle += product(tl.trans(rounded(p, C.LOW)), grads, C.LOW_PRECISION)
        of_land += product(tl.trans(rounded(of_scores, C.LOW)), x.to(C.LOW), C.LOW_PRECISION)
        if C.GAUSSIAN:
            mass += tl.sum(of_scores, 0)
    if C.GAUSSIAN:
        of_land -= mass[:, None] * y.to(C.ACC)
    row = (split * sizes.BH + bh) * sizes.M + first
    store_matrix(land_sums, row, sizes.M - first, of_land * C.SCALE, C.D, C.BLOCK_M, C.BLOCK_D)
    store_matrix(middle_sums, row, sizes.M - first, of_middle, C.E, C.BLOCK_M, C.BLOCK_E)


@triton.jit
def left_queries(
    q, land, centre, middle, grad, query_keep, group, few, real, logs, deltas, land_grad, q_grad, SPAN, sizes,
    C: tl.constexpr
):  # fmt: skip
    """Gradients of one span of queries, including what each receives as part of a landmark."""
    pid = tl.program_id(0)
    bh, split = pid % sizes.BH, pid // sizes.BH
    b, h = bh // sizes.H, bh % sizes.H
    count, exact = sizes.M, False
    if few is not None:
        exact = tl.load(few + b) == 2
        count = tl.load(real + b)
    all_y, all_values = landmark_rows(land, middle, bh, 0, sizes, q.at.dtype.element_ty, C)
    wide = tl.arange(0, C.BLOCK_D)
    for start in range(split * SPAN, tl.minimum(split * SPAN + SPAN, sizes.N), C.BLOCK_N):
        positions = start + tl.arange(0, C.BLOCK_N)
        live = real_tokens(query_keep, b, positions, sizes.N)
        x = moved(load_tokens(q, b, h, start, live, C.D, C.BLOCK_N, C.BLOCK_D), centre, bh, C)
        grads = load_tokens(grad, b, h, start, live, C.E, C.BLOCK_N, C.BLOCK_E).to(C.LOW)
        if group is not None:
            own = tl.load(group + b * sizes.N + positions, mask=live, other=-1)
        else:
            own = (positions.to(tl.int64) * sizes.M // sizes.N).to(tl.int32)
        delta = tl.full((C.BLOCK_N,), 0, C.ACC)
        top, log = delta, delta
        if not (C.WHOLE or C.GAUSSIAN):
            top, log = load_normaliser(logs, bh.to(tl.int64) * sizes.N + positions, live)
            delta = tl.load(deltas + bh.to(tl.int64) * sizes.N + positions, mask=live, other=0.0)
        total, mass = tl.full((C.BLOCK_N, C.BLOCK_D), 0, C.ACC), tl.full((C.BLOCK_N,), 0, C.ACC)
        for block in range(0, 1 if C.WHOLE else (sizes.M + C.BLOCK_M - 1) // C.BLOCK_M):
            first = block * C.BLOCK_M
            if C.WHOLE:
                y, values = all_y, all_values
            else:
                y, values = landmark_rows(land, middle, bh, first, sizes, q.at.dtype.element_ty, C)
            columns = first + tl.arange(0, C.BLOCK_M)
            s = left_scores(x, y, columns, count, own, exact, few is not None, C)
            of_weights = product(grads, tl.trans(values), C.LOW_PRECISION)
            _, of_scores = _gradients(s, of_weights, top, log, delta, exact, few is not None, C)
            total += product(rounded(of_scores, C.LOW), y.to(C.LOW), C.LOW_PRECISION)
            if C.GAUSSIAN:
                mass += tl.sum(of_scores, 1)
        if C.GAUSSIAN:
            total -= mass[:, None] * x.to(C.ACC)
        part = live & (own >= 0)
        places = land_grad + ((bh * sizes.ROWS + own).to(tl.int64) * C.D)[:, None] + wide[None, :]
        total = total * C.SCALE + tl.load(places, mask=part[:, None] & (wide < C.D)[None, :], other=0.0)
        total = tl.where(live[:, None], total, 0.0)
        store_tokens(q_grad, b, h, start, total, positions < sizes.N, C.D, C.BLOCK_N, C.BLOCK_D)
