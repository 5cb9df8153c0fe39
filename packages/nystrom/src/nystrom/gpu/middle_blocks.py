r"""The results of `nystrom.gpu.middle`, block by block: for the Gaussian kernel, and for more than 64 landmarks.

With softmax, $A = \mathrm{softmax}(c\, \tilde Q \tilde K^\top)$ is inverted as it is. With the Gaussian kernel,
$$K_{ij} = e^{-\frac c2 \|l_i - l_j\|^2}, \quad \rho_i = \Big(\gamma + \sum_j K_{ij}\Big)^{-1/2}, \quad
A_{ij} = \rho_i (K + \gamma I)_{ij}\, \rho_j, \quad M_i = \rho_i \sum_j Z_{ij}\, \rho_j R_j,$$
where Z is the inverse of A, R the right factor times the values, and M the middle. With G the gradient of A, and the
gradient of $\rho_i$ in full,
$$g_i = \sum_j (W_{ij} + W_{ji})\, \rho_j + \frac1{\rho_i} \sum_j (G_{ij} A_{ij} + G_{ji} A_{ji}), \qquad
W_{ij} = Z_{ij}\, (\partial M_i \cdot R_j),$$
landmark i receives $\sum_j (t_{ij} + t_{ji})(l_j - l_i)$ with
$t_{ij} = c\, A_{ij}\, (G_{ij} - \tfrac12 g_i \rho_i^2 / \rho_j)$; the diagonal, where A holds the ridge, adds nothing.

Distances are those of landmarks around their mean: a common offset costs digits.

Plain form: `nystrom.reference.nystrom` and, with the Gaussian kernel, `ridged_inverse`.
"""

import triton
import triton.language as tl

from nystrom.gpu.arithmetic import load_matrix, log_weights, place_of, product, softmax_rows, store_matrix
from nystrom.gpu.inverse import ROWS, load_tile, store_tile


@triton.jit
def _centre(table, bh, sizes, C: tl.constexpr):
    """The mean of the landmarks."""
    total = tl.full((C.BLOCK_D,), 0, C.ACC)
    for i in range(0, sizes.M, C.BLOCK_N):
        total += tl.sum(load_matrix(table, bh * sizes.ROWS + i, sizes.M - i, C.D, C.BLOCK_N, C.BLOCK_D), 0)
    return total / sizes.M


@triton.jit
def _landmarks(table, centre, bh, first, sizes, C: tl.constexpr):
    """A block of landmarks from row `first` of the table on, for the Gaussian kernel relative to their mean."""
    x = load_matrix(table, bh * sizes.ROWS + first, sizes.ROWS - first, C.D, C.BLOCK_N, C.BLOCK_D)
    return x - centre[None, :] if C.GAUSSIAN else x


