"""Arithmetic that all kernels share: products, rounding, loads of tokens, scores.

Sums are accumulated in float32 at least. float32 operands are multiplied as three tf32 products, whose rounding
together is about that of one float32 product. Weights that the dtype of the tokens cannot hold (float16, and bfloat16
with the Gaussian kernel), and the values that they multiply, are multiplied as tf32, which has the precision of float16
and the range of float32. They are rounded to tf32 here: tensor cores would truncate the last 13 bits, which makes every
weight smaller, but not the sum that divides them.

Triton's interpreter multiplies the bit patterns of bfloat16 tensors, and truncates where a GPU rounds. There, both
operations are done in float32 and rounded to nearest even explicitly, so results equal those of a GPU up to the order
of sums.
"""

import triton
import triton.language as tl
from triton import knobs

INTERPRETED = tl.constexpr(knobs.runtime.interpret)


@triton.jit
def product(x, y, PRECISION: tl.constexpr):
    """Matrix product, accumulated in float32 at least."""
    if PRECISION == "tf32":
        x, y = nearest_tf32(x), nearest_tf32(y)
    if x.dtype == tl.float64:
        return tl.dot(x, y, out_dtype=tl.float64)
    elif INTERPRETED:
        return tl.dot(x.to(tl.float32), y.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(x, y, input_precision=PRECISION)


@triton.jit
def nearest_tf32(x):
    """Values rounded to 10 bits of fraction, ties away from zero; values in other dtypes are unchanged."""
    if x.dtype == tl.float32:
        bits = (x.to(tl.uint32, bitcast=True) + 0x1000) & 0xFFFFE000
        x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    return x


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """Values of x rounded to nearest in another dtype."""
    if INTERPRETED and dtype == tl.bfloat16 and x.dtype == tl.float32:
        bits = x.to(tl.uint32, bitcast=True)
        # Without the lower half, which the interpreter takes into account below the smallest normal number.
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    return x.to(dtype)


@triton.jit
def stored(x, dtype: tl.constexpr):
    """Values of x in the dtype of a result; float16 saturates at its largest number."""
    if dtype == tl.float16:
        x = tl.minimum(tl.maximum(x, -65504.0), 65504.0)
    return rounded(x, dtype)


@triton.jit
def place_of(x, b, h, start):
    """Pointer to the token at `start` of one sequence and head; offsets may exceed 2^31."""
    wide = tl.full((), 0, tl.int64)
    return x.at + (b + wide) * x.b + (h + wide) * x.h + (start + wide) * x.n


@triton.jit
def load_tokens(x, b, h, start, live, WIDTH: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    """Tokens of one sequence and head from `start` on; those that are not live are not read, and are zeros."""
    rows, columns = tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_WIDTH)
    places = place_of(x, b, h, start) + rows[:, None] * x.n + columns[None, :]
    return tl.load(places, mask=live[:, None] & (columns < WIDTH)[None, :], other=0.0)


@triton.jit
def moved(x, centre, bh, C: tl.constexpr):
    """Tokens minus the centre of their sequence and head, which has no gradient; `centre` may be None."""
    if centre is not None:
        columns = tl.arange(0, C.BLOCK_D)
        x -= tl.load(centre + bh.to(tl.int64) * C.D + columns, mask=columns < C.D, other=0.0)[None, :]
    return x


@triton.jit
def store_tokens(
    x, b, h, start, value, there, WIDTH: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_WIDTH: tl.constexpr
):
    """Write tokens of one sequence and head from `start` on, where they exist."""
    rows, columns = tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_WIDTH)
    places = place_of(x, b, h, start) + rows[:, None] * x.n + columns[None, :]
    tl.store(places, stored(value, x.at.dtype.element_ty), mask=there[:, None] & (columns < WIDTH)[None, :])


@triton.jit
def load_matrix(x, first, count, WIDTH: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    """`count` rows of a contiguous matrix from row `first` on, with zeros below them."""
    rows, columns = tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_WIDTH)
    places = x + (first + tl.full((), 0, tl.int64)) * WIDTH + rows[:, None] * WIDTH + columns[None, :]
    return tl.load(places, mask=(rows < count)[:, None] & (columns < WIDTH)[None, :], other=0.0)


@triton.jit
def landmark_rows(land, values, bh, first, sizes, TOKENS: tl.constexpr, C: tl.constexpr):
    """A block of landmarks in the dtype of the tokens, and what belongs to each: the middle, or a gradient."""
    M = sizes.M
    x = rounded(load_matrix(land, bh * sizes.ROWS + first, M - first, C.D, C.BLOCK_M, C.BLOCK_D), TOKENS)
    return x, rounded(load_matrix(values, bh * M + first, M - first, C.E, C.BLOCK_M, C.BLOCK_E), C.LOW)


@triton.jit
def store_matrix(x, first, count, value, WIDTH: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    """Write `count` rows of a contiguous matrix from row `first` on."""
    rows, columns = tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_WIDTH)
    places = x + (first + tl.full((), 0, tl.int64)) * WIDTH + rows[:, None] * WIDTH + columns[None, :]
    tl.store(places, value, mask=(rows < count)[:, None] & (columns < WIDTH)[None, :])


@triton.jit
def real_tokens(keep, b, positions, count):
    """Which positions hold a real token of sequence b, which has `count` tokens; `keep` may be None."""
    live = (positions >= 0) & (positions < count)
    if keep is not None:
        live &= tl.load(keep + (b + tl.full((), 0, tl.int64)) * count + positions, mask=live, other=0) != 0
    return live


@triton.jit
def load_normaliser(logs, places, mask):
    """The largest score of each row, and the logarithm of the sum relative to it; see `store_normaliser`."""
    return tl.load(logs + 2 * places, mask=mask, other=0.0), tl.load(logs + 2 * places + 1, mask=mask, other=0.0)


@triton.jit
def store_normaliser(logs, places, top, total, mask):
    """Store a normaliser as two numbers: the largest score, and the logarithm of the sum relative to it; 0 if empty.

    Their sum would lose digits of the second number, and so of the weights that are computed from it.
    """
    empty = total == 0.0
    tl.store(logs + 2 * places, tl.where(empty, 0.0, top), mask=mask)
    tl.store(logs + 2 * places + 1, tl.where(empty, 0.0, tl.log(tl.where(empty, 1.0, total))), mask=mask)


@triton.jit
def softmax_rows(s):
    """Softmax along the rows; zeros in a row of -inf."""
    top = tl.max(s, 1)
    p = tl.exp(s - tl.where(top == float("-inf"), 0.0, top)[:, None])
    total = tl.sum(p, 1)
    return p * (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]


@triton.jit
def weights_again(s, top, log):
    """Weights from recomputed scores, clamped to the largest: another order of sums may round them above it."""
    return tl.exp(tl.minimum(s - top, 0.0) - log)


@triton.jit
def log_weights(x, y, C: tl.constexpr):
    """Scores of the rows of x and y: c x.y, or -c/2 |x - y|^2, which is clamped to at most 0 against rounding."""
    s = product(x, tl.trans(y), C.PRECISION)
    if C.GAUSSIAN:
        x, y = x.to(C.ACC), y.to(C.ACC)
        s = tl.minimum(s - 0.5 * tl.sum(x * x, 1)[:, None] - 0.5 * tl.sum(y * y, 1)[None, :], 0.0)
    return s * C.SCALE
