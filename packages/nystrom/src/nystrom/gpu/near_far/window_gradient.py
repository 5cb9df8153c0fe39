r"""Gradients of the bias of positions in windows.

The bias of a key of a window depends on its place there and on that of the query in its block. A program holds a tile
of such pairs, and adds up the gradients of their scores over a span of blocks; torch adds up the spans, and pairs of
one distance.
"""

import triton
import triton.language as tl

from nystrom.gpu.arithmetic import load_normaliser, load_tokens, product, weights_again
from nystrom.gpu.near_far.window import at_distance, begin_of, scores_with_bias, window_clusters


@triton.jit
def near_far_window(q, k, v, cluster, first, logs, deltas, grad, sums, SPAN, strip, sizes, C: tl.constexpr):
    """Sums over a span of blocks of the gradients of scores, for each query of a block and each key of its window."""
    length, parts = sizes.SIZE + 2 * sizes.REACH, (sizes.SIZE + C.BLOCK_N - 1) // C.BLOCK_N
    tiles = (length + C.BLOCK_W - 1) // C.BLOCK_W
    pid = tl.program_id(0)
    w, part = pid % tiles * C.BLOCK_W, pid // tiles % parts
    bh, split = pid // tiles // parts % sizes.BH, pid // tiles // parts // sizes.BH
    b, h = bh // sizes.H, bh % sizes.H
    begin, inside, place = begin_of(first, b), part * C.BLOCK_N + tl.arange(0, C.BLOCK_N), w + tl.arange(0, C.BLOCK_W)
    total = tl.full((C.BLOCK_N, C.BLOCK_W), 0, C.ACC)
    for block in range(split * SPAN, tl.minimum(split * SPAN + SPAN, sizes.BLOCKS)):
        start = begin + block * sizes.SIZE
        here, window, row = start + part * C.BLOCK_N, start - sizes.REACH, bh * tl.full((), sizes.N, tl.int64) + start
        live = (inside < sizes.SIZE) & (start + inside < sizes.N)
        x = load_tokens(q, b, h, here, live, C.D, C.BLOCK_N, C.BLOCK_D)
        grads = load_tokens(grad, b, h, here, live, C.E, C.BLOCK_N, C.BLOCK_E).to(C.LOW)
        seen = window_clusters(cluster, bh, window, w, length, sizes.S, sizes.M, C.BLOCK_W) < sizes.M
        y = load_tokens(k, b, h, window + w, seen, C.D, C.BLOCK_W, C.BLOCK_D)
        values = load_tokens(v, b, h, window + w, seen, C.E, C.BLOCK_W, C.BLOCK_E).to(C.LOW)
        top, log = load_normaliser(logs, row + inside, live)
        delta = tl.load(deltas + row + inside, mask=live, other=0.0)
        s = scores_with_bias(x, y, tl.where(seen, 0.0, float("-inf")), C)
        s = at_distance(s, strip, h, (place - sizes.REACH)[None, :] - inside[:, None], sizes.FURTHEST)
        of_weights = product(grads, tl.trans(values), C.LOW_PRECISION)
        total += weights_again(s, top[:, None], log[:, None]) * (of_weights - delta[:, None])
    row = (split * sizes.BH + bh) * tl.full((), sizes.SIZE, tl.int64) + inside
    there = (inside < sizes.SIZE)[:, None] & (place < length)[None, :]
    tl.store(sums + (row * length)[:, None] + place[None, :], total, mask=there)