@triton.jit
def _kind(few, bh, sizes):
    """Whether the sequence has few keys (1) or few queries (2), see `nystrom.gpu.landmark_plan`."""
    kind = 0
    if few is not None:
        kind = tl.load(few + bh // sizes.H)
    return kind


@triton.jit
def matrix_blocks(table, few, matrix, roots, sizes, GAMMA: tl.constexpr, C: tl.constexpr):
    """One matrix A, with the Gaussian kernel also the roots rho; with softmax the identity for short sequences."""
    bh, M = tl.program_id(0).to(tl.int64), sizes.M
    place, columns = matrix + bh * M * M, tl.arange(0, C.BLOCK_M)
    centre = _centre(table, bh, sizes, C)
    for i in range(0, M, C.BLOCK_N):
        x = _landmarks(table, centre, bh, i, sizes, C)
        for j in range(0, M, C.BLOCK_N):
            s = log_weights(x, _landmarks(table, centre, bh, sizes.ROWS - M + j, sizes, C), C)
            if C.GAUSSIAN:
                here = i + tl.arange(0, C.BLOCK_N)[:, None] == j + tl.arange(0, C.BLOCK_N)[None, :]
                s = tl.where(here, 1.0 + GAMMA, tl.exp(s))
            store_tile(place, i, j, s, M, C.BLOCK_N, C.BLOCK_N)
    # Other threads of the program have written what this one reads, here and below.
    tl.debug_barrier()
    for i in range(0, M, ROWS):
        rows = i + tl.arange(0, ROWS)
        s = load_tile(place, i, 0, M, False, ROWS, C.BLOCK_M)
        if C.GAUSSIAN:
            tl.store(roots + bh * M + rows, tl.rsqrt(tl.where(rows < M, tl.sum(s, 1), 1.0)), mask=rows < M)
        else:
            a = softmax_rows(tl.where((columns < M)[None, :], s, float("-inf")))
            if few is not None:
                eye = tl.where(rows[:, None] == columns[None, :], 1.0, 0.0).to(C.ACC)
                a = tl.where(_kind(few, bh, sizes) > 0, eye, a)
            store_tile(place, i, 0, a, M, ROWS, C.BLOCK_M)
    if C.GAUSSIAN:
        tl.debug_barrier()
        across = tl.load(roots + bh * M + columns, mask=columns < M, other=0.0)[None, :]
        for i in range(0, M, ROWS):
            rows = i + tl.arange(0, ROWS)
            root = tl.load(roots + bh * M + rows, mask=rows < M, other=0.0)[:, None]
            s = load_tile(place, i, 0, M, False, ROWS, C.BLOCK_M)
            store_tile(place, i, 0, root * s * across, M, ROWS, C.BLOCK_M)


@triton.jit
def _rows_of(x, roots, bh, first, sizes, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr, C: tl.constexpr):
    """A block of rows of a matrix, times the roots if there are any."""
    x = load_matrix(x, bh * sizes.M + first, sizes.M - first, WIDTH, C.BLOCK_N, BLOCK_WIDTH)
    return x if roots is None else x * _roots(roots, bh, first, sizes, C)[:, None]


@triton.jit
def _roots(roots, bh, first, sizes, C: tl.constexpr):
    rows = first + tl.arange(0, C.BLOCK_N)
    return tl.load(roots + bh * sizes.M + rows, mask=rows < sizes.M, other=0.0)


@triton.jit
def middle_blocks(inverse, roots, right, v, starts, stops, few, middle, sizes, C: tl.constexpr):
    """A block of rows of one middle; with few keys their values, and with few queries R."""
    pid, M = tl.program_id(0), sizes.M
    i, bh = pid // sizes.BH * C.BLOCK_N, (pid % sizes.BH).to(tl.int64)
    b, h = bh // sizes.H, bh % sizes.H
    whole = tl.full((C.BLOCK_N, C.BLOCK_E), 0, C.ACC)
    for j in range(0, M, C.BLOCK_N):
        z = load_tile(inverse + bh * M * M, i, j, M, False, C.BLOCK_N, C.BLOCK_N)
        whole += product(z, _rows_of(right, roots, bh, j, sizes, C.E, C.BLOCK_E, C), C.PRECISION)
    if roots is not None:
        whole *= _roots(roots, bh, i, sizes, C)[:, None]
    if few is not None:
        kind, rows, columns = tl.load(few + b), i + tl.arange(0, C.BLOCK_N), tl.arange(0, C.BLOCK_E)
        of_keys, there = b * sizes.ROWS + sizes.ROWS - M + rows, rows < M
        first = tl.load(starts + of_keys, mask=there, other=0)
        # A place without a key may hold NaN, which must not reach the middle.
        some = (tl.load(stops + of_keys, mask=there, other=0) > first) & (rows < tl.where(kind == 1, M, 0))
        places = place_of(v, b, h, 0) + first.to(tl.int64)[:, None] * v.n + columns[None, :]
        values = tl.load(places, mask=some[:, None] & (columns < C.E)[None, :], other=0.0).to(C.ACC)
        given = load_matrix(right, bh * M + i, M - i, C.E, C.BLOCK_N, C.BLOCK_E)
        whole = tl.where(kind == 2, given, tl.where(kind == 1, values, whole))
    store_matrix(middle, bh * M + i, M - i, whole, C.E, C.BLOCK_N, C.BLOCK_E)


@triton.jit
def middle_blocks_backward(
    inverse, roots, right, few, middle_grad, right_grad, inverse_grad, root_grad, deltas, sizes, C: tl.constexpr
):
    """A block of rows of the gradients of R, Z and rho (through M), and of the deltas of R."""
    pid, M = tl.program_id(0), sizes.M
    i, bh = pid // sizes.BH * C.BLOCK_N, (pid % sizes.BH).to(tl.int64)
    square, kind = bh * M * M, _kind(few, bh, sizes)
    grad = load_matrix(middle_grad, bh * M + i, M - i, C.E, C.BLOCK_N, C.BLOCK_E)
    given = load_matrix(right, bh * M + i, M - i, C.E, C.BLOCK_N, C.BLOCK_E)
    of_right, of_root = tl.zeros_like(given), tl.full((C.BLOCK_N,), 0, C.ACC)
    for j in range(0, M, C.BLOCK_N):
        z_turned = load_tile(inverse + square, i, j, M, True, C.BLOCK_N, C.BLOCK_N)
        of_right += product(z_turned, _rows_of(middle_grad, roots, bh, j, sizes, C.E, C.BLOCK_E, C), C.PRECISION)
        whole = product(grad, tl.trans(_rows_of(right, None, bh, j, sizes, C.E, C.BLOCK_E, C)), C.PRECISION)
        if roots is not None:
            across = _roots(roots, bh, j, sizes, C)[None, :]
            other = _rows_of(middle_grad, None, bh, j, sizes, C.E, C.BLOCK_E, C)
            turned = product(given, tl.trans(other), C.PRECISION)
            z = load_tile(inverse + square, i, j, M, False, C.BLOCK_N, C.BLOCK_N)
            of_root += tl.sum((whole * z + turned * z_turned) * across, 1)
            whole *= across * _roots(roots, bh, i, sizes, C)[:, None]
        store_tile(inverse_grad + square, i, j, tl.where(kind > 0, 0.0, whole), M, C.BLOCK_N, C.BLOCK_N)
    rows = i + tl.arange(0, C.BLOCK_N)
    if roots is not None:
        of_right *= _roots(roots, bh, i, sizes, C)[:, None]
        tl.store(root_grad + bh * M + rows, tl.where(kind > 0, 0.0, of_root), mask=rows < M)
    of_right = tl.where(kind == 2, grad, tl.where(kind == 1, 0.0, of_right))
    store_matrix(right_grad, bh * M + i, M - i, of_right, C.E, C.BLOCK_N, C.BLOCK_E)
    tl.store(deltas + bh * M + rows, tl.sum(of_right * given, 1), mask=rows < M)


@triton.jit
def _scores(a, g, i, j, roots, terms, bh, sizes, TURNED: tl.constexpr, C: tl.constexpr):
    """The gradient of the scores of rows i and columns j, or with TURNED of rows j and columns i, turned."""
    M = sizes.M
    weights = load_tile(a, i, j, M, TURNED, C.BLOCK_N, C.BLOCK_N)
    grad = load_tile(g, i, j, M, TURNED, C.BLOCK_N, C.BLOCK_N)
    own, other = _roots(terms, bh, j if TURNED else i, sizes, C), 1.0
    if C.GAUSSIAN:
        # The reciprocals of what lies beyond the matrix must not be infinite.
        other = _roots(roots, bh, i if TURNED else j, sizes, C)
        other = 1.0 / tl.where(other == 0.0, 1.0, other)
        own = own[None, :] * other[:, None] if TURNED else own[:, None] * other[None, :]
    else:
        own = own[None, :] if TURNED else own[:, None]
    return C.SCALE * weights * (grad - own)


@triton.jit
def _with_splits(x, splits_of, SPLITS, bh, i, sizes, C: tl.constexpr):
    for split in range(SPLITS):
        row = (split * sizes.BH + bh) * sizes.M + i
        x += load_matrix(splits_of, row, sizes.M - i, C.D, C.BLOCK_N, C.BLOCK_D)
    return x


@triton.jit
def _store_grad(table_grad, share, value, bh, first, row, sizes, C: tl.constexpr):
    rows = row + tl.arange(0, C.BLOCK_N)
    place = bh * sizes.ROWS + first
    one = tl.load(share + place + rows, mask=rows < sizes.M, other=0.0)
    store_matrix(table_grad, place + row, sizes.M - row, value * one[:, None], C.D, C.BLOCK_N, C.BLOCK_D)


@triton.jit
def table_blocks_backward(
    table, matrix, roots, matrix_grad, terms, few, share, query_sums, key_sums, table_grad, QUERY_SPLITS, KEY_SPLITS,
    sizes, C: tl.constexpr
):  # fmt: skip
    """The gradient that each token of a landmark receives: through the matrix, and from the splits of both passes.

    `terms` holds the gradients of rho through M, and then what is subtracted from the gradients of each row of A.
    """
    bh, M = tl.program_id(0).to(tl.int64), sizes.M
    a, g = matrix + bh * M * M, matrix_grad + bh * M * M
    for i in range(0, M, ROWS):
        rows = i + tl.arange(0, ROWS)
        weighed = load_tile(a, i, 0, M, False, ROWS, C.BLOCK_M) * load_tile(g, i, 0, M, False, ROWS, C.BLOCK_M)
        term = tl.sum(weighed, 1)
        if C.GAUSSIAN:
            turned = load_tile(a, i, 0, M, True, ROWS, C.BLOCK_M) * load_tile(g, i, 0, M, True, ROWS, C.BLOCK_M)
            root = tl.load(roots + bh * M + rows, mask=rows < M, other=1.0)
            through = tl.load(terms + bh * M + rows, mask=rows < M, other=0.0)
            term = 0.5 * root * (root * through + term + tl.sum(turned, 1))
        tl.store(terms + bh * M + rows, term, mask=rows < M)
    # Other threads of the program have written what this one reads.
    tl.debug_barrier()
    centre = _centre(table, bh, sizes, C)
    still = _kind(few, bh, sizes) > 0
    for i in range(0, M, C.BLOCK_N):
        of_queries = tl.full((C.BLOCK_N, C.BLOCK_D), 0, C.ACC)
        of_keys = tl.zeros_like(of_queries)
        total = tl.full((C.BLOCK_N,), 0, C.ACC)
        for j in range(0, M, C.BLOCK_N):
            scores = _scores(a, g, i, j, roots, terms, bh, sizes, False, C)
            turned = _scores(a, g, i, j, roots, terms, bh, sizes, True, C)
            others = _landmarks(table, centre, bh, sizes.ROWS - M + j, sizes, C)
            if C.GAUSSIAN:
                scores += turned
                total += tl.sum(scores, 1)
            else:
                queries = _landmarks(table, centre, bh, j, sizes, C)
                of_keys += product(turned, queries, C.PRECISION)
            of_queries += product(scores, others, C.PRECISION)
        if C.GAUSSIAN:
            of_queries -= total[:, None] * _landmarks(table, centre, bh, i, sizes, C)
        of_queries = _with_splits(tl.where(still, 0.0, of_queries), query_sums, QUERY_SPLITS, bh, i, sizes, C)
        if C.GAUSSIAN:
            of_queries = _with_splits(of_queries, key_sums, KEY_SPLITS, bh, i, sizes, C)
        else:
            of_keys = _with_splits(tl.where(still, 0.0, of_keys), key_sums, KEY_SPLITS, bh, i, sizes, C)
            _store_grad(table_grad, share, of_keys, bh, M, i, sizes, C)
        _store_grad(table_grad, share, of_queries, bh, 0, i, sizes, C)


@triton.jit
def add_up(parts, total, COUNT, SIZE, BLOCK: tl.constexpr):
    """The sum of COUNT parts of SIZE numbers each."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    numbers = tl.load(parts + at, mask=at < SIZE, other=0.0)
    for part in range(1, COUNT):
        numbers += tl.load(parts + part * (SIZE + tl.full((), 0, tl.int64)) + at, mask=at < SIZE, other=0.0)
    tl.store(total + at, numbers.to(total.dtype.element_ty), mask=at < SIZE)
