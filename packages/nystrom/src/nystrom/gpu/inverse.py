r"""The iterative inverse of a batch of small matrices in one launch, and its gradient in another.

$$Z_{k+1} = \tfrac14 Z_k (13 I - A Z_k (15 I - A Z_k (7 I - A Z_k))),$$
with one program per matrix, in float32 at least. The initial value is $A^\top$ divided by $\|A\|_1 \|A\|_\infty$, or by
a given number for each matrix. Plain form: `nystrom.reference.iterative_inverse`.

Matrices of at most LARGEST_WHOLE rows (for the gradient: `largest_whole_backward`) stay in registers; larger ones are
multiplied block by block in scratch memory, which only their own program reads.
"""

import triton
import triton.language as tl

from nystrom.gpu.arithmetic import product

# Rows of a tile that holds whole rows of a matrix.
ROWS = tl.constexpr(16)


@triton.jit
def load_tile(x, i, j, M, TURNED: tl.constexpr, LENGTH: tl.constexpr, WIDTH: tl.constexpr):
    """A part of an M x M matrix, or of its transpose, from row i and column j on, with zeros around it."""
    rows, columns = i + tl.arange(0, LENGTH)[:, None], j + tl.arange(0, WIDTH)[None, :]
    places = columns * M + rows if TURNED else rows * M + columns
    return tl.load(x + places, mask=(rows < M) & (columns < M), other=0.0)


@triton.jit
def store_tile(x, i, j, value, M, LENGTH: tl.constexpr, WIDTH: tl.constexpr):
    """Write a part of an M x M matrix from row i and column j on."""
    rows, columns = i + tl.arange(0, LENGTH)[:, None], j + tl.arange(0, WIDTH)[None, :]
    tl.store(x + rows * M + columns, value, mask=(rows < M) & (columns < M))


@triton.jit
def load_square(x, M, BLOCK: tl.constexpr):
    """One M x M matrix, with zeros around it."""
    return load_tile(x, 0, 0, M, False, BLOCK, BLOCK)


@triton.jit
def store_square(x, value, M, BLOCK: tl.constexpr):
    """Write one M x M matrix."""
    store_tile(x, 0, 0, value, M, BLOCK, BLOCK)


@triton.jit
def next_iterate(a, z, PRECISION: tl.constexpr):
    """One step of the iteration."""
    y = product(a, z, PRECISION)
    x = 7.0 * y - product(y, y, PRECISION)
    x = 15.0 * y - product(y, x, PRECISION)
    return 3.25 * z - 0.25 * product(z, x, PRECISION)


@triton.jit
def inverse_whole(
    a_place, divisors, z_place, M, STEPS, EVERY: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr
):
    """Invert one matrix in registers; with EVERY, write all iterates one after the other, including the last."""
    bh = tl.program_id(0).to(tl.int64)
    a = load_square(a_place + bh * M * M, M, BLOCK)
    if divisors is None:
        divisor = tl.max(tl.sum(tl.abs(a), 0), 0) * tl.max(tl.sum(tl.abs(a), 1), 0)
    else:
        divisor = tl.load(divisors + bh)
    z = tl.trans(a) / divisor
    out = z_place + bh * M * M * ((STEPS + 1) if EVERY else 1)
    for step in range(0, STEPS):
        if EVERY:
            store_square(out + step * M * M, z, M, BLOCK)
        z = next_iterate(a, z, PRECISION)
    store_square(out + (STEPS * M * M if EVERY else 0), z, M, BLOCK)


@triton.jit
def _start_backward(a, of_a, of_z, divisors, divisor_grads, bh):
    """Add the gradient that a matrix receives through the initial value, given the gradient of the initial value."""
    sums, rows = tl.sum(tl.abs(a), 0), tl.sum(tl.abs(a), 1)
    norm_1, norm_inf = tl.max(sums, 0), tl.max(rows, 0)
    if divisors is None:
        divisor = norm_1 * norm_inf
    else:
        divisor = tl.load(divisors + bh)
    of_a += tl.trans(of_z) / divisor
    of_divisor = -tl.sum(tl.sum(of_z * tl.trans(a), 1), 0) / (divisor * divisor)
    if divisors is None:
        # All entries that attain a maximum share its gradient, as in torch.
        sign = tl.where(a > 0, 1.0, tl.where(a < 0, -1.0, 0.0))
        most, widest = (sums == norm_1).to(a.dtype), (rows == norm_inf).to(a.dtype)
        of_a += sign * (most * (of_divisor * norm_inf / tl.sum(most, 0)))[None, :]
        of_a += sign * (widest * (of_divisor * norm_1 / tl.sum(widest, 0)))[:, None]
    else:
        tl.store(divisor_grads + bh, of_divisor)
    return of_a


