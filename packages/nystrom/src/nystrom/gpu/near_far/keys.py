r"""Gradients of keys and values.

**Shared keys**, which all queries of a head see: the heavy keys and the clusters. A program holds a tile of them and
loops over a span of the queries; the results of spans are stored separately and then added. A query gives such a key
$y$ the weight $r e^{c\, q^\top y - \ln Z}$, where r is the number of its tokens that are far from the query's block (1
for a heavy key). The gradient of their mean value is divided equally among the r tokens. Each share is the sum of
$e^{c\, q^\top y - \ln Z} G$ over the queries of all blocks.

**Keys** other than heavy ones: the part through a token's cluster, and the part from neighbours. A program holds a tile
of tokens and loops over the queries of the blocks whose window holds one of them. So each gradient is complete when it
is written, although windows overlap. A near token has its own weight instead of its cluster's. So its value gets
$(e^{c\, q^\top k - \ln Z} - e^{c\, q^\top \mu - \ln Z})\, G$ from each of those queries, in addition to what the
cluster gives to all of its tokens; the second term is present only if the cluster has far tokens.

**With a bias of positions** mean values and weights of the clusters are given for each block. A span is the queries of
one block, the gradients of these numbers are written, and torch hands them on to the tokens.
"""

import triton
import triton.language as tl

from nystrom.gpu.arithmetic import (
    load_matrix,
    load_normaliser,
    load_tokens,
    log_weights,
    product,
    rounded,
    store_matrix,
    weights_again,
)
from nystrom.gpu.near_far.window import (
    at_distance,
    begin_of,
    clusters_of,
    heavy_rows,
    load_row,
    outside_window,
    store_rows,
)


