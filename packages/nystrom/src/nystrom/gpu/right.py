r"""The right factor, $R = \mathrm{softmax}(c\, \tilde Q K^\top) V$, of few queries and many keys; and its gradients.

In the forward pass, the keys are split over programs, each with a running maximum and sum; `combine` joins the splits.
In the backward pass, weights are recomputed from the largest scores and the logarithms of the sums:

- `right_queries` computes the gradient of the landmarks, split over the keys.
- `right_keys` computes the gradients of keys and values, span by span. It also adds the gradient of a key as part of a
  landmark and that of the skip convolution, so each gradient is written once.

With the Gaussian kernel, the weights are not normalised: splits are added, and there is no maximum.

Plain form: `nystrom.reference.softmax`; with the Gaussian kernel, `kernelized`.
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
from nystrom.gpu.skip_products import add_neighbours, bands


@triton.jit
def right_forward(land, centre, k, v, keep, sums, tops, totals, SPAN, sizes, C: tl.constexpr):
    """Sum, maximum and normaliser over one span of keys, for a block of landmarks."""
    blocks = (sizes.M + C.BLOCK_M - 1) // C.BLOCK_M
    pid = tl.program_id(0)
    first, bh, split = pid % blocks * C.BLOCK_M, pid // blocks % sizes.BH, pid // blocks // sizes.BH
    b, h = bh // sizes.H, bh % sizes.H
    x = rounded(
        load_matrix(land, bh * sizes.ROWS + first, sizes.M - first, C.D, C.BLOCK_M, C.BLOCK_D), k.at.dtype.element_ty
    )
    total_v = tl.full((C.BLOCK_M, C.BLOCK_E), 0, C.ACC)
    top, total = tl.full((C.BLOCK_M,), float("-inf"), C.ACC), tl.full((C.BLOCK_M,), 0, C.ACC)
    for start in range(split * SPAN, tl.minimum(split * SPAN + SPAN, sizes.S), C.BLOCK_N):
        live = real_tokens(keep, b, start + tl.arange(0, C.BLOCK_N), sizes.S)
        y = moved(load_tokens(k, b, h, start, live, C.D, C.BLOCK_N, C.BLOCK_D), centre, bh, C)
        values = load_tokens(v, b, h, start, live, C.E, C.BLOCK_N, C.BLOCK_E)
        s = tl.where(live[None, :], log_weights(x, y, C), float("-inf"))
        if C.GAUSSIAN:
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
        total_v += product(rounded(p, C.LOW), values.to(C.LOW), C.LOW_PRECISION)
    row = (split * sizes.BH + bh) * sizes.M + first
    store_matrix(sums, row, sizes.M - first, total_v, C.E, C.BLOCK_M, C.BLOCK_E)
    if not C.GAUSSIAN:
        rows = tl.arange(0, C.BLOCK_M)
        tl.store(tops + row + rows, top, mask=first + rows < sizes.M)
        tl.store(totals + row + rows, total, mask=first + rows < sizes.M)


@triton.jit
def joined(sums, tops, totals, bh, first, SPLITS, sizes, C: tl.constexpr):
    """The right factor of a block of landmarks from its splits, with the largest score and the sum of each row."""
    rows, M = tl.arange(0, C.BLOCK_M), sizes.M
    there = first + rows < M
    total_v = tl.full((C.BLOCK_M, C.BLOCK_E), 0, C.ACC)
    top, total = tl.full((C.BLOCK_M,), float("-inf"), C.ACC), tl.full((C.BLOCK_M,), 0, C.ACC)
    for split in range(SPLITS):
        row = (split * sizes.BH + bh) * M + first
        part = load_matrix(sums, row, M - first, C.E, C.BLOCK_M, C.BLOCK_E)
        if C.GAUSSIAN:
            total_v += part
        else:
            own = tl.load(tops + row + rows, mask=there, other=float("-inf"))
            higher = tl.maximum(top, own)
            base = tl.where(higher == float("-inf"), 0.0, higher)
            before, now = tl.exp(top - base), tl.exp(own - base)
            total = total * before + tl.load(totals + row + rows, mask=there, other=0.0) * now
            total_v = total_v * before[:, None] + part * now[:, None]
            top = higher
    if not C.GAUSSIAN:
        total_v = total_v / tl.where(total == 0.0, 1.0, total)[:, None]
    return total_v, top, total


@triton.jit
def combine(sums, tops, totals, right, logs, SPLITS, sizes, C: tl.constexpr):
    """Join the splits of a block of landmarks; `logs` are the normalisers, see `store_normaliser`."""
    blocks = (sizes.M + C.BLOCK_M - 1) // C.BLOCK_M
    pid = tl.program_id(0)
    first, bh = pid % blocks * C.BLOCK_M, pid // blocks
    rows = tl.arange(0, C.BLOCK_M)
    total_v, top, total = joined(sums, tops, totals, bh, first, SPLITS, sizes, C)
    if not C.GAUSSIAN:
        store_normaliser(logs, bh * sizes.M + first + rows, top, total, first + rows < sizes.M)
    store_matrix(right, bh * sizes.M + first, sizes.M - first, total_v, C.E, C.BLOCK_M, C.BLOCK_E)


@triton.jit
def right_queries(land, centre, k, v, keep, grad, logs, deltas, sums, SPAN, sizes, C: tl.constexpr):
    """Gradient of a block of landmarks, as queries, from one span of keys."""
    blocks = (sizes.M + C.BLOCK_M - 1) // C.BLOCK_M
    pid = tl.program_id(0)
    first, bh, split = pid % blocks * C.BLOCK_M, pid // blocks % sizes.BH, pid // blocks // sizes.BH
    b, h = bh // sizes.H, bh % sizes.H
    rows = tl.arange(0, C.BLOCK_M)
    there = first + rows < sizes.M
    x, grads = landmark_rows(land, grad, bh, first, sizes, k.at.dtype.element_ty, C)
    if not C.GAUSSIAN:
        top, log = load_normaliser(logs, bh * sizes.M + first + rows, there)
        delta = tl.load(deltas + bh * sizes.M + first + rows, mask=there, other=0.0)
    total, mass = tl.full((C.BLOCK_M, C.BLOCK_D), 0, C.ACC), tl.full((C.BLOCK_M,), 0, C.ACC)
    for start in range(split * SPAN, tl.minimum(split * SPAN + SPAN, sizes.S), C.BLOCK_N):
        live = real_tokens(keep, b, start + tl.arange(0, C.BLOCK_N), sizes.S)
        y = moved(load_tokens(k, b, h, start, live, C.D, C.BLOCK_N, C.BLOCK_D), centre, bh, C)
        values = load_tokens(v, b, h, start, live, C.E, C.BLOCK_N, C.BLOCK_E)
        s = tl.where(live[None, :], log_weights(x, y, C), float("-inf"))
        of_weights = product(grads, tl.trans(values.to(C.LOW)), C.LOW_PRECISION)
        if C.GAUSSIAN:
            of_scores = tl.exp(s) * of_weights
            mass += tl.sum(of_scores, 1)
        else:
            of_scores = weights_again(s, top[:, None], log[:, None]) * (of_weights - delta[:, None])
        total += product(rounded(of_scores, C.LOW), y.to(C.LOW), C.LOW_PRECISION)
    if C.GAUSSIAN:
        total -= mass[:, None] * x.to(C.ACC)
    store_matrix(
        sums, (split * sizes.BH + bh) * sizes.M + first, sizes.M - first, total * C.SCALE, C.D, C.BLOCK_M, C.BLOCK_D
    )


@triton.jit
def right_keys(
    land, centre, k, v, keep, group, few, grad, logs, deltas, land_grad, middle_grad, conv, out_grad, query_keep,
    k_grad, v_grad, FIRST, SPAN, sizes, C: tl.constexpr
):  # fmt: skip
    """Complete gradients of one span of keys and values: nothing is added to them later."""
    pid = tl.program_id(0)
    bh, split = pid % sizes.BH, pid // sizes.BH
    b, h = bh // sizes.H, bh % sizes.H
    rows = tl.arange(0, C.BLOCK_M)
    all_x, all_grads = landmark_rows(land, grad, bh, 0, sizes, k.at.dtype.element_ty, C)
    if not C.GAUSSIAN:
        all_top, all_log = load_normaliser(logs, bh * sizes.M + rows, rows < sizes.M)
        all_deltas = tl.load(deltas + bh * sizes.M + rows, mask=rows < sizes.M, other=0.0)
    if C.TAPS > 0:
        near, tail = bands(conv, h, v.at.dtype.element_ty, True, C)
    wide, wide_e = tl.arange(0, C.BLOCK_D), tl.arange(0, C.BLOCK_E)
    for start in range(split * SPAN, tl.minimum(split * SPAN + SPAN, sizes.S), C.BLOCK_N):
        positions = start + tl.arange(0, C.BLOCK_N)
        live = real_tokens(keep, b, positions, sizes.S)
        y = moved(load_tokens(k, b, h, start, live, C.D, C.BLOCK_N, C.BLOCK_D), centre, bh, C)
        values = load_tokens(v, b, h, start, live, C.E, C.BLOCK_N, C.BLOCK_E).to(C.LOW)
        of_keys, mass = tl.full((C.BLOCK_N, C.BLOCK_D), 0, C.ACC), tl.full((C.BLOCK_N,), 0, C.ACC)
        of_values = tl.full((C.BLOCK_N, C.BLOCK_E), 0, C.ACC)
        for block in range(0, 1 if C.WHOLE else (sizes.M + C.BLOCK_M - 1) // C.BLOCK_M):
            columns = block * C.BLOCK_M + rows
            if C.WHOLE:
                x, grads = all_x, all_grads
            else:
                x, grads = landmark_rows(land, grad, bh, block * C.BLOCK_M, sizes, k.at.dtype.element_ty, C)
            there = live[:, None] & (columns < sizes.M)[None, :]
            s = tl.where(there, log_weights(y, x, C), float("-inf"))
            of_weights = product(values, tl.trans(grads), C.LOW_PRECISION)
            if C.GAUSSIAN:
                p = tl.exp(s)
                of_scores = p * of_weights
                mass += tl.sum(of_scores, 1)
            else:
                if C.WHOLE:
                    top, log, delta = all_top, all_log, all_deltas
                else:
                    top, log = load_normaliser(logs, bh * sizes.M + columns, columns < sizes.M)
                    delta = tl.load(deltas + bh * sizes.M + columns, mask=columns < sizes.M, other=0.0)
                p = weights_again(s, top[None, :], log[None, :])
                of_scores = p * (of_weights - delta[None, :])
            of_values += product(rounded(p, C.LOW), grads, C.LOW_PRECISION)
            of_keys += product(rounded(of_scores, C.LOW), x.to(C.LOW), C.LOW_PRECISION)
        if C.GAUSSIAN:
            of_keys -= mass[:, None] * y.to(C.ACC)
        of_keys *= C.SCALE

        if group is not None:
            own = tl.load(group + b * sizes.S + positions, mask=live, other=-1)
        else:
            own = FIRST + (positions.to(tl.int64) * sizes.M // sizes.S).to(tl.int32)
        part = live & (own >= 0)
        places = land_grad + ((bh * sizes.ROWS + own).to(tl.int64) * C.D)[:, None] + wide[None, :]
        of_keys += tl.load(places, mask=part[:, None] & (wide < C.D)[None, :], other=0.0)
        if few is not None:
            # In a sequence with few keys, landmark j is key j, and the middle holds the values of the keys.
            middle = live & (own >= tl.where(tl.load(few + b) == 1, 0, sizes.ROWS))
            places = middle_grad + ((bh * sizes.M + own - FIRST).to(tl.int64) * C.E)[:, None] + wide_e[None, :]
            of_values += tl.load(places, mask=middle[:, None] & (wide_e < C.E)[None, :], other=0.0)
        if C.TAPS > 0:
            # Token j has the weight w[j - i + half] in the output of token i. A padding token has no output; here
            # `query_keep` is `keep`.
            of_values = add_neighbours(of_values, near, tail, conv, out_grad, b, h, start, query_keep, sizes.S, True, C)
        inside = positions < sizes.S
        of_keys, of_values = tl.where(live[:, None], of_keys, 0.0), tl.where(live[:, None], of_values, 0.0)
        store_tokens(k_grad, b, h, start, of_keys, inside, C.D, C.BLOCK_N, C.BLOCK_D)
        store_tokens(v_grad, b, h, start, of_values, inside, C.E, C.BLOCK_N, C.BLOCK_E)
