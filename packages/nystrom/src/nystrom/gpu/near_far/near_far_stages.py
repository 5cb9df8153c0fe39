"""Launches of the kernels, added to a program; tensors as in `nystrom.gpu.stages`."""

from math import prod
from typing import NamedTuple

import torch

from nystrom.gpu.arguments import Constants
from nystrom.gpu.inputs import plain
from nystrom.gpu.launch import JOINED_ROWS, power, splits
from nystrom.gpu.near_far.keys import near_far_keys, near_far_shared
from nystrom.gpu.near_far.near_far_inputs import NearFarInputs
from nystrom.gpu.near_far.queries import near_far_forward, near_far_queries
from nystrom.gpu.near_far.span_sums import near_far_first, near_far_heavy, near_far_joined, near_far_totals
from nystrom.gpu.near_far.window_gradient import near_far_window
from nystrom.gpu.program import Program, Slot

# Tokens among which a program looks for the first real one at a time.
_COUNTED = 4096


class Totals(NamedTuple):
    """Statistics of all tokens of each cluster."""

    means: Slot  # (b, h, m, d) Their mean key
    sums: Slot  # (b, h, m, e) The sum of their values
    number: Slot  # (b, h, m) Their number


def first_real(program: Program, keep: Slot) -> Slot:
    """The position of the first real token of each sequence."""
    (b, n), first = keep.shape, program.scratch(keep.shape[:1], torch.int32)
    program.launch(near_far_first, b, keep, first, n, BLOCK=_COUNTED)
    return first


