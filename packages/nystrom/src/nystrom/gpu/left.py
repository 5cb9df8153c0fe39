r"""The left factor, $\mathrm{out} = \mathrm{softmax}(c\, Q \tilde K^\top) \cdot \mathrm{middle}$, with the skip
convolution of the values added in the same pass, and its gradients.

A program walks over a span of queries, tile by tile. At most BLOCK_M landmarks are read once and kept: all weights of a
tile are computed at once, and the backward passes recompute them without stored normalisers. More are read again for
each tile, block by block, and `left_backward.left_statistics` first computes each query's normaliser and the weighted
mean of the gradients of its weights.

If a sequence has at most m real queries, landmark j is query j and holds its exact result. The weights of such a query
are 1 for its own landmark and 0 for the others, and have no gradient.

Plain form: `nystrom.reference.softmax`; with the Gaussian kernel, `kernelized`.
"""

import triton
import triton.language as tl

from nystrom.gpu.arithmetic import (
    landmark_rows,
    load_tokens,
    log_weights,
    moved,
    product,
    real_tokens,
    rounded,
    softmax_rows,
    store_tokens,
)
from nystrom.gpu.skip_products import add_neighbours, bands


@triton.jit
def left_scores(x, y, columns, count, own, exact, SHORT: tl.constexpr, C: tl.constexpr):
    """Scores against a block of landmarks: -inf beyond `count`, and for `exact` queries 0 at their own landmark."""
    s = tl.where((columns < count)[None, :], log_weights(x, y, C), float("-inf"))
    if SHORT:
        s = tl.where(exact, tl.where(own[:, None] == columns[None, :], 0.0, float("-inf")), s)
    return s


@triton.jit
def left_forward(
    q, land, centre, middle, v, conv, out, query_keep, keep, group, few, real, SPAN, sizes, C: tl.constexpr
):
    """Outputs of one span of queries; with WHOLE, all landmarks are one block, which is read once."""
    pid = tl.program_id(0)
    bh, split = pid % sizes.BH, pid // sizes.BH
    b, h = bh // sizes.H, bh % sizes.H
    count, exact = sizes.M, False
    if few is not None:
        exact = tl.load(few + b) == 2
        count = tl.load(real + b)
    all_y, all_values = landmark_rows(land, middle, bh, 0, sizes, q.at.dtype.element_ty, C)
    if C.TAPS > 0:
        near, tail = bands(conv, h, v.at.dtype.element_ty, False, C)
    for start in range(split * SPAN, tl.minimum(split * SPAN + SPAN, sizes.N), C.BLOCK_N):
        positions = start + tl.arange(0, C.BLOCK_N)
        live = real_tokens(query_keep, b, positions, sizes.N)
        x = moved(load_tokens(q, b, h, start, live, C.D, C.BLOCK_N, C.BLOCK_D), centre, bh, C)
        own = positions
        if few is not None:
            own = tl.load(group + b * sizes.N + positions, mask=live, other=-1)
        if C.WHOLE:
            columns = tl.arange(0, C.BLOCK_M)
            s = left_scores(x, all_y, columns, count, own, exact, few is not None, C)
            p = tl.exp(s) if C.GAUSSIAN else softmax_rows(s)
            total_v = product(rounded(p, C.LOW), all_values, C.LOW_PRECISION)
        else:
            total_v = tl.full((C.BLOCK_N, C.BLOCK_E), 0, C.ACC)
            top, total = tl.full((C.BLOCK_N,), float("-inf"), C.ACC), tl.full((C.BLOCK_N,), 0, C.ACC)
            for first in range(0, sizes.M, C.BLOCK_M):
                y, values = landmark_rows(land, middle, bh, first, sizes, q.at.dtype.element_ty, C)
                columns = first + tl.arange(0, C.BLOCK_M)
                s = left_scores(x, y, columns, count, own, exact, few is not None, C)
                if C.GAUSSIAN:
                    p = tl.exp(s)
                else:
                    higher = tl.maximum(top, tl.max(s, 1))
                    base = tl.where(higher == float("-inf"), 0.0, higher)
                    shrink = tl.exp(top - base)
                    p = tl.exp(s - base[:, None])
                    total = total * shrink + tl.sum(p, 1)
                    total_v = total_v * shrink[:, None]
                    top = higher
                total_v += product(rounded(p, C.LOW), values, C.LOW_PRECISION)
            if not C.GAUSSIAN:
                total_v = total_v * (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]
        if C.TAPS > 0:
            # Token i adds token j with the weight w[j - i + half].
            total_v = add_neighbours(total_v, near, tail, conv, v, b, h, start, keep, sizes.N, False, C)
        total_v = tl.where(live[:, None], total_v, 0.0)
        store_tokens(out, b, h, start, total_v, positions < sizes.N, C.E, C.BLOCK_N, C.BLOCK_E)
