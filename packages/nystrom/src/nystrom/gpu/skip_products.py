r"""The skip convolution of the values, $\mathrm{out}_i = \sum_j w_{j - i + \mathrm{half}}\, v_j$, as matrix products.

The output of a tile of BLOCK_N tokens is the product of a band, which has the kernel in row i shifted by i, and the
tokens around the tile: BLOCK_N of them, and a tail of the other TAPS - 1 in blocks of BLOCK_T. The gradient of the
values is the same product with the taps in reverse order (`BACK`), the gradient of the taps a sum along diagonals.

Plain form: `torch.nn.functional.conv2d`, one group a head.
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
def bands(conv, h, dtype: tl.constexpr, BACK: tl.constexpr, C: tl.constexpr):
    """The band of the first BLOCK_N tokens around a tile, and of the BLOCK_T after them: the same for every tile."""
    near = _band(conv, h, 0, dtype, BACK, C.TAPS, C.BLOCK_N, C.BLOCK_N)
    return near, _band(conv, h, C.BLOCK_N, dtype, BACK, C.TAPS, C.BLOCK_N, C.BLOCK_T)


@triton.jit
def tokens_around(x, b, h, start, away, keep, N, WIDTH: tl.constexpr, C: tl.constexpr):
    """WIDTH of the tokens around a tile, from number `away` on; zeros where there is no real one."""
    near = start - C.TAPS // 2 + away
    live = real_tokens(keep, b, near + tl.arange(0, WIDTH), N)
    return load_tokens(x, b, h, near, live, C.E, WIDTH, C.BLOCK_E)


@triton.jit
def add_neighbours(total, near, tail, conv, x, b, h, start, keep, N, BACK: tl.constexpr, C: tl.constexpr):
    """`total` plus the convolution for a tile, given its two bands."""
    total += product(near, tokens_around(x, b, h, start, 0, keep, N, C.BLOCK_N, C), C.PRECISION)
    if C.TAPS > 1:
        around = tokens_around(x, b, h, start, C.BLOCK_N, keep, N, C.BLOCK_T, C)
        total += product(tail, around, C.PRECISION)
    # Only a kernel that is longer than a tile has more.
    for away in tl.static_range(C.BLOCK_N + C.BLOCK_T, C.BLOCK_N + C.TAPS - 1, C.BLOCK_T):
        band = _band(conv, h, away, x.at.dtype.element_ty, BACK, C.TAPS, C.BLOCK_N, C.BLOCK_T)
        around = tokens_around(x, b, h, start, away, keep, N, C.BLOCK_T, C)
        total += product(band, around, C.PRECISION)
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
def skip_taps(v, grad, keep, sums, SPAN, sizes, BLOCK_TAPS: tl.constexpr, C: tl.constexpr):
    """Gradient of the skip's kernel from one span of tokens: sums along the diagonals of grad @ neighbourhood^T."""
    pid = tl.program_id(0)
    bh, split = pid % sizes.BH, pid // sizes.BH
    b, h = bh // sizes.H, bh % sizes.H
    taps = tl.arange(0, BLOCK_TAPS)
    near, tail = tl.full((C.BLOCK_N, C.BLOCK_N), 0, C.ACC), tl.full((C.BLOCK_N, C.BLOCK_T), 0, C.ACC)
    for start in range(split * SPAN, tl.minimum(split * SPAN + SPAN, sizes.N), C.BLOCK_N):
        live = real_tokens(keep, b, start + tl.arange(0, C.BLOCK_N), sizes.N)
        grads = load_tokens(grad, b, h, start, live, C.E, C.BLOCK_N, C.BLOCK_E)
        around = tokens_around(v, b, h, start, 0, keep, sizes.N, C.BLOCK_N, C)
        near += product(grads, tl.trans(around), C.PRECISION)
        if C.TAPS > 1:
            around = tokens_around(v, b, h, start, C.BLOCK_N, keep, sizes.N, C.BLOCK_T, C)
            tail += product(grads, tl.trans(around), C.PRECISION)
    result = _along(near, 0, taps, C.TAPS, C.BLOCK_N, C.BLOCK_N, BLOCK_TAPS)
    result += _along(tail, C.BLOCK_N, taps, C.TAPS, C.BLOCK_N, C.BLOCK_T, BLOCK_TAPS)
    for away in range(C.BLOCK_N + C.BLOCK_T, C.BLOCK_N + C.TAPS - 1, C.BLOCK_T):
        tail = tl.full((C.BLOCK_N, C.BLOCK_T), 0, C.ACC)
        for start in range(split * SPAN, tl.minimum(split * SPAN + SPAN, sizes.N), C.BLOCK_N):
            live = real_tokens(keep, b, start + tl.arange(0, C.BLOCK_N), sizes.N)
            grads = load_tokens(grad, b, h, start, live, C.E, C.BLOCK_N, C.BLOCK_E)
            around = tokens_around(v, b, h, start, away, keep, sizes.N, C.BLOCK_T, C)
            tail += product(grads, tl.trans(around), C.PRECISION)
        result += _along(tail, away, taps, C.TAPS, C.BLOCK_N, C.BLOCK_T, BLOCK_TAPS)
    tl.store(sums + (split * sizes.BH + bh) * C.TAPS + taps, result, mask=taps < C.TAPS)