def totals(x: NearFarInputs, of: Totals) -> None:
    """Sum keys and values by cluster."""
    (b, h, s, d), e, m, blocks = x.k.shape, x.v.shape[-1], x.m, x.tiles()
    row_blocks = -(-m // blocks.block_m)
    spans, span = splits(s, b * h * row_blocks, m, x.block_n, x.device)
    keys, values, counts = (x.scratch(spans, b, h, m, *width) for width in ((d,), (e,), ()))
    constants = plain(
        D=d, E=e, ACC=x.acc, BLOCK_N=x.block_n, BLOCK_M=blocks.block_m, BLOCK_D=blocks.block_d, BLOCK_E=blocks.block_e
    )
    x.program.launch(
        near_far_totals,
        row_blocks * b * h * spans,
        *(x.k.tokens, x.v.tokens, x.cluster, keys, values, counts, span, x.sizes, constants),
        **x.options(),
    )
    join(x, (keys, values, counts), of)


def join(x: NearFarInputs, sums: tuple[Slot, Slot, Slot | None], of: Totals) -> None:
    """Add the spans of the sums of keys and values, and of counts, of the clusters; keys are divided by the number."""
    rows = prod(of.number.shape)
    x.program.launch(near_far_joined, -(-rows // JOINED_ROWS), *sums, *of, rows, sums[0].shape[0], _joining(x))


def store_heavy(x: NearFarInputs, sums: tuple[Slot, Slot], k_grad: Slot, v_grad: Slot) -> None:
    """Write the gradients of heavy keys, and of their values, from their spans."""
    x.program.launch(
        near_far_heavy,
        -(-x.heavy.shape[2] // JOINED_ROWS) * x.sizes.BH,
        *(*sums, x.heavy, x.exists, k_grad.tokens, v_grad.tokens, sums[0].shape[0], x.sizes, _joining(x)),
    )


def _joining(x: NearFarInputs) -> Constants:
    d, e = x.k.shape[-1], x.v.shape[-1]
    return plain(D=d, E=e, ACC=x.acc, BLOCK_M=JOINED_ROWS, BLOCK_D=power(d), BLOCK_E=power(e))


def rows_of_left(n: int, block: int) -> int:
    """Rows for all blocks, and at least two: with a symbolic length, an export would branch on a single row."""
    return n // block + 2 if block else 0


def attend(x: NearFarInputs, out: Slot, of: Totals, logs: Slot, left: Slot | None) -> None:
    """Compute the outputs `out`, their normalisers, and for each block the number of far tokens of each cluster.

    Without near tokens the latter are not written: all tokens are far, see `of.number`.
    """
    x.program.launch(
        near_far_forward,
        x.sizes.BH * x.blocks * x.parts,
        *(x.q.tokens, x.k.tokens, x.v.tokens, x.heavy, x.exists, x.cluster, x.first, *of),
        *(out.tokens, logs, left if x.block else None, x.strip, x.sizes, x.constants(walk=True)),
        **x.options(walk=True),
    )


def queries(x: NearFarInputs, of: Totals, out: Slot, logs: Slot, grad: Slot, of_heavy: Slot | None = None) -> Slot:
    """Compute the gradients of the queries, and of the scores of heavy keys; returns the deltas of the queries."""
    q_grad, deltas = x.program.like(x.q), x.scratch(*logs.shape[:3])
    x.program.launch(
        near_far_queries,
        x.sizes.BH * x.blocks * x.parts,
        *(x.q.tokens, x.k.tokens, x.v.tokens, x.heavy, x.exists, x.cluster, x.first, *of),
        *(out.tokens, logs, grad.tokens, q_grad.tokens, deltas, x.strip, of_heavy, x.sizes, x.constants(walk=True)),
        **x.options(walk=True),
    )
    return deltas


def shared(x: NearFarInputs, of: Totals | None, logs: Slot, deltas: Slot, grad: Slot) -> tuple[Slot, Slot]:
    """Spans of the gradients of the keys that all queries see, and of shares for their values.

    They are clusters, or the heavy keys if `of` is None; see `nystrom.gpu.near_far.keys`.
    """
    heavy, keys, values, number = (x.heavy, x.k, x.v, x.exists) if of is None else (None, *of)
    (b, h, rows), d, e, constants = number.shape, x.k.shape[-1], x.v.shape[-1], x.constants(near=of is not None)
    row_blocks, tile = -(-rows // x.tiles().block_m), x.block_n
    spans, span = splits(x.blocks * x.parts * tile, b * h * row_blocks, rows, tile, x.device)
    key_sums, value_sums = (x.scratch(spans, b, h, rows, width) for width in (d, e))
    x.program.launch(
        near_far_shared,
        row_blocks * b * h * spans,
        *(x.q.tokens, grad.tokens, x.v.tokens, x.cluster, x.first, heavy, keys.tokens, values.tokens, number),
        *(logs, deltas, key_sums, value_sums, None, span // tile, x.strip, x.sizes._replace(M=rows), constants),
        **x.options(),
    )
    return key_sums, value_sums


def blockwise(x: NearFarInputs, of: Totals, logs: Slot, deltas: Slot, grad: Slot) -> None:
    """Gradients of mean keys, mean values and logarithms of weights of the clusters, given for each block."""
    rows, constants = -(-x.m // x.tiles().block_m), x.constants(near=False)
    widths = of.means.shape[3:], of.sums.shape[4:], ()
    sums = [x.program.result((*of.number.shape, *width), x.acc) for width in widths]
    x.program.launch(
        near_far_shared,
        rows * x.sizes.BH * x.blocks,
        *(x.q.tokens, grad.tokens, x.v.tokens, x.cluster, x.first, None, of.means.tokens, of.sums.tokens, of.number),
        *(logs, deltas, *sums, x.parts, x.strip, x.sizes, constants),
        **x.options(),
    )


def window(x: NearFarInputs, logs: Slot, deltas: Slot, grad: Slot) -> None:
    """Spans of the gradients of the scores of each query of a block and each key of its window."""
    length, constants = x.block + 2 * x.reach, x.constants(walk=True)
    programs = x.sizes.BH * x.parts * -(-length // constants.BLOCK_W.value)
    spans, span = splits(x.blocks, programs, 1, 1, x.device)
    sums = x.program.result((spans, *x.q.shape[:2], x.block, length), x.acc)
    x.program.launch(
        near_far_window,
        programs * spans,
        *(x.q.tokens, x.k.tokens, x.v.tokens, x.cluster, x.first, logs, deltas, grad.tokens, sums, span, x.strip),
        *(x.sizes, constants),
        **x.options(walk=True),
    )


def keys(
    x: NearFarInputs, means: Slot | None, left: Slot | None, logs: Slot, deltas: Slot, grad: Slot,
    through: tuple[Slot | None, Slot | None]
) -> tuple[Slot, Slot]:  # fmt: skip
    """Gradients of keys and values; zeros for heavy ones.

    `left` is the number of far tokens of each cluster for each block; `through` the gradient that each key of a cluster
    gets through its mean, and the one that each value would get if it were far from all queries. With a strip they and
    the means are None.
    """
    constants, k_grad, v_grad = x.constants(), x.program.like(x.k), x.program.like(x.v)
    x.program.launch(
        near_far_keys,
        x.sizes.BH * -(-x.k.shape[2] // constants.BLOCK_W.value),
        *(x.q.tokens, x.k.tokens, x.v.tokens, x.cluster, x.first, means, left, logs, deltas, grad.tokens),
        *(*through, k_grad.tokens, v_grad.tokens, x.strip, x.sizes, constants),
        **x.options(),
    )
    return k_grad, v_grad