@triton.jit
def near_far_shared(
    q, grad, v, cluster, first, heavy, keys, values, number, logs, deltas, key_sums, value_sums, weight_sums, SPAN,
    strip, sizes, C: tl.constexpr
):  # fmt: skip
    """Sums over a span of queries for M shared keys: tokens of `keys` and `values` at the positions `heavy`, or, where
    that is None, clusters; with `NEAR`, without the tokens of windows.

    With `weight_sums`, the span is block `split`, and `values` and `number` are mean values and logarithms of weights
    of that block.
    """
    row_blocks, parts = (sizes.M + C.BLOCK_M - 1) // C.BLOCK_M, (sizes.SIZE + C.BLOCK_N - 1) // C.BLOCK_N
    pid = tl.program_id(0)
    c, bh, split = pid % row_blocks * C.BLOCK_M, pid // row_blocks % sizes.BH, pid // row_blocks // sizes.BH
    b, h = bh // sizes.H, bh % sizes.H
    rows, begin, length = c + tl.arange(0, C.BLOCK_M), begin_of(first, b), sizes.SIZE + 2 * sizes.REACH
    row = (split * sizes.BH + bh) * sizes.M + c
    if weight_sums is not None:
        row = (bh * tl.full((), sizes.BLOCKS, tl.int64) + split) * sizes.M + c
    if heavy is not None:
        of_heavy = tl.load(heavy + bh * sizes.M + rows, mask=rows < sizes.M, other=0)
        y = heavy_rows(keys, heavy, bh, b, h, c, sizes.M, C.D, C.BLOCK_M, C.BLOCK_D)
        whole = heavy_rows(values, heavy, bh, b, h, c, sizes.M, C.E, C.BLOCK_M, C.BLOCK_E).to(C.ACC)
    else:
        y = rounded(
            load_matrix(keys.at, bh * sizes.M + c, sizes.M - c, C.D, C.BLOCK_M, C.BLOCK_D), q.at.dtype.element_ty
        )
        whole = load_matrix(
            values.at, bh * sizes.M + c if weight_sums is None else row, sizes.M - c, C.E, C.BLOCK_M, C.BLOCK_E
        )
    if weight_sums is not None:
        bias = load_row(number, row, sizes.M - c, C.BLOCK_M)
        all_of_them = tl.full((C.BLOCK_M,), 1, C.ACC)
    else:
        all_of_them = tl.load(number + bh * sizes.M + rows, mask=rows < sizes.M, other=0).to(C.ACC)
    of_bias = tl.full((C.BLOCK_M,), 0, C.ACC)
    of_keys, of_values = tl.full((C.BLOCK_M, C.BLOCK_D), 0, C.ACC), tl.full((C.BLOCK_M, C.BLOCK_E), 0, C.ACC)
    for tile in range(split * SPAN, tl.minimum(split * SPAN + SPAN, sizes.BLOCKS * parts)):
        start, inside = begin + tile // parts * sizes.SIZE, tile % parts * C.BLOCK_N + tl.arange(0, C.BLOCK_N)
        positions, here = start + inside, start + tile % parts * C.BLOCK_N
        live = (inside < sizes.SIZE) & (positions < sizes.N)
        x = load_tokens(q, b, h, here, live, C.D, C.BLOCK_N, C.BLOCK_D)
        grads = load_tokens(grad, b, h, here, live, C.E, C.BLOCK_N, C.BLOCK_E).to(C.LOW)
        place = bh * tl.full((), sizes.N, tl.int64) + positions
        top, log = load_normaliser(logs, place, live)
        delta = tl.load(deltas + place, mask=live, other=0.0)
        total, far = whole, all_of_them
        if C.NEAR:
            total, far = outside_window(
                total, far, rows, v, cluster, b, h, bh, start - sizes.REACH, length, sizes.S, sizes.M, C
            )
        mean = rounded(total / tl.maximum(far, 1.0)[:, None], C.LOW)
        counts = (far > 0.0)[:, None] & live[None, :]
        s = log_weights(y, x, C)
        if weight_sums is not None:
            s += bias[:, None]
        if heavy is not None:
            s = at_distance(s, strip, h, of_heavy[:, None] - positions[None, :], sizes.FURTHEST)
        s = tl.where(counts, s, float("-inf"))
        p = weights_again(s, top[None, :], log[None, :])
        of_weights = product(mean, tl.trans(grads), C.LOW_PRECISION)
        of_scores = p * far[:, None] * (of_weights - delta[None, :])
        if weight_sums is not None:
            of_bias += tl.sum(of_scores, 1)
        of_values += product(rounded(p, C.LOW), grads, C.LOW_PRECISION)
        of_keys += product(rounded(of_scores, C.LOW), x.to(C.LOW), C.LOW_PRECISION)
    store_matrix(key_sums, row, sizes.M - c, of_keys * C.SCALE, C.D, C.BLOCK_M, C.BLOCK_D)
    store_matrix(value_sums, row, sizes.M - c, of_values, C.E, C.BLOCK_M, C.BLOCK_E)
    if weight_sums is not None:
        tl.store(weight_sums + row + tl.arange(0, C.BLOCK_M), of_bias, mask=rows < sizes.M)


