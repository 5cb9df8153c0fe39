r"""Gradients of keys and values, except heavy ones: the part through a token's cluster, and the part from neighbours.

A program holds a tile of tokens and loops over the queries of the blocks whose window holds one of them. So each
gradient is complete when it is written, although windows overlap. A near token has its own weight instead of its
cluster's. So its value gets $(e^{c\, q^\top k - \ln Z} - e^{c\, q^\top \mu - \ln Z})\, G$ from each of those queries,
in addition to what the cluster gives to all of its tokens; the second term is present only if the cluster has far
tokens.
"""

import triton
import triton.language as tl

from nystrom.gpu.arithmetic import load_normaliser, load_tokens, log_weights, product, rounded, weights_again
from nystrom.gpu.near_far.window import begin_of, clusters_of, store_rows


@triton.jit
def _rows_of(table, bh, own, member, M, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    """For each token, the row of its cluster in a table."""
    columns = tl.arange(0, BLOCK_WIDTH)
    places = table + (bh * tl.full((), M, tl.int64) + own)[:, None] * WIDTH + columns[None, :]
    return tl.load(places, mask=member[:, None] & (columns < WIDTH)[None, :], other=0.0)


@triton.jit
def near_far_keys(
    q,
    k,
    v,
    cluster,
    first,
    means,
    left,
    logs,
    deltas,
    grad,
    mean_grad,
    value_grad,
    k_grad,
    v_grad,
    q_strides,
    k_strides,
    v_strides,
    grad_strides,
    k_grad_strides,
    v_grad_strides,
    H,
    N,
    S,
    M,
    SIZE,
    REACH,
    BLOCKS,
    NEAR: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    SCALE: tl.constexpr,
    ACC: tl.constexpr,
    LOW: tl.constexpr,
    PRECISION: tl.constexpr,
    LOW_PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Gradients of a tile of keys and values; zeros for tokens without a cluster."""
    tiles = (S + BLOCK_W - 1) // BLOCK_W
    pid = tl.program_id(0)
    bh, start = pid // tiles, pid % tiles * BLOCK_W
    b, h = bh // H, bh % H
    begin, place = begin_of(first, b), start + tl.arange(0, BLOCK_W)
    positions = begin + place
    own = clusters_of(cluster, bh, positions, positions < S, S, M)
    member = own < M
    of_keys, of_values = tl.full((BLOCK_W, BLOCK_D), 0, ACC), tl.full((BLOCK_W, BLOCK_E), 0, ACC)
    if NEAR:
        y = load_tokens(k, k_strides, b, h, begin + start, member, D, BLOCK_W, BLOCK_D)
        values = load_tokens(v, v_strides, b, h, begin + start, member, E, BLOCK_W, BLOCK_E).to(LOW)
        mean = rounded(_rows_of(means, bh, own, member, M, D, BLOCK_D), q.dtype.element_ty)
        last = tl.minimum((start + BLOCK_W - 1 + REACH) // SIZE, BLOCKS - 1)
        for block in range(tl.maximum(start - REACH, 0) // SIZE, last + 1):
            window = block * SIZE - REACH
            near = member & (place >= window) & (place < window + SIZE + 2 * REACH)
            row = (bh * tl.full((), BLOCKS, tl.int64) + block) * M
            shared = near & (tl.load(left + row + own, mask=member, other=0.0) > 0.0)
            for part in range(0, SIZE, BLOCK_N):
                inside, here = part + tl.arange(0, BLOCK_N), begin + block * SIZE + part
                queries = begin + block * SIZE + inside
                live = (inside < SIZE) & (queries < N)
                x = load_tokens(q, q_strides, b, h, here, live, D, BLOCK_N, BLOCK_D)
                grads = load_tokens(grad, grad_strides, b, h, here, live, E, BLOCK_N, BLOCK_E).to(LOW)
                top, log = load_normaliser(logs, bh * tl.full((), N, tl.int64) + queries, live)
                delta = tl.load(deltas + bh * tl.full((), N, tl.int64) + queries, mask=live, other=0.0)
                s = log_weights(y, x, SCALE, False, ACC, PRECISION)
                s = tl.where(near[:, None] & live[None, :], s, float("-inf"))
                p = weights_again(s, top[None, :], log[None, :])
                s = log_weights(mean, x, SCALE, False, ACC, PRECISION)
                s = tl.where(shared[:, None] & live[None, :], s, float("-inf"))
                less = weights_again(s, top[None, :], log[None, :])
                of_weights = product(values, tl.trans(grads), LOW_PRECISION)
                of_scores = p * (of_weights - delta[None, :])
                of_values += product(rounded(p - less, LOW), grads, LOW_PRECISION)
                of_keys += product(rounded(of_scores, LOW), x.to(LOW), LOW_PRECISION)
    of_keys = of_keys * SCALE + _rows_of(mean_grad, bh, own, member, M, D, BLOCK_D)
    of_values += _rows_of(value_grad, bh, own, member, M, E, BLOCK_E)
    # Places after the last tile stand for the tokens before the first real one, which get zeros.
    turned = tl.where(positions >= tiles * BLOCK_W, positions - tiles * BLOCK_W, positions)
    there = turned < S
    store_rows(k_grad, k_grad_strides, b, h, turned, of_keys, there, D, BLOCK_W, BLOCK_D)
    store_rows(v_grad, v_grad_strides, b, h, turned, of_values, there, E, BLOCK_W, BLOCK_E)
