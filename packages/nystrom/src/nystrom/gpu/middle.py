r"""The work between the two passes over the tokens, for one matrix of softmax in a program: the right factor R from
its splits, the landmarks' matrix $A = \mathrm{softmax}(c\, \tilde Q \tilde K^\top)$, its inverse Z, the middle Z R, and
the gradients of all of them except that of the inverse, which `nystrom.gpu.inverse` computes.

In a sequence with few keys the middle holds their values, in one with few queries it is R; the matrix is the identity.

Plain form: `nystrom.reference.nystrom`, between its two factors.
"""

import triton
import triton.language as tl

from nystrom.gpu.arithmetic import load_matrix, place_of, product, softmax_rows, store_matrix, store_normaliser
from nystrom.gpu.inverse import load_square, next_iterate, store_square
from nystrom.gpu.right import joined


@triton.jit
def _matrix(table, bh, kind, M, SHORT: tl.constexpr, C: tl.constexpr):
    """The landmarks' matrix, with zeros around it."""
    rows = tl.arange(0, C.BLOCK_M)
    there = rows < M
    x = load_matrix(table, bh * 2 * M, M, C.D, C.BLOCK_M, C.BLOCK_D)
    y = load_matrix(table, bh * 2 * M + M, M, C.D, C.BLOCK_M, C.BLOCK_D)
    s = tl.where(there[None, :], C.SCALE * product(x, tl.trans(y), C.PRECISION), float("-inf"))
    a = tl.where(there[:, None], softmax_rows(s), 0.0)
    if SHORT:
        eye = tl.where((rows[:, None] == rows[None, :]) & there[:, None], 1.0, 0.0)
        a = tl.where(kind > 0, eye.to(a.dtype), a)
    return a


@triton.jit
def middle_forward(
    table, sums, tops, totals, right, logs, inverse, middle, v, starts, stops, few, SPLITS, STEPS, sizes,
    C: tl.constexpr
):  # fmt: skip
    """The right factor with its normalisers, the inverse, and the middle."""
    bh, rows = tl.program_id(0), tl.arange(0, C.BLOCK_M)
    b, h = bh // sizes.H, bh % sizes.H
    kind, there = 0, rows < sizes.M
    if few is not None:
        kind = tl.load(few + b)
    total_v, top, total = joined(sums, tops, totals, bh, 0, SPLITS, sizes, C)
    store_normaliser(logs, bh * sizes.M + rows, top, total, there)
    store_matrix(right, bh * sizes.M, sizes.M, total_v, C.E, C.BLOCK_M, C.BLOCK_E)
    a = _matrix(table, bh, kind, sizes.M, few is not None, C)
    z = tl.trans(a) / (tl.max(tl.sum(a, 0), 0) * tl.max(tl.sum(a, 1), 0))
    for _ in range(0, STEPS):
        z = next_iterate(a, z, C.PRECISION)
    store_square(inverse + bh.to(tl.int64) * sizes.M * sizes.M, z, sizes.M, C.BLOCK_M)
    # Other threads of the program have written what this one reads.
    tl.debug_barrier()
    given = load_matrix(right, bh * sizes.M, sizes.M, C.E, C.BLOCK_M, C.BLOCK_E)
    whole = product(z, given, C.PRECISION)
    if few is not None:
        columns = tl.arange(0, C.BLOCK_E)
        first = tl.load(starts + b * 2 * sizes.M + sizes.M + rows, mask=there, other=0)
        # A place without a key may hold NaN, which must not reach the middle.
        some = tl.load(stops + b * 2 * sizes.M + sizes.M + rows, mask=there, other=0) > first
        some &= rows < tl.where(kind == 1, sizes.M, 0)
        places = place_of(v, b, h, 0) + first.to(tl.int64)[:, None] * v.n + columns[None, :]
        values = tl.load(places, mask=some[:, None] & (columns < C.E)[None, :], other=0.0).to(C.ACC)
        whole = tl.where(kind == 2, given, tl.where(kind == 1, values, whole))
    store_matrix(middle, bh * sizes.M, sizes.M, whole, C.E, C.BLOCK_M, C.BLOCK_E)


