"""Launches of the kernels over tokens, added to a program.

Tensors of tokens are (b, h, n, width), with stride 1 along the width and any other strides; new tensors have the layout
of the tensor that they belong to. Small tensors are (b, h, rows, width), contiguous, and in float32 at least.
"""

from typing import NamedTuple

from nystrom.gpu import left as left_kernels
from nystrom.gpu import left_backward as left_backward_kernels
from nystrom.gpu import means as means_kernels
from nystrom.gpu import middle as middle_kernels
from nystrom.gpu import middle_blocks as block_kernels
from nystrom.gpu import right as right_kernels
from nystrom.gpu import skip_products as skip_kernels
from nystrom.gpu.arguments import Constants
from nystrom.gpu.inputs import StageInputs, add_up, plain, triton_dtype
from nystrom.gpu.launch import AVERAGED, FLOAT32_PRECISION, JOINED_ROWS, power, splits, walks
from nystrom.gpu.program import Slot


class Small(NamedTuple):
    """Tensors kept between the passes, beside the tokens."""

    table: Slot  # (b, h, rows, d) The landmarks
    share: Slot  # (b, h, rows) The reciprocal of each one's number of tokens
    inverse: Slot  # (b, h, m, m) The inverse of their matrix
    right: Slot  # (b, h, m, e) The right factor times the values
    logs: Slot  # (b, h, m, 2) Its normalisers; empty for the Gaussian kernel
    middle: Slot  # (b, h, m, e) What the left factor multiplies


def small_shapes(b: int, h: int, d: int, e: int, m: int, gaussian: bool) -> tuple[tuple[int, ...], ...]:
    """The shapes of `Small`."""
    rows = m if gaussian else 2 * m
    return (b, h, rows, d), (b, h, rows), (b, h, m, m), (b, h, m, e), (b, h, 0 if gaussian else m, 2), (b, h, m, e)