@triton.jit
def _rows_of(table, bh, own, member, M, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    """For each token, the row of its cluster in a table."""
    columns = tl.arange(0, BLOCK_WIDTH)
    places = table + (bh * tl.full((), M, tl.int64) + own)[:, None] * WIDTH + columns[None, :]
    return tl.load(places, mask=member[:, None] & (columns < WIDTH)[None, :], other=0.0)


@triton.jit
def near_far_keys(
    q, k, v, cluster, first, means, left, logs, deltas, grad, mean_grad, value_grad, k_grad, v_grad, strip, sizes,
    C: tl.constexpr
):  # fmt: skip
    """Gradients of a tile of keys and values; zeros for tokens without a cluster.

    With a `strip`, only the parts from neighbours; `means`, `left` and the gradients through clusters may be None.
    """
    tiles = (sizes.S + C.BLOCK_W - 1) // C.BLOCK_W
    pid = tl.program_id(0)
    bh, start = pid // tiles, pid % tiles * C.BLOCK_W
    b, h = bh // sizes.H, bh % sizes.H
    begin, place = begin_of(first, b), start + tl.arange(0, C.BLOCK_W)
    positions = begin + place
    own = clusters_of(cluster, bh, positions, positions < sizes.S, sizes.S, sizes.M)
    member = own < sizes.M
    of_keys, of_values = tl.full((C.BLOCK_W, C.BLOCK_D), 0, C.ACC), tl.full((C.BLOCK_W, C.BLOCK_E), 0, C.ACC)
    if C.NEAR:
        y = load_tokens(k, b, h, begin + start, member, C.D, C.BLOCK_W, C.BLOCK_D)
        values = load_tokens(v, b, h, begin + start, member, C.E, C.BLOCK_W, C.BLOCK_E).to(C.LOW)
        if strip is None:
            mean = rounded(_rows_of(means, bh, own, member, sizes.M, C.D, C.BLOCK_D), q.at.dtype.element_ty)
        last = tl.minimum((start + C.BLOCK_W - 1 + sizes.REACH) // sizes.SIZE, sizes.BLOCKS - 1)
        for block in range(tl.maximum(start - sizes.REACH, 0) // sizes.SIZE, last + 1):
            window = block * sizes.SIZE - sizes.REACH
            near = member & (place >= window) & (place < window + sizes.SIZE + 2 * sizes.REACH)
            if strip is None:
                row = (bh * tl.full((), sizes.BLOCKS, tl.int64) + block) * sizes.M
                shared = near & (tl.load(left + row + own, mask=member, other=0.0) > 0.0)
            for part in range(0, sizes.SIZE, C.BLOCK_N):
                inside, here = part + tl.arange(0, C.BLOCK_N), begin + block * sizes.SIZE + part
                queries = begin + block * sizes.SIZE + inside
                live = (inside < sizes.SIZE) & (queries < sizes.N)
                x = load_tokens(q, b, h, here, live, C.D, C.BLOCK_N, C.BLOCK_D)
                grads = load_tokens(grad, b, h, here, live, C.E, C.BLOCK_N, C.BLOCK_E).to(C.LOW)
                top, log = load_normaliser(logs, bh * tl.full((), sizes.N, tl.int64) + queries, live)
                delta = tl.load(deltas + bh * tl.full((), sizes.N, tl.int64) + queries, mask=live, other=0.0)
                s = at_distance(
                    log_weights(y, x, C), strip, h, (begin + place)[:, None] - queries[None, :], sizes.FURTHEST
                )
                s = tl.where(near[:, None] & live[None, :], s, float("-inf"))
                p = weights_again(s, top[None, :], log[None, :])
                own_share = p
                if strip is None:
                    s = log_weights(mean, x, C)
                    s = tl.where(shared[:, None] & live[None, :], s, float("-inf"))
                    own_share = p - weights_again(s, top[None, :], log[None, :])
                of_weights = product(values, tl.trans(grads), C.LOW_PRECISION)
                of_scores = p * (of_weights - delta[None, :])
                of_values += product(rounded(own_share, C.LOW), grads, C.LOW_PRECISION)
                of_keys += product(rounded(of_scores, C.LOW), x.to(C.LOW), C.LOW_PRECISION)
    of_keys = of_keys * C.SCALE
    if strip is None:
        of_keys += _rows_of(mean_grad, bh, own, member, sizes.M, C.D, C.BLOCK_D)
        of_values += _rows_of(value_grad, bh, own, member, sizes.M, C.E, C.BLOCK_E)
    # Places after the last tile stand for the tokens before the first real one, which get zeros.
    turned = tl.where(positions >= tiles * C.BLOCK_W, positions - tiles * C.BLOCK_W, positions)
    there = turned < sizes.S
    store_rows(k_grad, b, h, turned, of_keys, there, C.D, C.BLOCK_W, C.BLOCK_D)
    store_rows(v_grad, b, h, turned, of_values, there, C.E, C.BLOCK_W, C.BLOCK_E)
