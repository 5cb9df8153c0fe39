# Triton's stubs expect its own wrapper around numbers that a kernel is specialised to.
# pyright: reportArgumentType=false, reportCallIssue=false
"""Launches of the kernels over tokens: tensors in, tensors out.

Tensors of tokens are (b, h, n, width), with stride 1 along the width and any other strides; new tensors have the layout
of the tensor that they belong to. Small tensors are (b, h, rows, width), contiguous, and in float32 at least.
"""

import torch
from torch import Tensor

from nystrom.gpu import inverse as inverse_kernels
from nystrom.gpu import left as left_kernels
from nystrom.gpu import left_backward as left_backward_kernels
from nystrom.gpu import means as means_kernels
from nystrom.gpu import right as right_kernels
from nystrom.gpu import skip as skip_kernels
from nystrom.gpu.inputs import StageInputs, empty_like, triton_dtype
from nystrom.gpu.launch import AVERAGED, FLOAT32_PRECISION, JOINED_ROWS, power, splits, walks


def landmarks(x: StageInputs) -> tuple[Tensor, Tensor]:
    """The table of landmarks, and the reciprocal of each one's number of tokens."""
    (b, h, n, d), s, blocks = x.q.shape, x.k.shape[2], x.tiles()
    table, share = torch.empty(b, h, x.rows, d, **x.small), torch.empty(b, h, x.rows, **x.small)
    plan = x.plan
    means_kernels.means[(b * h * x.rows,)](
        x.q,
        x.k,
        x.query_keep,
        x.keep,
        plan and plan.starts,
        plan and plan.stops,
        plan and plan.of_keys,
        table,
        share,
        x.q.stride()[:3],
        x.k.stride()[:3],
        h,
        n,
        s,
        x.rows,
        x.m,
        D=d,
        ACC=triton_dtype(x.acc),
        BLOCK_N=max(16, AVERAGED // blocks.block_d),
        BLOCK_D=blocks.block_d,
    )
    return table, share


def right_splits(x: StageInputs, land: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The right factor times the values in splits: sums, and without the Gaussian kernel largest scores and totals."""
    (b, h, s, e), options, blocks = x.v.shape, x.options(), x.tiles()
    row_blocks = -(-x.m // blocks.block_m)
    count, span = splits(s, b * h * row_blocks, x.m, blocks.block_n, x.q.device)
    sums = torch.empty(count, b, h, x.m, e, **x.small)
    tops, totals = (torch.empty(0 if x.gaussian else count * b * h * x.m, **x.small) for _ in range(2))
    right_kernels.right_forward[(row_blocks * b * h * count,)](
        land,
        x.centre,
        x.k,
        x.v,
        x.keep,
        sums,
        tops,
        totals,
        x.k.stride()[:3],
        x.v.stride()[:3],
        h,
        b * h,
        s,
        x.m,
        x.rows,
        span,
        GAUSSIAN=x.gaussian,
        **options,
    )
    return sums, tops, totals


def joined(x: StageInputs, splits_of: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The right factor times the values, and its normalisers (empty for the Gaussian kernel)."""
    sums, tops, totals = splits_of
    (b, h, _, e), options, blocks, count = x.v.shape, x.options(), x.tiles(), len(sums)
    result, logs = torch.empty(b, h, x.m, e, **x.small), torch.empty(b, h, 0 if x.gaussian else x.m, 2, **x.small)
    right_kernels.combine[(-(-x.m // JOINED_ROWS) * b * h,)](
        sums,
        tops,
        totals,
        result,
        logs,
        b * h,
        x.m,
        count,
        E=e,
        GAUSSIAN=x.gaussian,
        ACC=options["ACC"],
        BLOCK_M=JOINED_ROWS,
        BLOCK_E=blocks.block_e,
    )
    return result, logs


def middle_whole(
    x: StageInputs, table: Tensor, splits_of: tuple[Tensor, Tensor, Tensor], steps: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The middle, the inverse, the right factor and its normalisers, where one program holds a matrix of softmax."""
    sums, tops, totals = splits_of
    (b, h, _, d), e, options = x.q.shape, x.v.shape[-1], x.options()
    middle, right = (torch.empty(b, h, x.m, e, **x.small) for _ in range(2))
    inverse, logs = torch.empty(b, h, x.m, x.m, **x.small), torch.empty(b, h, x.m, 2, **x.small)
    inverse_kernels.middle_whole[(b * h,)](
        table,
        sums,
        tops,
        totals,
        right,
        logs,
        inverse,
        middle,
        b * h,
        x.m,
        len(sums),
        steps,
        D=d,
        E=e,
        SCALE=x.scale,
        ACC=options["ACC"],
        PRECISION=FLOAT32_PRECISION,
        BLOCK_M=power(x.m),
        BLOCK_D=options["BLOCK_D"],
        BLOCK_E=options["BLOCK_E"],
    )
    return middle, inverse, right, logs


def right_queries(x: StageInputs, land: Tensor, grad: Tensor, logs: Tensor, deltas: Tensor) -> Tensor:
    """Gradient of the landmarks as queries of the right factor."""
    (b, h, s, _), options, blocks = x.v.shape, x.options(), x.tiles()
    row_blocks = -(-x.m // blocks.block_m)
    count, span = splits(s, b * h * row_blocks, x.m, blocks.block_n, x.q.device)
    sums = torch.empty(count, b, h, x.m, x.q.shape[-1], **x.small)
    right_kernels.right_queries[(row_blocks * b * h * count,)](
        land,
        x.centre,
        x.k,
        x.v,
        x.keep,
        grad,
        logs,
        deltas,
        sums,
        x.k.stride()[:3],
        x.v.stride()[:3],
        h,
        b * h,
        s,
        x.m,
        x.rows,
        span,
        GAUSSIAN=x.gaussian,
        **options,
    )
    return sums.sum(0)


def right_keys(
    x: StageInputs,
    land: Tensor,
    grad: Tensor,
    logs: Tensor,
    deltas: Tensor,
    land_grad: Tensor,
    middle_grad: Tensor,
    out_grad: Tensor,
) -> tuple[Tensor, Tensor]:
    """Gradients of keys and values."""
    (b, h, s, _), options, blocks = x.v.shape, x.options(walk=True), x.tiles()
    k_grad, v_grad = empty_like(x.k), empty_like(x.v)
    count, span = walks(s, b * h, blocks.block_n, x.q.device)
    if x.low.itemsize == 2:
        # Wide rows with a skip take too many registers for 4 warps.
        wide = x.conv is not None and blocks.block_e > 64
        options |= {"num_stages": min(blocks.stages, 2), "num_warps": 8 if wide else blocks.warps}
    elif x.conv is not None:
        # The tf32 parts of more tokens, and of the bands, do not fit into shared memory.
        options |= {"BLOCK_N": min(blocks.block_n, 32)}
    right_kernels.right_keys[(b * h * count,)](
        land,
        x.centre,
        x.k,
        x.v,
        x.keep,
        x.plan and x.plan.key_group,
        x.few,
        grad,
        logs,
        deltas,
        land_grad,
        middle_grad,
        x.conv,
        out_grad,
        x.query_keep,
        k_grad,
        v_grad,
        x.k.stride()[:3],
        x.v.stride()[:3],
        out_grad.stride()[:3],
        k_grad.stride()[:3],
        v_grad.stride()[:3],
        h,
        b * h,
        s,
        x.m,
        x.rows,
        x.rows - x.m,
        span,
        GAUSSIAN=x.gaussian,
        WHOLE=x.m <= blocks.block_m,
        **x.skip_options(),
        **options,
    )
    return k_grad, v_grad


def left(x: StageInputs, land: Tensor, middle: Tensor) -> Tensor:
    """The left factor times the middle, and the skip."""
    (b, h, n, _), e, options, blocks = x.q.shape, x.v.shape[-1], x.options(walk=True), x.tiles()
    out, (count, span) = empty_like(x.q, e), walks(n, b * h, blocks.block_n, x.q.device)
    left_kernels.left_forward[(b * h * count,)](
        x.q,
        land,
        x.centre,
        middle,
        x.v,
        x.conv,
        out,
        x.query_keep,
        x.keep,
        x.plan and x.plan.query_group,
        x.few,
        x.plan and x.plan.real,
        x.q.stride()[:3],
        x.v.stride()[:3],
        out.stride()[:3],
        h,
        b * h,
        n,
        x.m,
        x.rows,
        span,
        GAUSSIAN=x.gaussian,
        WHOLE=x.m <= blocks.block_m,
        **x.skip_options(),
        **options,
    )
    return out


def left_statistics(x: StageInputs, land: Tensor, middle: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """The normaliser of each query, and the weighted mean of the gradients of its weights.

    Both are empty if the weights fit into one block, and for the Gaussian kernel: then they are not needed.
    """
    (b, h, n, _), options, blocks = x.q.shape, x.options(), x.tiles()
    whole = x.gaussian or x.m <= blocks.block_m
    logs, deltas = (torch.empty(0 if whole else b * h * n, *more, **x.small) for more in ((2,), ()))
    if not whole:
        left_backward_kernels.left_statistics[(-(-n // blocks.block_n) * b * h,)](
            x.q,
            land,
            middle,
            grad,
            x.query_keep,
            x.plan and x.plan.query_group,
            x.few,
            x.plan and x.plan.real,
            logs,
            deltas,
            x.q.stride()[:3],
            grad.stride()[:3],
            h,
            n,
            x.m,
            x.rows,
            **options,
        )
    return logs, deltas


def left_landmarks(
    x: StageInputs, land: Tensor, middle: Tensor, grad: Tensor, logs: Tensor, deltas: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of the landmarks as keys of the left factor, and of the middle."""
    (b, h, n, d), e, options, blocks = x.q.shape, x.v.shape[-1], x.options(), x.tiles()
    row_blocks = -(-x.m // blocks.block_m)
    count, span = splits(n, b * h * row_blocks, x.m, blocks.block_n, x.q.device)
    land_sums = torch.empty(count, b, h, x.m, d, **x.small)
    middle_sums = torch.empty(count, b, h, x.m, e, **x.small)
    left_backward_kernels.left_landmarks[(row_blocks * b * h * count,)](
        x.q,
        land,
        x.centre,
        middle,
        grad,
        x.query_keep,
        x.plan and x.plan.query_group,
        x.few,
        x.plan and x.plan.real,
        logs,
        deltas,
        land_sums,
        middle_sums,
        x.q.stride()[:3],
        grad.stride()[:3],
        h,
        b * h,
        n,
        x.m,
        x.rows,
        span,
        GAUSSIAN=x.gaussian,
        WHOLE=x.m <= blocks.block_m,
        **options,
    )
    return land_sums.sum(0), middle_sums.sum(0)


def left_queries(
    x: StageInputs, land: Tensor, middle: Tensor, grad: Tensor, logs: Tensor, deltas: Tensor, land_grad: Tensor
) -> Tensor:
    """Gradient of the queries."""
    (b, h, n, _), options, blocks = x.q.shape, x.options(walk=True), x.tiles()
    q_grad, (count, span) = empty_like(x.q), walks(n, b * h, blocks.block_n, x.q.device)
    left_backward_kernels.left_queries[(b * h * count,)](
        x.q,
        land,
        x.centre,
        middle,
        grad,
        x.query_keep,
        x.plan and x.plan.query_group,
        x.few,
        x.plan and x.plan.real,
        logs,
        deltas,
        land_grad,
        q_grad,
        x.q.stride()[:3],
        grad.stride()[:3],
        q_grad.stride()[:3],
        h,
        b * h,
        n,
        x.m,
        x.rows,
        span,
        GAUSSIAN=x.gaussian,
        WHOLE=x.m <= blocks.block_m,
        **options,
    )
    return q_grad


def skip_taps(x: StageInputs, grad: Tensor) -> Tensor:
    """Gradient of the skip's kernel, (h, taps)."""
    assert x.conv is not None
    (b, h, n, e), blocks, taps = x.v.shape, x.tiles(), x.conv.shape[1]
    count, span = splits(n, b * h, 1, blocks.block_n, x.q.device)
    sums = torch.empty(count, b, h, taps, **x.small)
    skip_kernels.skip_taps[(b * h * count,)](
        x.v,
        grad,
        x.keep,
        sums,
        x.v.stride()[:3],
        grad.stride()[:3],
        h,
        b * h,
        n,
        span,
        E=e,
        ACC=triton_dtype(x.acc),
        PRECISION=FLOAT32_PRECISION,
        BLOCK_TAPS=power(taps),
        **x.skip_options(),
        BLOCK_N=blocks.block_n,
        BLOCK_E=blocks.block_e,
        num_stages=blocks.stages,
    )
    return sums.sum((0, 1))
