r"""Kernels that choose heavy keys and clusters as `nystrom.attention.parts.clusters.choose` does.

Tokens are counted by their rank among the real ones of a sequence: with a mask, `places` holds the position of each
rank, and `counts` how many there are. Without one, ranks are positions.

The means of segments, of queries and of keys, are the rows of one table per sequence and head: first MEANS of queries,
then M of keys, the first centres. Keys are taken relative to `centre`, since a common offset would cost digits. Numbers
fixed here are those of `choose` and of `nystrom.attention.parts.order`.
"""

import triton
import triton.language as tl

from nystrom.gpu.arithmetic import load_matrix, load_tokens, place_of, product, real_tokens, rounded
from nystrom.gpu.launch import FLOAT32_PRECISION
from nystrom.gpu.near_far.window import ones_of
from nystrom.landmarks import MIDDLE_TOKENS

# Rounding units by which the scores of equal centres may differ.
ROUNDINGS = tl.constexpr(16)
# An order is the weight's logarithm in steps of 1 / STEPS, then the place.
STEPS, PLACES, FURTHEST = tl.constexpr(2**10), tl.constexpr(2**30), tl.constexpr(2.0**22)
# Order of a padded token: NOT_REAL plus its place. ABSENT marks an empty slot. Both sort below every real key.
NOT_REAL, ABSENT = tl.constexpr(1 - 2**63), tl.constexpr(-(2**63))
_SOME, _PRECISION = tl.constexpr(MIDDLE_TOKENS), tl.constexpr(FLOAT32_PRECISION)
# Tokens that a program ranks at a time.
_RANKED = tl.constexpr(4096)
# The cluster of a key that has none yet.
FREE = tl.constexpr(-1)


@triton.jit
def _rank(keep, places, counts, b, tokens):
    before, row = 0, places + b * tl.full((), tokens, tl.int64)
    for first in range(0, tokens, _RANKED):
        positions = first + tl.arange(0, _RANKED)
        live = real_tokens(keep, b, positions, tokens)
        tl.store(row + before + tl.cumsum(live.to(tl.int32), 0) - 1, positions, mask=live)
        before += tl.sum(live.to(tl.int32), 0)
    tl.store(counts + b, before)


@triton.jit
def near_far_ranks(query_keep, keep, query_places, places, query_counts, counts, sizes):
    """The position of each rank, and the number of real tokens, of one side of one sequence, if it has a mask."""
    b = tl.program_id(0) // 2
    if tl.program_id(0) % 2 == 1:
        if keep is not None:
            _rank(keep, places, counts, b, sizes.S)
    else:
        if query_keep is not None:
            _rank(query_keep, query_places, query_counts, b, sizes.N)


@triton.jit
def _count(counts, b, tokens):
    """Real tokens of a sequence; `counts` may be None."""
    count = tl.full((), 0, tl.int32) + tokens
    if counts is not None:
        count = tl.load(counts + b)
    return count


@triton.jit
def _positions(places, b, ranks, live, tokens):
    """Positions of the tokens of the given ranks."""
    positions = ranks
    if places is not None:
        positions = tl.load(places + b * tl.full((), tokens, tl.int64) + ranks, mask=live, other=0)
    return positions


@triton.jit
def _load_rows(x, b, h, positions, live, C: tl.constexpr):
    """Tokens at the given positions; zeros where they are not live."""
    columns, row = tl.arange(0, C.BLOCK_D), place_of(x, b, h, positions)[:, None]
    return tl.load(row + columns[None, :], mask=live[:, None] & (columns < C.D)[None, :], other=0.0)


@triton.jit
def _load_centre(centre, bh, C: tl.constexpr):
    columns = tl.arange(0, C.BLOCK_D)
    return tl.load(centre + bh.to(tl.int64) * C.D + columns, mask=columns < C.D, other=0.0)


@triton.jit
def _from_centre(x, centre, bh, live, C: tl.constexpr):
    """Tokens relative to the centre, which may be None; zeros where they are not live."""
    x = x.to(C.ACC)
    if centre is not None:
        at = _load_centre(centre, bh, C)
        x = tl.where(live[:, None], x - at[None, :], 0.0)
    return x