@triton.jit
def inverse_whole_backward(
    a_place, divisors, iterates, grad, a_grad, divisor_grads, M, STEPS, PRECISION: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Gradient of one matrix, and of its divisor if one was given."""
    bh = tl.program_id(0).to(tl.int64)
    a = load_square(a_place + bh * M * M, M, BLOCK)
    zs = iterates + bh * M * M * (STEPS + 1)
    of_z = load_square(grad + bh * M * M, M, BLOCK)
    of_a = tl.zeros_like(a)
    for back in range(0, STEPS):
        z = load_square(zs + (STEPS - 1 - back) * M * M, M, BLOCK)
        y = product(a, z, PRECISION)
        x1 = 7.0 * y - product(y, y, PRECISION)
        x2 = 15.0 * y - product(y, x1, PRECISION)
        of_x2 = -0.25 * product(tl.trans(z), of_z, PRECISION)
        of_z = 3.25 * of_z - 0.25 * product(of_z, tl.trans(x2), PRECISION)
        of_y = 15.0 * of_x2 - product(of_x2, tl.trans(x1), PRECISION)
        of_x1 = -product(tl.trans(y), of_x2, PRECISION)
        of_y += 7.0 * of_x1 - product(of_x1, tl.trans(y), PRECISION) - product(tl.trans(y), of_x1, PRECISION)
        of_a += product(of_y, tl.trans(z), PRECISION)
        of_z += product(tl.trans(a), of_y, PRECISION)
    of_a = _start_backward(a, of_a, of_z, divisors, divisor_grads, bh)
    store_square(a_grad + bh * M * M, of_a, M, BLOCK)


@triton.jit
def _multiply(
    out, x, y, base, alpha: tl.constexpr, beta: tl.constexpr, M, TURN_X: tl.constexpr, TURN_Y: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Write alpha x @ y + beta base to `out`, optionally with x or y transposed; only `base` may alias `out`."""
    for i in range(0, M, BLOCK):
        for j in range(0, M, BLOCK):
            total = beta * load_tile(base, i, j, M, False, BLOCK, BLOCK)
            for l in range(0, M, BLOCK):
                left, right = (load_tile(x, i, l, M, TURN_X, BLOCK, BLOCK), load_tile(y, l, j, M, TURN_Y, BLOCK, BLOCK))
                total += alpha * product(left, right, PRECISION)
            store_tile(out, i, j, total, M, BLOCK, BLOCK)
    # Makes the result visible to all threads of the program.
    tl.debug_barrier()


@triton.jit
def _norms(a, M, BLOCK_M: tl.constexpr):
    """The sums of the columns of |A|, and its 1-norm and its infinity-norm."""
    columns, widest = tl.full((BLOCK_M,), 0, a.dtype.element_ty), tl.full((), 0, a.dtype.element_ty)
    for i in range(0, M, ROWS):
        part = tl.abs(load_tile(a, i, 0, M, False, ROWS, BLOCK_M))
        columns += tl.sum(part, 0)
        widest = tl.maximum(widest, tl.max(tl.sum(part, 1), 0))
    return columns, tl.max(columns, 0), widest


@triton.jit
def inverse_blocks(
    a_place, divisors, iterates, out, scratch, M, STEPS, PRECISION: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr
):  # fmt: skip
    """Iterate in scratch memory, which holds all iterates if there is no `out`, and two of them otherwise."""
    bh = tl.program_id(0).to(tl.int64)
    size = M * M
    a, y, x = a_place + bh * size, scratch + bh * 3 * size, scratch + bh * 3 * size + size
    x2 = x + size
    zs = iterates + bh * size * ((STEPS + 1) if out is None else 2)
    if divisors is None:
        _, norm_1, norm_inf = _norms(a, M, BLOCK_M)
        divisor = norm_1 * norm_inf
    else:
        divisor = tl.load(divisors + bh)
    for i in range(0, M, ROWS):
        start = load_tile(a, i, 0, M, True, ROWS, BLOCK_M) / divisor
        store_tile(zs, i, 0, start, M, ROWS, BLOCK_M)
    tl.debug_barrier()
    for step in range(0, STEPS):
        z = zs + (step if out is None else step % 2) * size
        following = zs + ((step + 1) if out is None else (step + 1) % 2) * size
        _multiply(y, a, z, a, 1.0, 0.0, M, False, False, PRECISION, BLOCK)
        _multiply(x, y, y, y, -1.0, 7.0, M, False, False, PRECISION, BLOCK)
        _multiply(x2, y, x, y, -1.0, 15.0, M, False, False, PRECISION, BLOCK)
        _multiply(following, z, x2, z, -0.25, 3.25, M, False, False, PRECISION, BLOCK)
    if out is not None:
        for i in range(0, M, ROWS):
            last = load_tile(zs + STEPS % 2 * size, i, 0, M, False, ROWS, BLOCK_M)
            store_tile(out + bh * size, i, 0, last, M, ROWS, BLOCK_M)


@triton.jit
def inverse_blocks_backward(
    a_place, divisors, iterates, grad, of_a_place, of_z_place, divisor_grads, scratch, M, STEPS,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_M: tl.constexpr
):  # fmt: skip
    """Gradient of the matrix, and of its divisor if one was given, in scratch memory."""
    bh = tl.program_id(0).to(tl.int64)
    size = M * M
    a, of_a, of_z = a_place + bh * size, of_a_place + bh * size, of_z_place + bh * 2 * size
    zs, y = iterates + bh * (STEPS + 1) * size, scratch + bh * 6 * size
    x1, x2, of_x1, of_x2, of_y = y + size, y + 2 * size, y + 3 * size, y + 4 * size, y + 5 * size
    for i in range(0, M, ROWS):
        given = load_tile(grad + bh * size, i, 0, M, False, ROWS, BLOCK_M)
        store_tile(of_z, i, 0, given, M, ROWS, BLOCK_M)
        store_tile(of_a, i, 0, tl.zeros_like(given), M, ROWS, BLOCK_M)
    tl.debug_barrier()
    for back in range(0, STEPS):
        z = zs + (STEPS - 1 - back) * size
        new, old = of_z + (back + 1) % 2 * size, of_z + back % 2 * size
        _multiply(y, a, z, a, 1.0, 0.0, M, False, False, PRECISION, BLOCK)
        _multiply(x1, y, y, y, -1.0, 7.0, M, False, False, PRECISION, BLOCK)
        _multiply(x2, y, x1, y, -1.0, 15.0, M, False, False, PRECISION, BLOCK)
        _multiply(of_x2, z, old, old, -0.25, 0.0, M, True, False, PRECISION, BLOCK)
        _multiply(new, old, x2, old, -0.25, 3.25, M, False, True, PRECISION, BLOCK)
        _multiply(of_y, of_x2, x1, of_x2, -1.0, 15.0, M, False, True, PRECISION, BLOCK)
        _multiply(of_x1, y, of_x2, y, -1.0, 0.0, M, True, False, PRECISION, BLOCK)
        _multiply(of_y, of_x1, y, of_y, -1.0, 1.0, M, False, True, PRECISION, BLOCK)
        _multiply(of_y, y, of_x1, of_y, -1.0, 1.0, M, True, False, PRECISION, BLOCK)
        # The term 7 of_x1.
        for i in range(0, M, BLOCK):
            for j in range(0, M, BLOCK):
                total = load_tile(of_y, i, j, M, False, BLOCK, BLOCK)
                total += 7.0 * load_tile(of_x1, i, j, M, False, BLOCK, BLOCK)
                store_tile(of_y, i, j, total, M, BLOCK, BLOCK)
        tl.debug_barrier()
        _multiply(of_a, of_y, z, of_a, 1.0, 1.0, M, False, True, PRECISION, BLOCK)
        _multiply(new, a, of_y, new, 1.0, 1.0, M, True, False, PRECISION, BLOCK)
    _through_start(a, of_a, of_z + STEPS % 2 * size, divisors, divisor_grads, bh, M, BLOCK_M)


@triton.jit
def _through_start(a, of_a, of_z, divisors, divisor_grads, bh, M, BLOCK_M: tl.constexpr):
    """`_start_backward` for matrices in memory: `of_z` holds the gradient of the initial value."""
    columns, norm_1, norm_inf = _norms(a, M, BLOCK_M)
    divisor = norm_1 * norm_inf if divisors is None else tl.load(divisors + bh)
    along, many = tl.full((), 0, a.dtype.element_ty), tl.full((), 0, a.dtype.element_ty)
    for i in range(0, M, ROWS):
        part = load_tile(a, i, 0, M, False, ROWS, BLOCK_M)
        along += tl.sum(tl.sum(part * load_tile(of_z, i, 0, M, True, ROWS, BLOCK_M), 1), 0)
        many += tl.sum((tl.sum(tl.abs(part), 1) == norm_inf).to(part.dtype), 0)
    of_divisor = -along / (divisor * divisor)
    most = (columns == norm_1).to(a.dtype.element_ty)
    column_share = (most * (of_divisor * norm_inf / tl.sum(most, 0)))[None, :]
    for i in range(0, M, ROWS):
        part, total = load_tile(a, i, 0, M, False, ROWS, BLOCK_M), load_tile(of_a, i, 0, M, False, ROWS, BLOCK_M)
        total += load_tile(of_z, i, 0, M, True, ROWS, BLOCK_M) / divisor
        if divisors is None:
            # All entries that attain a maximum share its gradient, as in torch.
            sign = tl.where(part > 0, 1.0, tl.where(part < 0, -1.0, 0.0)).to(part.dtype)
            widest = (tl.sum(tl.abs(part), 1) == norm_inf).to(part.dtype)
            total += sign * (column_share + (widest * (of_divisor * norm_1 / many))[:, None])
        store_tile(of_a, i, 0, total, M, ROWS, BLOCK_M)
    if divisors is not None:
        tl.store(divisor_grads + bh, of_divisor)
