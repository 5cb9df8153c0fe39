"""Blocks of queries and the windows that they see: what the kernels over tokens share.

The tokens of a sequence are cut into blocks, starting with its first real token, `begin`. A block of SIZE queries sees
a window of LENGTH = SIZE + 2 REACH tokens, starting REACH before the block. Tokens with the cluster number M have no
cluster: they are either heavy, and count among the heavy keys, or not real. Without near tokens (`NEAR` is false),
windows are not used.
"""

import triton
import triton.language as tl

from nystrom.gpu.arithmetic import load_matrix, load_tokens, log_weights, place_of, product, rounded, stored


@triton.jit
def begin_of(first, b):
    """The first token of the first block of a sequence; `first` may be None."""
    begin = tl.full((), 0, tl.int32)
    if first is not None:
        begin = tl.load(first + b)
    return begin


@triton.jit
def clusters_of(cluster, bh, positions, there, S, M):
    """The cluster of each token; M for tokens that are not `there`."""
    own = tl.load(cluster + bh * tl.full((), S, tl.int64) + positions, mask=there, other=0)
    return tl.where(there, own, M)


@triton.jit
def window_clusters(cluster, bh, window, w, LENGTH, S, M, BLOCK_W: tl.constexpr):
    """The clusters of a tile of a window, from its token w on; M outside the window or the sequence."""
    place = w + tl.arange(0, BLOCK_W)
    positions = window + place
    return clusters_of(cluster, bh, positions, (place < LENGTH) & (positions >= 0) & (positions < S), S, M)


@triton.jit
def ones_of(member, dtype: tl.constexpr):
    """1 where a condition holds, via float32: the interpreter would take bits of a boolean for those of bfloat16."""
    return rounded(member.to(tl.float32), dtype)


@triton.jit
def outside_window(total, number, rows, v, cluster, b, h, bh, window, LENGTH, S, M, C: tl.constexpr):
    """Sums of values and numbers of tokens of the clusters `rows`, minus those of the tokens in a window."""
    for w in range(0, LENGTH, C.BLOCK_W):
        own = window_clusters(cluster, bh, window, w, LENGTH, S, M, C.BLOCK_W)
        values = load_tokens(v, b, h, window + w, own < M, C.E, C.BLOCK_W, C.BLOCK_E).to(C.LOW)
        member = rows[:, None] == own[None, :]
        total -= product(ones_of(member, C.LOW), values, C.LOW_PRECISION)
        number -= tl.sum(member.to(number.dtype), 1)
    return total, number


@triton.jit
def far_values(sums, count, c, v, cluster, b, h, bh, block, window, LENGTH, strip, sizes, C: tl.constexpr):
    """Mean values of the far tokens of BLOCK_M clusters from c on, the logarithms of their weights, and their numbers.

    With a `strip`, `sums` has the means and `count` the logarithms, for each block.
    """
    M, rows = sizes.M, c + tl.arange(0, C.BLOCK_M)
    if strip is not None:
        first = (bh * tl.full((), sizes.BLOCKS, tl.int64) + block) * M + c
        log = load_row(count, first, M - c, C.BLOCK_M)
        number = log
        values = load_matrix(sums, first, M - c, C.E, C.BLOCK_M, C.BLOCK_E)
    else:
        total = load_matrix(sums, bh * M + c, M - c, C.E, C.BLOCK_M, C.BLOCK_E)
        number = tl.load(count + bh * M + rows, mask=rows < M, other=0.0)
        if C.NEAR:
            total, number = outside_window(total, number, rows, v, cluster, b, h, bh, window, LENGTH, sizes.S, M, C)
        values, log = total / tl.maximum(number, 1.0)[:, None], logarithm(number)
    return rounded(values, C.LOW), log, number


@triton.jit
def load_row(x, first, count, BLOCK: tl.constexpr):
    """`count` numbers from number `first` on, with -inf after them."""
    place = tl.arange(0, BLOCK)
    return tl.load(x + first + place, mask=place < count, other=float("-inf"))


@triton.jit
def heavy_rows(x, heavy, bh, b, h, g, G, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    """The tokens at BLOCK_M heavy positions from number g on, with zeros below them."""
    rows, columns = g + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_WIDTH)
    positions = tl.load(heavy + bh * G + rows, mask=rows < G, other=0)
    places = place_of(x, b, h, 0) + positions[:, None] * x.n + columns[None, :]
    return tl.load(places, mask=(rows < G)[:, None] & (columns < WIDTH)[None, :], other=0.0)


@triton.jit
def scores_with_bias(x, y, bias, C: tl.constexpr):
    """Scores of queries and keys plus a bias: the logarithm of the number of tokens that each key stands for."""
    return log_weights(x, y, C) + bias[None, :]


@triton.jit
def at_distance(s, strip, h, distance, FURTHEST):
    """Scores plus the bias of the distance of each key from its query, from the row of a head; `strip` may be None."""
    if strip is not None:
        place = tl.minimum(tl.maximum(distance, -FURTHEST), FURTHEST) + FURTHEST
        s += tl.load(strip + h * (2 * FURTHEST + 1) + place)
    return s


@triton.jit
def logarithm(number):
    """The logarithm of a number of tokens; -inf for none."""
    return tl.where(number > 0.0, tl.log(tl.maximum(number, 1.0)), float("-inf"))


@triton.jit
def store_rows(
    x, b, h, positions, value, there, WIDTH: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_WIDTH: tl.constexpr
):
    """Write tokens at any positions of one sequence and head, where they exist."""
    columns, wide = tl.arange(0, BLOCK_WIDTH), tl.full((), 0, tl.int64)
    places = place_of(x, b, h, 0) + (positions + wide)[:, None] * x.n
    tl.store(
        places + columns[None, :], stored(value, x.at.dtype.element_ty), mask=there[:, None] & (columns < WIDTH)[None]
    )
