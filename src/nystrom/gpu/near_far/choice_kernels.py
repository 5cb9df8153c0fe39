r"""Kernels that choose heavy keys and clusters as `nystrom.attention.parts.clusters.choose` does.

Tokens are counted by their rank among the real ones of a sequence: with a mask, `places` holds the position of each
rank, and `counts` how many there are. Without one, ranks are positions.

The means of segments, of queries and of keys, are the rows of one table per sequence and head: first MEANS of queries,
then M of keys, the first centres. Keys are taken relative to `centre`. Numbers fixed here are those of `choose` and of
`nystrom.attention.parts.order`.
"""

import triton
import triton.language as tl

from nystrom.gpu.arithmetic import load_matrix, load_tokens, moved, product, real_tokens
from nystrom.gpu.near_far.window import ones_of

# Rounding units by which the scores of equal centres may differ.
ROUNDINGS = tl.constexpr(16)
# An order is the weight's logarithm in steps of 1 / STEPS, then the place.
STEPS, PLACES, FURTHEST = tl.constexpr(2**10), tl.constexpr(2**30), tl.constexpr(2.0**22)
NOT_REAL = tl.constexpr(-(2**63))
# The cluster of a key that has none yet.
FREE = tl.constexpr(-1)


@triton.jit
def _rank(keep, places, counts, b, tokens, BLOCK: tl.constexpr):
    before, row = 0, places + b * tl.full((), tokens, tl.int64)
    for first in range(0, tokens, BLOCK):
        positions = first + tl.arange(0, BLOCK)
        live = real_tokens(keep, b, positions, tokens)
        tl.store(row + before + tl.cumsum(live.to(tl.int32), 0) - 1, positions, mask=live)
        before += tl.sum(live.to(tl.int32), 0)
    tl.store(counts + b, before)


@triton.jit
def near_far_ranks(query_keep, keep, query_places, places, query_counts, counts, N, S, BLOCK: tl.constexpr):
    """The position of each rank, and the number of real tokens, of one side of one sequence, if it has a mask."""
    b = tl.program_id(0) // 2
    if tl.program_id(0) % 2 == 1:
        if keep is not None:
            _rank(keep, places, counts, b, S, BLOCK)
    else:
        if query_keep is not None:
            _rank(query_keep, query_places, query_counts, b, N, BLOCK)


@triton.jit
def _count(counts, b, tokens):
    """Real tokens of a sequence; `counts` may be None."""
    count = tl.full((), 0, tl.int32) + tokens
    if counts is not None:
        count = tl.load(counts + b)
    return count


