"""Blocks of queries and the windows that they see: what the kernels over tokens share.

The tokens of a sequence are cut into blocks, starting with its first real token, `begin`. A block of SIZE queries sees
a window of LENGTH = SIZE + 2 REACH tokens, starting REACH before the block. Tokens with the cluster number M have no
cluster: they are either heavy, and count among the heavy keys, or not real. Without near tokens (`NEAR` is false),
windows are not used.
"""

import triton
import triton.language as tl

from nystrom.gpu.arithmetic import load_matrix, load_tokens, log_weights, product, rounded, stored


@triton.jit
def begin_of(first, b):
    """Where the first block of a sequence begins; `first` may be None."""
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
def outside_window(
    total,
    number,
    rows,
    v,
    v_strides,
    cluster,
    b,
    h,
    bh,
    window,
    LENGTH,
    S,
    M,
    E: tl.constexpr,
    LOW: tl.constexpr,
    LOW_PRECISION: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Sums of values and numbers of tokens of the clusters `rows`, minus those of the tokens in a window."""
    for w in range(0, LENGTH, BLOCK_W):
        own = window_clusters(cluster, bh, window, w, LENGTH, S, M, BLOCK_W)
        values = load_tokens(v, v_strides, b, h, window + w, own < M, E, BLOCK_W, BLOCK_E).to(LOW)
        member = rows[:, None] == own[None, :]
        total -= product(ones_of(member, LOW), values, LOW_PRECISION)
        number -= tl.sum(member.to(number.dtype), 1)
    return total, number


@triton.jit
def far_values(
    sums,
    count,
    c,
    v,
    v_strides,
    cluster,
    b,
    h,
    bh,
    window,
    LENGTH,
    S,
    M,
    NEAR: tl.constexpr,
    E: tl.constexpr,
    LOW: tl.constexpr,
    LOW_PRECISION: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Mean values of the far tokens of BLOCK_M clusters from c on, and how many there are."""
    rows = c + tl.arange(0, BLOCK_M)
    total = load_matrix(sums, bh * M + c, M - c, E, BLOCK_M, BLOCK_E)
    number = tl.load(count + bh * M + rows, mask=rows < M, other=0.0)
    if NEAR:
        total, number = outside_window(
            total, number, rows, v, v_strides, cluster, b, h, bh, window, LENGTH, S, M, E, LOW, LOW_PRECISION,
            BLOCK_W, BLOCK_E,
        )  # fmt: skip
    return rounded(total / tl.maximum(number, 1.0)[:, None], LOW), number


@triton.jit
def scores_with_bias(x, y, bias, SCALE: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr):
    """Scores of queries and keys plus a bias: the logarithm of the number of tokens that each key stands for."""
    return log_weights(x, y, SCALE, False, ACC, PRECISION) + bias[None, :]


@triton.jit
def logarithm(number):
    """The logarithm of a number of tokens; -inf for none."""
    return tl.where(number > 0.0, tl.log(tl.maximum(number, 1.0)), float("-inf"))


@triton.jit
def store_rows(
    x, strides, b, h, positions, value, there, WIDTH: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_WIDTH: tl.constexpr
):
    """Write tokens at any positions of one sequence and head, where they exist."""
    columns, wide = tl.arange(0, BLOCK_WIDTH), tl.full((), 0, tl.int64)
    places = x + (b + wide) * strides[0] + (h + wide) * strides[1] + (positions + wide)[:, None] * strides[2]
    tl.store(
        places + columns[None, :], stored(value, x.dtype.element_ty), mask=there[:, None] & (columns < WIDTH)[None]
    )