@triton.jit
def near_far_middle(k, places, counts, centre, sizes, C: tl.constexpr):
    """The centre of the keys of one sequence and head, see `nystrom.landmarks.middle_of`."""
    bh, i, columns = tl.program_id(0), tl.arange(0, _SOME), tl.arange(0, C.BLOCK_D)
    b, h = bh // sizes.H, bh % sizes.H
    count = _count(counts, b, sizes.S)
    live = i < count * _SOME
    ranks = (i.to(tl.int64) * count // _SOME).to(tl.int32)
    x = _load_rows(k, b, h, _positions(places, b, ranks, live, sizes.S), live, C).to(C.ACC)
    # The rank of each token in each channel, the earlier of equal ones first.
    smaller = (x[None, :, :] < x[:, None, :]) | (
        (x[None, :, :] == x[:, None, :]) & (i[None, :] < i[:, None])[:, :, None]
    )
    rank = tl.sum(smaller.to(tl.int32), 1)
    low = tl.sum(tl.where(rank == _SOME // 2 - 1, x, 0.0), 0)
    high = tl.sum(tl.where(rank == _SOME // 2, x, 0.0), 0)
    middle = tl.where(tl.abs(low) < tl.abs(high), low, high)
    middle = tl.minimum(tl.maximum(middle, -C.REACH), C.REACH)
    tl.store(centre + bh.to(tl.int64) * C.D + columns, middle, mask=columns < C.D)


@triton.jit
def _mean(x, centre, places, counts, bh, segment, segments, tokens, H, C: tl.constexpr):
    # The rank r is in segment floor(r u / c), with u segments that hold tokens.
    b, h = bh // H, bh % H
    count = _count(counts, b, tokens)
    used, wide = tl.maximum(tl.minimum(count, segments), 1), tl.full((), 0, tl.int64)
    start = tl.minimum(((segment + wide) * count + used - 1) // used, count).to(tl.int32)
    stop = tl.minimum(((segment + 1 + wide) * count + used - 1) // used, count).to(tl.int32)
    total = tl.full((C.BLOCK_D,), 0, C.ACC)
    for first in range(start, stop, C.BLOCK_N):
        ranks = first + tl.arange(0, C.BLOCK_N)
        live = ranks < stop
        here = _load_rows(x, b, h, _positions(places, b, ranks, live, tokens), live, C)
        total += tl.sum(_from_centre(here, centre, bh, live, C), 0)
    return total / tl.maximum(stop - start, 1).to(C.ACC)


@triton.jit
def near_far_segments(q, k, query_places, places, query_counts, counts, centre, table, sizes, C: tl.constexpr):
    """One row of the table; the long segments of the queries come first."""
    row, bh, columns = tl.program_id(0) // sizes.BH, tl.program_id(0) % sizes.BH, tl.arange(0, C.BLOCK_D)
    if row < C.MEANS:
        mean = _mean(q, None, query_places, query_counts, bh, row, C.MEANS, sizes.N, sizes.H, C)
    else:
        mean = _mean(k, centre, places, counts, bh, row - C.MEANS, sizes.M, sizes.S, sizes.H, C)
    place = (bh * tl.full((), C.MEANS + sizes.M, tl.int64) + row) * C.D
    tl.store(table + place + columns, mean, mask=columns < C.D)


@triton.jit
def near_far_scores(k, keep, centre, table, scores, tops, totals, SPAN, sizes, C: tl.constexpr):
    """Scores of a span of keys with the mean queries, and for each of these the largest and the sum of exponentials."""
    bh, split = tl.program_id(0) % sizes.BH, tl.program_id(0) // sizes.BH
    b, h, means = bh // sizes.H, bh % sizes.H, tl.arange(0, C.BLOCK_M)
    wanted = tl.trans(load_matrix(table, bh * (C.MEANS + sizes.M), C.MEANS, C.D, C.BLOCK_M, C.BLOCK_D)) * C.SCALE
    top, total = tl.full((C.BLOCK_M,), float("-inf"), C.ACC), tl.full((C.BLOCK_M,), 0, C.ACC)
    for start in range(split * SPAN, tl.minimum(split * SPAN + SPAN, sizes.S), C.BLOCK_N):
        positions = start + tl.arange(0, C.BLOCK_N)
        live = real_tokens(keep, b, positions, sizes.S)
        y = load_tokens(k, b, h, start, live, C.D, C.BLOCK_N, C.BLOCK_D)
        s = product(_from_centre(y, centre, bh, live, C), wanted, _PRECISION)
        place = (bh * tl.full((), sizes.S, tl.int64) + positions)[:, None] * C.MEANS + means[None, :]
        tl.store(scores + place, s, mask=(positions < sizes.S)[:, None] & (means < C.MEANS)[None, :])
        s = tl.where(live[:, None], s, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 0))
        # Without a real key so far, this is -inf.
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(top - shift) + tl.sum(tl.exp(s - shift[None, :]), 0)
        top = higher
    place = (split * sizes.BH + bh) * C.MEANS + means
    tl.store(tops + place, top, mask=means < C.MEANS)
    tl.store(totals + place, total, mask=means < C.MEANS)


@triton.jit
def near_far_order(scores, tops, totals, keep, order, largest, cluster, SPANS, sizes, C: tl.constexpr):
    """Numbers that sort keys by their weights, see `in_order`; each real key is free, the others have no cluster.

    With `largest`, also the largest number of each group of keys.
    """
    tiles = (sizes.S + C.BLOCK_N - 1) // C.BLOCK_N
    bh, start = tl.program_id(0) // tiles, tl.program_id(0) % tiles * C.BLOCK_N
    positions, means = start + tl.arange(0, C.BLOCK_N), tl.arange(0, C.MEANS)
    top, total = tl.full((C.MEANS,), float("-inf"), C.ACC), tl.full((C.MEANS,), 0, C.ACC)
    for split in range(SPANS):
        place = (split * sizes.BH + bh) * C.MEANS + means
        other = tl.load(tops + place)
        higher = tl.maximum(top, other)
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(top - shift) + tl.load(totals + place) * tl.exp(other - shift)
        top = higher
    row, there = bh * tl.full((), sizes.S, tl.int64), positions < sizes.S
    s = tl.load(scores + (row + positions)[:, None] * C.MEANS + means[None, :], mask=there[:, None], other=0.0)
    # A sequence without real keys has no sums.
    shift = tl.where(top == float("-inf"), 0.0, top) + tl.log(tl.where(total > 0.0, total, 1.0))
    logs = s - shift[None, :]
    highest = tl.max(logs, 1)
    weight = highest + tl.log(tl.sum(tl.exp(logs - highest[:, None]), 1))
    # An overflow gives the smallest weight.
    weight = tl.where(weight == weight, tl.minimum(tl.maximum(weight, -FURTHEST), FURTHEST), -FURTHEST)
    level = tl.floor(weight * STEPS + 0.5).to(tl.int64)
    live = real_tokens(keep, bh // sizes.H, positions, sizes.S)
    numbers = tl.where(live, level * PLACES, NOT_REAL) + (PLACES - 1 - positions)
    tl.store(order + row + positions, numbers, mask=there)
    if largest is not None:
        groups, all_groups = tl.arange(0, C.BLOCK_N // C.GROUP), (sizes.S + C.GROUP - 1) // C.GROUP
        highest = tl.max(tl.reshape(tl.where(there, numbers, ABSENT), (C.BLOCK_N // C.GROUP, C.GROUP)), 1)
        group = start // C.GROUP + groups
        tl.store(largest + bh * tl.full((), all_groups, tl.int64) + group, highest, mask=group < all_groups)
    tl.store(cluster + row + positions, tl.where(live, FREE, sizes.M), mask=there)


@triton.jit
def _place_of(groups, bh, i, COUNT, sizes, C: tl.constexpr):
    """The place of the i-th of COUNT candidates, which are all keys or, with `groups`, those of G groups."""
    place = i
    if groups is not None:
        group = tl.load(groups + bh * tl.full((), sizes.G, tl.int64) + i // C.GROUP, mask=i < COUNT, other=0)
        place = group * C.GROUP + i % C.GROUP
    return place


@triton.jit
def _rank_of(own, order, groups, bh, COUNT, S, sizes, C: tl.constexpr):
    """How many of COUNT candidates among S have a larger order; all orders differ, apart from ABSENT."""
    larger = tl.full((C.BLOCK_N, C.BLOCK_M), 0, tl.int32)
    for start in range(0, COUNT, C.BLOCK_M):
        i = start + tl.arange(0, C.BLOCK_M)
        place = _place_of(groups, bh, i, COUNT, sizes, C)
        there = (i < COUNT) & (place < S)
        other = tl.load(order + bh * tl.full((), S, tl.int64) + place, mask=there, other=ABSENT)
        larger += (other[None, :] > own[:, None]).to(tl.int32)
    return tl.sum(larger, 1)


@triton.jit
def near_far_groups(largest, groups, GROUPS, sizes, C: tl.constexpr):
    """The G groups of keys with the largest orders: they hold the G largest keys."""
    tiles, wide = (GROUPS + C.BLOCK_N - 1) // C.BLOCK_N, tl.full((), 0, tl.int64)
    bh, i = tl.program_id(0) // tiles, tl.program_id(0) % tiles * C.BLOCK_N + tl.arange(0, C.BLOCK_N)
    own = tl.load(largest + bh * (GROUPS + wide) + i, mask=i < GROUPS, other=ABSENT)
    rank = _rank_of(own, largest, None, bh, GROUPS, GROUPS, sizes, C)
    tl.store(groups + bh * (sizes.G + wide) + rank, i, mask=(i < GROUPS) & (rank < sizes.G))


@triton.jit
def near_far_taken(order, groups, heavy, exists, cluster, COUNT, sizes, C: tl.constexpr):
    """The heavy keys: those of the G largest orders among COUNT candidates. They leave the clusters."""
    tiles, wide = (tl.maximum(COUNT, sizes.G) + C.BLOCK_N - 1) // C.BLOCK_N, tl.full((), 0, tl.int64)
    bh, i = tl.program_id(0) // tiles, tl.program_id(0) % tiles * C.BLOCK_N + tl.arange(0, C.BLOCK_N)
    position = _place_of(groups, bh, i, COUNT, sizes, C)
    own = tl.load(order + bh * (sizes.S + wide) + position, mask=(i < COUNT) & (position < sizes.S), other=ABSENT)
    # Fewer keys than heavy keys are all candidates, and the places after them are empty.
    rank = tl.where(i < COUNT, _rank_of(own, order, groups, bh, COUNT, sizes.S, sizes, C), i)
    listed, there, row = rank < sizes.G, own >= NOT_REAL + PLACES, bh * (sizes.G + wide)
    tl.store(heavy + row + rank, tl.where(there, position, 0), mask=listed)
    tl.store(exists + row + rank, there, mask=listed)
    none = tl.full((C.BLOCK_N,), 0, tl.int32) + sizes.M
    tl.store(cluster + bh * (sizes.S + wide) + position, none, mask=listed & there)


@triton.jit
def _with_centres(x, relative, centres, at):
    """Products of keys relative to their centre and the centres of clusters.

    Keys in bfloat16 are multiplied as they are: a centre is the sum of three parts, whose products are exact.
    """
    if x.dtype == tl.bfloat16:
        high = rounded(centres, tl.bfloat16)
        rest = centres - high.to(tl.float32)
        middle = rounded(rest, tl.bfloat16)
        low = rounded(rest - middle.to(tl.float32), tl.bfloat16)
        s = product(x, tl.trans(low), _PRECISION) + product(x, tl.trans(middle), _PRECISION)
        return s + product(x, tl.trans(high), _PRECISION) - tl.sum(centres * at[None, :], 1)[None, :]
    else:
        return product(relative, tl.trans(centres), _PRECISION)


@triton.jit
def _nearest(x, live, centre, bh, table, first, filled, C: tl.constexpr):
    """The nearest of the `filled` centres that begin at row `first`; see `nearest_cluster`."""
    at, relative = _load_centre(centre, bh, C), _from_centre(x, centre, bh, live, C)
    length = tl.sum(relative * relative, 1)
    rounding: tl.constexpr = ROUNDINGS * (2.0**-52 if tl.float64 == C.ACC else 2.0**-23)
    best, chosen = tl.full((C.BLOCK_N,), float("-inf"), C.ACC), tl.full((C.BLOCK_N,), 0, tl.int32)
    for c in range(0, filled, C.BLOCK_M):
        rows = c + tl.arange(0, C.BLOCK_M)
        centres = load_matrix(table, first + c, filled - c, C.D, C.BLOCK_M, C.BLOCK_D)
        minus = tl.where(rows < filled, -0.5 * tl.sum(centres * centres, 1), float("-inf"))
        scores = _with_centres(x, relative, centres, at) + minus[None, :]
        best = tl.maximum(best, tl.max(scores, 1))
        # The best so far is among these rows, or earlier ones were compared with it.
        near = (scores >= (best - rounding * (length - best))[:, None]) & (rows < filled)[None, :]
        chosen = tl.maximum(chosen, tl.max(tl.where(near, rows[None, :], 0), 1))
    return chosen


@triton.jit
def _sample_size(count, M):
    """How many of `count` real keys a step samples."""
    return tl.minimum(count, tl.minimum(tl.maximum((count + 3) // 4, M), 8 * M))


@triton.jit(do_not_specialize=["STEP"])
def near_far_nearest(k, places, counts, centre, table, cluster, sampled, STEP, sizes, C: tl.constexpr):
    """The nearest centre of each free key of a tile: of those that step STEP samples, or of all.

    The positions of a sample are stored in `sampled`, which is None for all keys.
    """
    most = sizes.MOST if sampled is not None else sizes.S
    tiles = (most + C.BLOCK_N - 1) // C.BLOCK_N
    bh, start = tl.program_id(0) // tiles, tl.program_id(0) % tiles * C.BLOCK_N
    b, h, wide = bh // sizes.H, bh % sizes.H, tl.full((), 0, tl.int64)
    count = _count(counts, b, sizes.S)
    ranks, size = start + tl.arange(0, C.BLOCK_N), count
    live = ranks < size
    if sampled is not None:
        place, size = ranks, _sample_size(count, sizes.M)
        live = place < size
        ranks = ((place + wide) * sizes.MOVES + STEP) * count // tl.maximum((size + wide) * sizes.MOVES, 1)
        ranks = ranks.to(tl.int32)
    positions = _positions(places, b, ranks, live, sizes.S)
    own = cluster + bh * (sizes.S + wide) + positions
    free = tl.load(own, mask=live, other=sizes.M) != sizes.M
    x, first = _load_rows(k, b, h, positions, free, C), bh * (C.MEANS + sizes.M) + C.MEANS
    filled = tl.where(start < size, tl.minimum(count, sizes.M), 0)
    tl.store(own, _nearest(x, free, centre, bh, table, first, filled, C), mask=free)
    if sampled is not None:
        tl.store(sampled + bh * (sizes.MOST + wide) + place, positions, mask=live)


@triton.jit
def near_far_moved(k, counts, cluster, sampled, centre, table, sizes, C: tl.constexpr):
    """Move a block of centres to the means of their sampled keys."""
    blocks, wide = (sizes.M + C.BLOCK_M - 1) // C.BLOCK_M, tl.full((), 0, tl.int64)
    bh, c = tl.program_id(0) // blocks, tl.program_id(0) % blocks * C.BLOCK_M
    b, h, rows, columns = bh // sizes.H, bh % sizes.H, c + tl.arange(0, C.BLOCK_M), tl.arange(0, C.BLOCK_D)
    size = _sample_size(_count(counts, b, sizes.S), sizes.M)
    total, number = tl.full((C.BLOCK_M, C.BLOCK_D), 0, C.ACC), tl.full((C.BLOCK_M,), 0, C.ACC)
    for start in range(0, size, C.BLOCK_N):
        place = start + tl.arange(0, C.BLOCK_N)
        live = place < size
        positions = tl.load(sampled + bh * (sizes.MOST + wide) + place, mask=live, other=0)
        nearest = tl.load(cluster + bh * (sizes.S + wide) + positions, mask=live, other=sizes.M)
        x = _load_rows(k, b, h, positions, live, C)
        member = (rows[:, None] == nearest[None, :]) & (rows < sizes.M)[:, None]
        if x.dtype == C.ACC:
            x = _from_centre(x, centre, bh, live, C)
        total += product(ones_of(member, x.dtype), x, _PRECISION)
        number += tl.sum(member.to(C.ACC), 1)
    mean = total / tl.maximum(number, 1.0)[:, None]
    if k.at.dtype.element_ty != C.ACC:
        # Sums of keys in 16 bits keep the digits that these have.
        mean -= _load_centre(centre, bh, C)[None, :]
    place = table + (bh * (C.MEANS + sizes.M) + C.MEANS + rows + wide)[:, None] * C.D + columns[None, :]
    # A cluster without sampled keys keeps its centre.
    moved = ((rows < sizes.M) & (number > 0.0))[:, None] & (columns < C.D)[None, :]
    tl.store(place, mean, mask=moved)