@triton.jit
def _load_ranks(x, places, strides, b, h, ranks, live, tokens, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    """Tokens of the given ranks, and their positions; zeros where they are not live."""
    positions, wide = ranks, tl.full((), 0, tl.int64)
    if places is not None:
        positions = tl.load(places + b * (tokens + wide) + ranks, mask=live, other=0)
    columns = tl.arange(0, BLOCK_WIDTH)
    row = x + (b + wide) * strides[0] + (h + wide) * strides[1] + (positions + wide)[:, None] * strides[2]
    return tl.load(row + columns[None, :], mask=live[:, None] & (columns < WIDTH)[None, :], other=0.0), positions


@triton.jit
def _mean(
    x,
    centre,
    places,
    counts,
    strides,
    b,
    h,
    bh,
    segment,
    segments,
    tokens,
    D: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # The rank r is in segment floor(r u / c), with u segments that hold tokens.
    count = _count(counts, b, tokens)
    used, wide = tl.maximum(tl.minimum(count, segments), 1), tl.full((), 0, tl.int64)
    start = tl.minimum(((segment + wide) * count + used - 1) // used, count).to(tl.int32)
    stop = tl.minimum(((segment + 1 + wide) * count + used - 1) // used, count).to(tl.int32)
    total = tl.full((BLOCK_D,), 0, ACC)
    for first in range(start, stop, BLOCK_N):
        ranks = first + tl.arange(0, BLOCK_N)
        tokens_here, _ = _load_ranks(x, places, strides, b, h, ranks, ranks < stop, tokens, D, BLOCK_D)
        centred = moved(tokens_here.to(ACC), centre, bh, D, BLOCK_D)
        total += tl.sum(tl.where((ranks < stop)[:, None], centred, 0.0), 0)
    return total / tl.maximum(stop - start, 1).to(ACC)


@triton.jit
def near_far_segments(
    q,
    k,
    query_places,
    places,
    query_counts,
    counts,
    centre,
    table,
    q_strides,
    k_strides,
    H,
    BH,
    N,
    S,
    M,
    MEANS: tl.constexpr,
    D: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One row of the table; the long segments of the queries come first."""
    row, bh = tl.program_id(0) // BH, tl.program_id(0) % BH
    b, h, columns = bh // H, bh % H, tl.arange(0, BLOCK_D)
    if row < MEANS:
        mean = _mean(q, None, query_places, query_counts, q_strides, b, h, bh, row, MEANS, N, D, ACC, BLOCK_N, BLOCK_D)
    else:
        mean = _mean(k, centre, places, counts, k_strides, b, h, bh, row - MEANS, M, S, D, ACC, BLOCK_N, BLOCK_D)
    place = (bh * tl.full((), MEANS + M, tl.int64) + row) * D
    tl.store(table + place + columns, mean, mask=columns < D)


@triton.jit
def near_far_scores(
    k,
    keep,
    centre,
    table,
    scores,
    tops,
    totals,
    k_strides,
    H,
    BH,
    S,
    M,
    SPAN,
    MEANS: tl.constexpr,
    SCALE: tl.constexpr,
    D: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Scores of a span of keys with the mean queries, and for each of these the largest and the sum of exponentials."""
    bh, split = tl.program_id(0) % BH, tl.program_id(0) // BH
    b, h, means = bh // H, bh % H, tl.arange(0, BLOCK_Q)
    wanted = tl.trans(load_matrix(table, bh * (MEANS + M), MEANS, D, BLOCK_Q, BLOCK_D)) * SCALE
    top, total = tl.full((BLOCK_Q,), float("-inf"), ACC), tl.full((BLOCK_Q,), 0, ACC)
    for start in range(split * SPAN, tl.minimum(split * SPAN + SPAN, S), BLOCK_N):
        positions = start + tl.arange(0, BLOCK_N)
        live = real_tokens(keep, b, positions, S)
        y = load_tokens(k, k_strides, b, h, start, live, D, BLOCK_N, BLOCK_D).to(ACC)
        y = moved(y, centre, bh, D, BLOCK_D)
        s = product(y, wanted, PRECISION)
        place = (bh * tl.full((), S, tl.int64) + positions)[:, None] * MEANS + means[None, :]
        tl.store(scores + place, s, mask=(positions < S)[:, None] & (means < MEANS)[None, :])
        s = tl.where(live[:, None], s, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 0))
        # Without a real key so far, this is -inf.
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(top - shift) + tl.sum(tl.exp(s - shift[None, :]), 0)
        top = higher
    place = (split * BH + bh) * MEANS + means
    tl.store(tops + place, top, mask=means < MEANS)
    tl.store(totals + place, total, mask=means < MEANS)


@triton.jit
def near_far_order(
    scores,
    tops,
    totals,
    keep,
    order,
    cluster,
    H,
    BH,
    S,
    M,
    SPANS,
    MEANS: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Numbers that sort keys by their weights, see `in_order`; each real key is free, the others have no cluster."""
    tiles = (S + BLOCK - 1) // BLOCK
    bh, start = tl.program_id(0) // tiles, tl.program_id(0) % tiles * BLOCK
    positions, means = start + tl.arange(0, BLOCK), tl.arange(0, MEANS)
    top, total = tl.full((MEANS,), float("-inf"), ACC), tl.full((MEANS,), 0, ACC)
    for split in range(SPANS):
        place = (split * BH + bh) * MEANS + means
        other = tl.load(tops + place)
        higher = tl.maximum(top, other)
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(top - shift) + tl.load(totals + place) * tl.exp(other - shift)
        top = higher
    row, there = bh * tl.full((), S, tl.int64), positions < S
    s = tl.load(scores + (row + positions)[:, None] * MEANS + means[None, :], mask=there[:, None], other=0.0)
    # A sequence without real keys has no sums.
    shift = tl.where(top == float("-inf"), 0.0, top) + tl.log(tl.where(total > 0.0, total, 1.0))
    logs = s - shift[None, :]
    highest = tl.max(logs, 1)
    weight = highest + tl.log(tl.sum(tl.exp(logs - highest[:, None]), 1))
    # An overflow gives the smallest weight.
    weight = tl.where(weight == weight, tl.minimum(tl.maximum(weight, -FURTHEST), FURTHEST), -FURTHEST)
    level = tl.floor(weight * STEPS + 0.5).to(tl.int64)
    live = real_tokens(keep, bh // H, positions, S)
    tl.store(order + row + positions, tl.where(live, level * PLACES + (PLACES - 1 - positions), NOT_REAL), mask=there)
    tl.store(cluster + row + positions, tl.where(live, FREE, M), mask=there)


@triton.jit
def _nearest(
    x,
    table,
    first,
    filled,
    M,
    D: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The nearest of the first `filled` of M centres, which begin at row `first`; see `nearest_cluster`."""
    length = tl.sum(x * x, 1)
    rounding: tl.constexpr = ROUNDINGS * (2.0**-52 if tl.float64 == ACC else 2.0**-23)
    best, chosen = tl.full((BLOCK_N,), float("-inf"), ACC), tl.full((BLOCK_N,), 0, tl.int32)
    for c in range(0, M, BLOCK_M):
        rows = c + tl.arange(0, BLOCK_M)
        centres = load_matrix(table, first + c, M - c, D, BLOCK_M, BLOCK_D)
        minus = tl.where(rows < tl.minimum(filled, M), -0.5 * tl.sum(centres * centres, 1), float("-inf"))
        scores = product(x, tl.trans(centres), PRECISION) + minus[None, :]
        best = tl.maximum(best, tl.max(scores, 1))
        # The best so far is among these rows, or earlier ones were compared with it.
        near = (scores >= (best - rounding * (length - best))[:, None]) & (rows < M)[None, :]
        last = tl.max(tl.where(near, rows[None, :], -1), 1)
        chosen = tl.where(last >= 0, last, chosen)
    return chosen


@triton.jit
def near_far_centres(
    k,
    places,
    counts,
    top,
    centre,
    table,
    heavy,
    found,
    cluster,
    sample,
    k_strides,
    H,
    S,
    G,
    LISTED,
    M,
    MOVES,
    MOST,
    MEANS: tl.constexpr,
    D: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Take the heavy keys of one sequence and head out of the clusters, and move its centres.

    `top` holds the largest LISTED orders, and `sample` has room for the clusters of MOST sampled keys.
    """
    bh, wide = tl.program_id(0), tl.full((), 0, tl.int64)
    b, h, own = bh // H, bh % H, cluster + bh * (S + wide)
    for start in range(0, G, BLOCK_G):
        place = start + tl.arange(0, BLOCK_G)
        order = tl.load(top + bh * LISTED + place, mask=place < LISTED, other=NOT_REAL)
        there = order > NOT_REAL
        position = tl.where(there, PLACES - 1 - (order & (PLACES - 1)), 0)
        tl.store(heavy + bh * G + place, position, mask=place < G)
        tl.store(found + bh * G + place, there, mask=place < G)
        tl.store(own + position, tl.full((BLOCK_G,), 0, tl.int32) + M, mask=there)
    count, first = _count(counts, b, S), bh * (MEANS + M) + MEANS
    size = tl.minimum(count, tl.minimum(tl.maximum((count + 3) // 4, M), 8 * M))
    # Makes what was stored visible to all threads of the program.
    tl.debug_barrier()
    for step in range(MOVES):
        for start in range(0, size, BLOCK_N):
            place = start + tl.arange(0, BLOCK_N)
            live = place < size
            ranks = (((place + wide) * MOVES + step) * count // tl.maximum((size + wide) * MOVES, 1)).to(tl.int32)
            x, positions = _load_ranks(k, places, k_strides, b, h, ranks, live, S, D, BLOCK_D)
            tokens = moved(x.to(ACC), centre, bh, D, BLOCK_D)
            nearest = _nearest(tokens, table, first, count, M, D, ACC, PRECISION, BLOCK_N, BLOCK_M, BLOCK_D)
            free = tl.load(own + positions, mask=live, other=M) != M
            tl.store(sample + bh * (MOST + wide) + place, tl.where(free, nearest, M), mask=live)
        tl.debug_barrier()
        for c in range(0, M, BLOCK_M):
            rows, columns = c + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
            total, number = tl.full((BLOCK_M, BLOCK_D), 0, ACC), tl.full((BLOCK_M,), 0, ACC)
            for start in range(0, size, BLOCK_N):
                place = start + tl.arange(0, BLOCK_N)
                live = place < size
                ranks = (((place + wide) * MOVES + step) * count // tl.maximum((size + wide) * MOVES, 1)).to(tl.int32)
                x, _ = _load_ranks(k, places, k_strides, b, h, ranks, live, S, D, BLOCK_D)
                nearest = tl.load(sample + bh * (MOST + wide) + place, mask=live, other=M)
                # The sums of 16-bit tokens lose few digits, and are faster.
                if x.dtype == ACC:
                    x = moved(x, centre, bh, D, BLOCK_D)
                member = (rows[:, None] == nearest[None, :]) & (rows < M)[:, None]
                total += product(ones_of(member, x.dtype), x, PRECISION)
                number += tl.sum(member.to(ACC), 1)
            place = table + (first + c + wide + tl.arange(0, BLOCK_M))[:, None] * D + columns[None, :]
            # A cluster without sampled keys keeps its centre.
            changed = ((rows < M) & (number > 0.0))[:, None] & (columns < D)[None, :]
            mean = total / tl.maximum(number, 1.0)[:, None]
            if k.dtype.element_ty != ACC:
                mean = moved(mean, centre, bh, D, BLOCK_D)
            tl.store(place, mean, mask=changed)
        tl.debug_barrier()


@triton.jit
def near_far_nearest(
    k,
    counts,
    centre,
    table,
    cluster,
    k_strides,
    H,
    S,
    M,
    MEANS: tl.constexpr,
    D: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The nearest centre of each free key of a tile."""
    tiles = (S + BLOCK_N - 1) // BLOCK_N
    bh, start = tl.program_id(0) // tiles, tl.program_id(0) % tiles * BLOCK_N
    b, h, positions = bh // H, bh % H, start + tl.arange(0, BLOCK_N)
    own = cluster + bh * tl.full((), S, tl.int64) + positions
    free = tl.load(own, mask=positions < S, other=M) != M
    x, first = load_tokens(k, k_strides, b, h, start, free, D, BLOCK_N, BLOCK_D).to(ACC), bh * (MEANS + M) + MEANS
    x = moved(x, centre, bh, D, BLOCK_D)
    count = _count(counts, b, S)
    nearest = _nearest(x, table, first, count, M, D, ACC, PRECISION, BLOCK_N, BLOCK_M, BLOCK_D)
    tl.store(own, nearest, mask=free)
