r"""The skip convolution of the values, $\mathrm{out}_i = \sum_j w_{j - i + \mathrm{half}}\, v_j$, as matrix products.

The output of a tile of BLOCK_N tokens is the product of a band, which has the kernel in row i shifted by i, and the
tokens around the tile: BLOCK_N of them, and a tail of the other TAPS - 1 in blocks of BLOCK_T. The gradient of the
values is the same product with the taps in reverse order (`BACK`), the gradient of the taps a sum along diagonals.
"""

import triton
import triton.language as tl

from nystrom.gpu.arithmetic import load_tokens, product, real_tokens


@triton.jit
def _band(
    conv, h, away, dtype: tl.constexpr, BACK: tl.constexpr, TAPS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    tap = away + tl.arange(0, WIDTH)[None, :] - tl.arange(0, ROWS)[:, None]
    if BACK:
        tap = TAPS - 1 - tap
    return tl.load(conv + h * TAPS + tap, mask=(tap >= 0) & (tap < TAPS), other=0.0).to(dtype)


@triton.jit
def bands(
    conv, h, dtype: tl.constexpr, BACK: tl.constexpr, TAPS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr
):
    """The band of the first BLOCK_N tokens around a tile, and of the BLOCK_T after them: the same for every tile."""
    near = _band(conv, h, 0, dtype, BACK, TAPS, BLOCK_N, BLOCK_N)
    return near, _band(conv, h, BLOCK_N, dtype, BACK, TAPS, BLOCK_N, BLOCK_T)


@triton.jit
def tokens_around(
    x,
    strides,
    b,
    h,
    start,
    away,
    keep,
    N,
    TAPS: tl.constexpr,
    E: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """WIDTH of the tokens around a tile, from number `away` on; zeros where there is no real one."""
    near = start - TAPS // 2 + away
    live = real_tokens(keep, b, near + tl.arange(0, WIDTH), N)
    return load_tokens(x, strides, b, h, near, live, E, WIDTH, BLOCK_E)


@triton.jit
def add_neighbours(
    total,
    near,
    tail,
    conv,
    x,
    strides,
    b,
    h,
    start,
    keep,
    N,
    BACK: tl.constexpr,
    PRECISION: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """`total` plus the convolution for a tile, given its two bands."""
    total += product(near, tokens_around(x, strides, b, h, start, 0, keep, N, TAPS, E, BLOCK_N, BLOCK_E), PRECISION)
    if TAPS > 1:
        around = tokens_around(x, strides, b, h, start, BLOCK_N, keep, N, TAPS, E, BLOCK_T, BLOCK_E)
        total += product(tail, around, PRECISION)
    # Only a kernel that is longer than a tile has more.
    for away in tl.static_range(BLOCK_N + BLOCK_T, BLOCK_N + TAPS - 1, BLOCK_T):
        band = _band(conv, h, away, x.dtype.element_ty, BACK, TAPS, BLOCK_N, BLOCK_T)
        around = tokens_around(x, strides, b, h, start, away, keep, N, TAPS, E, BLOCK_T, BLOCK_E)
        total += product(band, around, PRECISION)
    return total


@triton.jit
def _along(outer, away, taps, TAPS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_TAPS: tl.constexpr):
    """Sums of a product of a tile and WIDTH tokens around it along its diagonals, one for each tap."""
    offset = away + tl.arange(0, WIDTH)[None, :] - tl.arange(0, ROWS)[:, None]
    result = tl.full((BLOCK_TAPS,), 0, outer.dtype)
    for tap in range(0, TAPS):
        along = tl.sum(tl.sum(tl.where(offset == tap, outer, 0.0), 1), 0)
        result += tl.where(taps == tap, along, 0.0)
    return result


@triton.jit
def skip_taps(
    v,
    grad,
    keep,
    sums,
    v_strides,
    grad_strides,
    H,
    BH,
    N,
    SPAN,
    E: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK_TAPS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Gradient of the skip's kernel from one span of tokens: sums along the diagonals of grad @ neighbourhood^T."""
    pid = tl.program_id(0)
    bh, split = pid % BH, pid // BH
    b, h = bh // H, bh % H
    taps = tl.arange(0, BLOCK_TAPS)
    near, tail = tl.full((BLOCK_N, BLOCK_N), 0, ACC), tl.full((BLOCK_N, BLOCK_T), 0, ACC)
    for start in range(split * SPAN, tl.minimum(split * SPAN + SPAN, N), BLOCK_N):
        live = real_tokens(keep, b, start + tl.arange(0, BLOCK_N), N)
        grads = load_tokens(grad, grad_strides, b, h, start, live, E, BLOCK_N, BLOCK_E)
        around = tokens_around(v, v_strides, b, h, start, 0, keep, N, TAPS, E, BLOCK_N, BLOCK_E)
        near += product(grads, tl.trans(around), PRECISION)
        if TAPS > 1:
            around = tokens_around(v, v_strides, b, h, start, BLOCK_N, keep, N, TAPS, E, BLOCK_T, BLOCK_E)
            tail += product(grads, tl.trans(around), PRECISION)
    result = _along(near, 0, taps, TAPS, BLOCK_N, BLOCK_N, BLOCK_TAPS)
    result += _along(tail, BLOCK_N, taps, TAPS, BLOCK_N, BLOCK_T, BLOCK_TAPS)
    for away in range(BLOCK_N + BLOCK_T, BLOCK_N + TAPS - 1, BLOCK_T):
        tail = tl.full((BLOCK_N, BLOCK_T), 0, ACC)
        for start in range(split * SPAN, tl.minimum(split * SPAN + SPAN, N), BLOCK_N):
            live = real_tokens(keep, b, start + tl.arange(0, BLOCK_N), N)
            grads = load_tokens(grad, grad_strides, b, h, start, live, E, BLOCK_N, BLOCK_E)
            around = tokens_around(v, v_strides, b, h, start, away, keep, N, TAPS, E, BLOCK_T, BLOCK_E)
            tail += product(grads, tl.trans(around), PRECISION)
        result += _along(tail, away, taps, TAPS, BLOCK_N, BLOCK_T, BLOCK_TAPS)
    tl.store(sums + (split * BH + bh) * TAPS + taps, result, mask=taps < TAPS)