def landmarks(x: StageInputs, table: Slot, share: Slot) -> None:
    """Compute the table of landmarks, and the reciprocal of each one's number of tokens."""
    plan, blocks = x.plan, x.tiles()
    ranges = (plan.starts, plan.stops, plan.of_keys) if plan else (None, None, None)
    x.program.launch(
        means_kernels.means,
        x.sizes.BH * x.rows,
        x.q.tokens,
        x.k.tokens,
        x.query_keep,
        x.keep,
        *ranges,
        table,
        share,
        x.sizes,
        # The stage needs few of the constants: a change of another one must not compile it again.
        plain(D=x.q.shape[-1], ACC=x.acc, BLOCK_N=max(16, AVERAGED // blocks.block_d), BLOCK_D=blocks.block_d),
    )


def right_splits(x: StageInputs, land: Slot) -> tuple[Slot, Slot, Slot]:
    """The right factor times the values in splits: sums, and without the Gaussian kernel largest scores and totals."""
    (b, h, s, e), blocks = x.v.shape, x.tiles()
    row_blocks = -(-x.m // blocks.block_m)
    count, span = splits(s, b * h * row_blocks, x.m, blocks.block_n, x.device)
    sums = x.scratch(count, b, h, x.m, e)
    tops, totals = (x.scratch(0 if x.gaussian else count * b * h * x.m) for _ in range(2))
    x.program.launch(
        right_kernels.right_forward,
        row_blocks * b * h * count,
        *(land, x.centre, x.k.tokens, x.v.tokens, x.keep, sums, tops, totals, span, x.sizes, x.constants()),
        **_summing(x),
    )
    return sums, tops, totals


def joined(x: StageInputs, splits_of: tuple[Slot, Slot, Slot], result: Slot, logs: Slot) -> None:
    """Compute the right factor times the values, and its normalisers (empty for the Gaussian kernel)."""
    blocks = plain(E=x.v.shape[-1], ACC=x.acc, BLOCK_M=JOINED_ROWS, BLOCK_E=x.tiles().block_e, GAUSSIAN=x.gaussian)
    x.program.launch(
        right_kernels.combine,
        -(-x.m // JOINED_ROWS) * x.sizes.BH,
        *(*splits_of, result, logs, splits_of[0].shape[0], x.sizes, blocks),
    )


def middle_forward(x: StageInputs, splits_of: tuple[Slot, Slot, Slot], small: Small, steps: int) -> None:
    """Compute the rest of `small` in one launch, see `nystrom.gpu.middle`."""
    starts, stops = (x.plan.starts, x.plan.stops) if x.plan else (None, None)
    x.program.launch(
        middle_kernels.middle_forward,
        x.sizes.BH,
        *(small.table, *splits_of, small.right, small.logs, small.inverse, small.middle),
        *(x.v.tokens, starts, stops, x.few, splits_of[0].shape[0], steps, x.sizes, _square(x)),
    )


def middle_backward(x: StageInputs, small: Small, middle_sums: Slot) -> tuple[Slot, Slot, Slot, Slot, Slot]:
    """The landmarks' matrix, the gradients of the middle, the right factor and the inverse, and the deltas of R."""
    (b, h), e = x.q.shape[:2], x.v.shape[-1]
    matrix, inverse_grad = (x.scratch(b, h, x.m, x.m) for _ in range(2))
    middle_grad, right_grad, deltas = x.scratch(b, h, x.m, e), x.scratch(b, h, x.m, e), x.scratch(b, h, x.m)
    x.program.launch(
        middle_kernels.middle_backward,
        b * h,
        *(small.table, small.inverse, small.right, x.few, middle_sums),
        *(matrix, middle_grad, right_grad, inverse_grad, deltas, middle_sums.shape[0], x.sizes, _square(x)),
    )
    return matrix, middle_grad, right_grad, inverse_grad, deltas


def table_backward(
    x: StageInputs, small: Small, matrix: Slot, matrix_grad: Slot, query_sums: Slot, key_sums: Slot
) -> Slot:
    """The gradient that each token of a landmark receives."""
    table_grad = x.scratch(*small.table.shape)
    x.program.launch(
        middle_kernels.table_backward,
        x.sizes.BH,
        *(small.table, matrix, matrix_grad, x.few, small.share, query_sums, key_sums, table_grad),
        *(query_sums.shape[0], key_sums.shape[0], x.sizes, _square(x)),
    )
    return table_grad


def matrix_blocks(x: StageInputs, table: Slot, gamma: float) -> tuple[Slot, Slot | None]:
    """The landmarks' matrix, and the roots that scale it with the Gaussian kernel, see `nystrom.gpu.middle_blocks`."""
    b, h = x.q.shape[:2]
    matrix, roots = x.scratch(b, h, x.m, x.m), x.scratch(b, h, x.m) if x.gaussian else None
    x.program.launch(
        block_kernels.matrix_blocks,
        b * h,
        *(table, x.few, matrix, roots, x.sizes),
        **{"GAMMA": gamma, "C": _blocks(x), "num_stages": 1},
    )
    return matrix, roots


def middle_blocks(x: StageInputs, small: Small, roots: Slot | None) -> None:
    """Compute the middle."""
    constants, starts, stops = _blocks(x), *((x.plan.starts, x.plan.stops) if x.plan else (None, None))
    x.program.launch(
        block_kernels.middle_blocks,
        -(-x.m // constants.BLOCK_N.value) * x.sizes.BH,
        *(small.inverse, roots, small.right, x.v.tokens, starts, stops, x.few, small.middle, x.sizes, constants),
        num_stages=1,
    )


def middle_blocks_backward(
    x: StageInputs, small: Small, roots: Slot | None, middle_sums: Slot
) -> tuple[Slot, Slot, Slot, Slot, Slot]:
    """The gradients of the middle, the right factor, the inverse and the roots, and the deltas of R."""
    (b, h), e, constants = x.q.shape[:2], x.v.shape[-1], _blocks(x)
    middle_grad, right_grad, inverse_grad = x.summed(middle_sums), x.scratch(b, h, x.m, e), x.scratch(b, h, x.m, x.m)
    root_grad, deltas = (x.scratch(b, h, x.m) for _ in range(2))
    x.program.launch(
        block_kernels.middle_blocks_backward,
        -(-x.m // constants.BLOCK_N.value) * b * h,
        *(small.inverse, roots, small.right, x.few, middle_grad, right_grad, inverse_grad, root_grad, deltas),
        *(x.sizes, constants),
        num_stages=1,
    )
    return middle_grad, right_grad, inverse_grad, root_grad, deltas


def table_blocks_backward(
    x: StageInputs, table: Slot, share: Slot, of_matrix: tuple[Slot, Slot | None, Slot, Slot], query_sums: Slot,
    key_sums: Slot
) -> Slot:  # fmt: skip
    """The gradient that each token of a landmark receives, from the matrix, the roots and their gradients."""
    table_grad = x.scratch(*table.shape)
    x.program.launch(
        block_kernels.table_blocks_backward,
        x.sizes.BH,
        *(table, *of_matrix, x.few, share, query_sums, key_sums, table_grad),
        *(query_sums.shape[0], key_sums.shape[0], x.sizes, _blocks(x)),
        num_stages=1,
    )
    return table_grad


def right_queries(x: StageInputs, land: Slot, grad: Slot, logs: Slot, deltas: Slot) -> Slot:
    """Splits of the gradient of the landmarks as queries of the right factor."""
    (b, h, s, _), blocks = x.v.shape, x.tiles()
    row_blocks = -(-x.m // blocks.block_m)
    count, span = splits(s, b * h * row_blocks, x.m, blocks.block_n, x.device)
    sums = x.scratch(count, b, h, x.m, x.q.shape[-1])
    x.program.launch(
        right_kernels.right_queries,
        row_blocks * b * h * count,
        *(land, x.centre, x.k.tokens, x.v.tokens, x.keep, grad, logs, deltas, sums, span, x.sizes, x.constants()),
        **_summing(x),
    )
    return sums


def right_keys(
    x: StageInputs, land: Slot, grad: Slot, logs: Slot, deltas: Slot, land_grad: Slot, middle_grad: Slot, out_grad: Slot
) -> None:  # fmt: skip
    """Gradients of keys and values."""
    blocks, k_grad, v_grad = x.tiles(), x.program.like(x.k), x.program.like(x.v)
    count, span = walks(x.k.shape[2], x.sizes.BH, blocks.block_n, x.device)
    options, changes = _walking(x), x.walked(skip=True)
    if x.low.itemsize == 2:
        # Wide rows with a skip take too many registers for 4 warps.
        wide = x.conv is not None and blocks.block_e > 64
        options = {"num_stages": min(blocks.stages, 2), "num_warps": 8 if wide else blocks.warps}
    elif x.conv is not None:
        # The tf32 parts of more tokens, and of the bands, do not fit into shared memory.
        changes["BLOCK_N"] = min(blocks.block_n, 32)
    x.program.launch(
        right_kernels.right_keys,
        x.sizes.BH * count,
        *(land, x.centre, x.k.tokens, x.v.tokens, x.keep, x.plan and x.plan.key_group, x.few, grad, logs, deltas),
        *(land_grad, middle_grad, x.conv, out_grad.tokens, x.query_keep, k_grad.tokens, v_grad.tokens),
        *(x.rows - x.m, span, x.sizes, x.constants(**changes)),
        **options,
    )


def left(x: StageInputs, land: Slot, middle: Slot) -> None:
    """The left factor times the middle, and the skip."""
    out = x.program.like(x.q, x.v.shape[-1])
    count, span = walks(x.q.shape[2], x.sizes.BH, x.tiles().block_n, x.device)
    x.program.launch(
        left_kernels.left_forward,
        x.sizes.BH * count,
        *(x.q.tokens, land, x.centre, middle, x.v.tokens, x.conv, out.tokens, x.query_keep, x.keep, *_few_queries(x)),
        *(span, x.sizes, x.constants(**x.walked(skip=True))),
        **_walking(x),
    )


def left_statistics(x: StageInputs, land: Slot, middle: Slot, grad: Slot) -> tuple[Slot, Slot]:
    """The normaliser of each query, and the weighted mean of the gradients of its weights.

    Both are empty if the weights fit into one block, and for the Gaussian kernel: then they are not needed.
    """
    (b, h, n, _), blocks = x.q.shape, x.tiles()
    whole = x.gaussian or x.m <= blocks.block_m
    logs, deltas = (x.scratch(0 if whole else b * h * n, *more) for more in ((2,), ()))
    if not whole:
        x.program.launch(
            left_backward_kernels.left_statistics,
            -(-n // blocks.block_n) * b * h,
            *(x.q.tokens, land, middle, grad.tokens, x.query_keep, *_few_queries(x), logs, deltas),
            *(x.sizes, x.constants()),
            **_summing(x),
        )
    return logs, deltas


def left_landmarks(x: StageInputs, land: Slot, middle: Slot, grad: Slot, logs: Slot, deltas: Slot) -> tuple[Slot, Slot]:
    """Splits of the gradients of the landmarks as keys of the left factor, and of the middle."""
    (b, h, n, d), blocks = x.q.shape, x.tiles()
    row_blocks = -(-x.m // blocks.block_m)
    count, span = splits(n, b * h * row_blocks, x.m, blocks.block_n, x.device)
    land_sums, middle_sums = (x.scratch(count, b, h, x.m, width) for width in (d, x.v.shape[-1]))
    x.program.launch(
        left_backward_kernels.left_landmarks,
        row_blocks * b * h * count,
        *(x.q.tokens, land, x.centre, middle, grad.tokens, x.query_keep, *_few_queries(x), logs, deltas),
        *(land_sums, middle_sums, span, x.sizes, x.constants(**x.walked())),
        **_summing(x),
    )
    return land_sums, middle_sums


def left_queries(
    x: StageInputs, land: Slot, middle: Slot, grad: Slot, logs: Slot, deltas: Slot, land_grad: Slot
) -> None:
    """Gradient of the queries."""
    q_grad = x.program.like(x.q)
    count, span = walks(x.q.shape[2], x.sizes.BH, x.tiles().block_n, x.device)
    x.program.launch(
        left_backward_kernels.left_queries,
        x.sizes.BH * count,
        *(x.q.tokens, land, x.centre, middle, grad.tokens, x.query_keep, *_few_queries(x), logs, deltas, land_grad),
        *(q_grad.tokens, span, x.sizes, x.constants(**x.walked())),
        **_walking(x),
    )


def skip_taps(x: StageInputs, grad: Slot) -> None:
    """Gradient of the skip's kernel, (h, taps)."""
    assert x.conv is not None
    (b, h, n, e), blocks, (_, taps) = x.v.shape, x.tiles(), x.conv.shape
    count, span = splits(n, b * h, 1, blocks.block_n, x.device)
    sums, walked = x.scratch(count, b, h, taps), x.walked(skip=True)
    constants = plain(
        E=e, ACC=x.acc, BLOCK_N=blocks.block_n, BLOCK_E=blocks.block_e, TAPS=taps, BLOCK_T=walked["BLOCK_T"]
    )
    x.program.launch(
        skip_kernels.skip_taps,
        b * h * count,
        *(x.v.tokens, grad.tokens, x.keep, sums, span, x.sizes, power(taps), constants),
        num_stages=blocks.stages,
    )
    # The sum over the batch too.
    parts = sums._replace(shape=(count * b, h, taps), strides=sums.strides[1:])
    add_up(x.program, parts, x.program.result(x.conv.shape, x.conv.dtype))


def _few_queries(x: StageInputs) -> tuple[Slot | None, ...]:
    """The landmark of each query, which sequences are short, and how many landmarks are real."""
    return x.plan and x.plan.query_group, x.few, x.plan and x.plan.real


def _square(x: StageInputs) -> Constants:
    """Constants of the kernels of which a program holds one matrix."""
    return x.constants(BLOCK_M=power(x.m), BLOCK_N=16, LOW=triton_dtype(x.acc), LOW_PRECISION=FLOAT32_PRECISION)


def _blocks(x: StageInputs) -> Constants:
    """Constants of the kernels that take such matrices block by block."""
    wide = max(x.tiles().block_d, x.tiles().block_e) * x.acc.itemsize
    return x.constants(BLOCK_N=32 if wide <= 512 else 16, BLOCK_M=power(x.m))


def _summing(x: StageInputs) -> dict[str, int]:
    """Warps and stages of sums over tokens."""
    return {"num_warps": x.tiles().warps, "num_stages": x.tiles().stages}


def _walking(x: StageInputs) -> dict[str, int]:
    """Warps and stages of kernels in which each token has a result."""
    return {"num_warps": x.tiles().warps, "num_stages": x.tiles().walk_stages}