@triton.jit
def middle_backward(
    table, inverse, right, few, middle_sums, matrix, middle_grad, right_grad, inverse_grad, deltas, SPLITS, sizes,
    C: tl.constexpr
):  # fmt: skip
    """The gradient of the middle from its splits, those of R and Z, the deltas of R, and the matrix again."""
    bh, rows = tl.program_id(0), tl.arange(0, C.BLOCK_M)
    kind, square = 0, bh.to(tl.int64) * sizes.M * sizes.M
    if few is not None:
        kind = tl.load(few + bh // sizes.H)
    store_square(matrix + square, _matrix(table, bh, kind, sizes.M, few is not None, C), sizes.M, C.BLOCK_M)
    grad = tl.full((C.BLOCK_M, C.BLOCK_E), 0, C.ACC)
    for split in range(SPLITS):
        grad += load_matrix(middle_sums, (split * sizes.BH + bh) * sizes.M, sizes.M, C.E, C.BLOCK_M, C.BLOCK_E)
    store_matrix(middle_grad, bh * sizes.M, sizes.M, grad, C.E, C.BLOCK_M, C.BLOCK_E)
    z = load_square(inverse + square, sizes.M, C.BLOCK_M)
    given = load_matrix(right, bh * sizes.M, sizes.M, C.E, C.BLOCK_M, C.BLOCK_E)
    of_right = product(tl.trans(z), grad, C.PRECISION)
    of_inverse = product(grad, tl.trans(given), C.PRECISION)
    if few is not None:
        of_right = tl.where(kind == 2, grad, tl.where(kind == 1, 0.0, of_right))
        of_inverse = tl.where(kind > 0, 0.0, of_inverse)
    store_matrix(right_grad, bh * sizes.M, sizes.M, of_right, C.E, C.BLOCK_M, C.BLOCK_E)
    tl.store(deltas + bh * sizes.M + rows, tl.sum(of_right * given, 1), mask=rows < sizes.M)
    store_square(inverse_grad + square, of_inverse, sizes.M, C.BLOCK_M)


@triton.jit
def table_backward(
    table, matrix, matrix_grad, few, share, query_sums, key_sums, table_grad, QUERY_SPLITS, KEY_SPLITS, sizes,
    C: tl.constexpr
):  # fmt: skip
    """The gradient that each token of a landmark receives: through the matrix, and from the splits of both passes."""
    bh, rows = tl.program_id(0), tl.arange(0, C.BLOCK_M)
    first, square = bh * 2 * sizes.M, bh.to(tl.int64) * sizes.M * sizes.M
    a, grad = load_square(matrix + square, sizes.M, C.BLOCK_M), load_square(matrix_grad + square, sizes.M, C.BLOCK_M)
    if few is not None:
        grad = tl.where(tl.load(few + bh // sizes.H) > 0, 0.0, grad)
    scores = C.SCALE * a * (grad - tl.sum(grad * a, 1)[:, None])
    queries = load_matrix(table, first, sizes.M, C.D, C.BLOCK_M, C.BLOCK_D)
    of_keys = product(tl.trans(scores), queries, C.PRECISION)
    for split in range(KEY_SPLITS):
        of_keys += load_matrix(key_sums, (split * sizes.BH + bh) * sizes.M, sizes.M, C.D, C.BLOCK_M, C.BLOCK_D)
    one = tl.load(share + first + sizes.M + rows, mask=rows < sizes.M, other=0.0)
    store_matrix(table_grad, first + sizes.M, sizes.M, of_keys * one[:, None], C.D, C.BLOCK_M, C.BLOCK_D)
    of_queries = product(scores, load_matrix(table, first + sizes.M, sizes.M, C.D, C.BLOCK_M, C.BLOCK_D), C.PRECISION)
    for split in range(QUERY_SPLITS):
        of_queries += load_matrix(query_sums, (split * sizes.BH + bh) * sizes.M, sizes.M, C.D, C.BLOCK_M, C.BLOCK_D)
    one = tl.load(share + first + rows, mask=rows < sizes.M, other=0.0)
    store_matrix(table_grad, first, sizes.M, of_queries * one[:, None], C.D, C.BLOCK_M, C.BLOCK_D)
