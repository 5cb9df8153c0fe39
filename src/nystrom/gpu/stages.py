# Triton's stubs want its own wrapper around numbers that a kernel is specialised to.
# pyright: reportArgumentType=false, reportCallIssue=false
"""Launches of the kernels: tensors in, tensors out.

Tensors of tokens are (b, h, n, width) with any strides but 1 along the width; what is made here lies as the tensor that
it belongs to. Small tensors are contiguous, (b, h, rows, width) and float32 at least.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nystrom.gpu import inverse as inverse_kernels
from nystrom.gpu import left as left_kernels
from nystrom.gpu import means as means_kernels
from nystrom.gpu import right as right_kernels
from nystrom.gpu.launch import (
    FLOAT32_PRECISION,
    LARGEST_START,
    LARGEST_WHOLE,
    LARGEST_WHOLE_BACKWARD,
    Tiles,
    power,
    splits,
    tiles,
)
from nystrom.gpu.plan import Plan
from nystrom.precision import accumulator


@dataclass(frozen=True)
class Inputs:
    """What all stages share.

    Attributes:
        q: Queries.
        k: Keys.
        v: Values.
        conv: (h, taps) Kernel of the skip, or None.
        keep: (b, s) Real keys as bytes, or None.
        query_keep: (b, n) Real queries as bytes, or None.
        plan: Where landmarks come from; None for means of equal segments of all tokens.
        masked: Whether sequences may be short, or tokens not real.
        m: Landmarks that one side is compared with.
        scale: Factor on the scores.
        gaussian: The Gaussian kernel in place of softmax.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    conv: Tensor | None
    keep: Tensor | None
    query_keep: Tensor | None
    plan: Plan | None
    masked: bool
    m: int
    scale: float
    gaussian: bool

    @property
    def rows(self) -> int:
        """Landmarks in all."""
        return self.m if self.gaussian else 2 * self.m

    @property
    def acc(self) -> torch.dtype:
        """Dtype of sums."""
        return accumulator(self.q.dtype)

    @property
    def small(self) -> dict[str, Any]:
        """Dtype and device of small tensors."""
        return {"dtype": self.acc, "device": self.q.device}

    @property
    def few(self) -> Tensor | None:
        """See `Plan.few`."""
        return self.plan.few if self.plan is not None and self.masked else None

    @property
    def low(self) -> torch.dtype:
        """Dtype of weights in products: that of the tokens, but for what float16 or 8 bits of fraction cannot hold."""
        widened = self.q.dtype == torch.float16 or (self.gaussian and self.q.dtype == torch.bfloat16)
        return torch.float32 if widened else self.q.dtype

    def tiles(self) -> Tiles:
        """Blocks of the kernels over tokens."""
        return tiles(self.m, self.q.shape[-1], self.v.shape[-1], self.low)

    def options(self) -> dict[str, Any]:
        """What all kernels over tokens are specialised to."""
        blocks = self.tiles()
        return {
            "D": self.q.shape[-1],
            "E": self.v.shape[-1],
            "SCALE": self.scale,
            "ACC": _triton(self.acc),
            "LOW": _triton(self.low),
            "PRECISION": FLOAT32_PRECISION,
            "LOW_PRECISION": FLOAT32_PRECISION if self.low == self.q.dtype else "tf32",
            "BLOCK_N": blocks.block_n,
            "BLOCK_M": blocks.block_m,
            "BLOCK_D": blocks.block_d,
            "BLOCK_E": blocks.block_e,
            "num_warps": blocks.warps,
            "num_stages": blocks.stages,
        }


def landmarks(x: Inputs) -> tuple[Tensor, Tensor]:
    """The table of landmarks, and one over the number of tokens of each."""
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
        ACC=_triton(x.acc),
        BLOCK_N=blocks.block_n,
        BLOCK_D=blocks.block_d,
        num_warps=blocks.warps,
    )
    return table, share


def right(x: Inputs, land: Tensor) -> tuple[Tensor, Tensor]:
    """The right factor times the values, and the logarithms of its normalisers (none for the Gaussian kernel)."""
    (b, h, s, e), options, blocks = x.v.shape, x.options(), x.tiles()
    row_blocks = -(-x.m // blocks.block_m)
    count, span = splits(s, b * h * row_blocks, x.m, blocks.block_n, x.q.device)
    sums = torch.empty(count, b, h, x.m, e, **x.small)
    tops, totals = (torch.empty(0 if x.gaussian else count * b * h * x.m, **x.small) for _ in range(2))
    right_kernels.right_forward[(row_blocks * b * h * count,)](
        land,
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
    result, logs = torch.empty(b, h, x.m, e, **x.small), torch.empty(b, h, 0 if x.gaussian else x.m, **x.small)
    right_kernels.combine[(row_blocks * b * h,)](
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
        BLOCK_M=blocks.block_m,
        BLOCK_E=blocks.block_e,
    )
    return result, logs


def right_queries(x: Inputs, land: Tensor, grad: Tensor, logs: Tensor, deltas: Tensor) -> Tensor:
    """Gradient of the landmarks as queries of the right factor."""
    (b, h, s, _), options, blocks = x.v.shape, x.options(), x.tiles()
    row_blocks = -(-x.m // blocks.block_m)
    count, span = splits(s, b * h * row_blocks, x.m, blocks.block_n, x.q.device)
    sums = torch.empty(count, b, h, x.m, x.q.shape[-1], **x.small)
    right_kernels.right_queries[(row_blocks * b * h * count,)](
        land,
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
    x: Inputs,
    land: Tensor,
    grad: Tensor,
    logs: Tensor,
    deltas: Tensor,
    land_grad: Tensor,
    middle_grad: Tensor,
    out_grad: Tensor,
) -> tuple[Tensor, Tensor]:
    """Gradients of keys and values."""
    (b, h, s, _), options, blocks = x.v.shape, x.options(), x.tiles()
    k_grad, v_grad = empty_like(x.k), empty_like(x.v)
    right_kernels.right_keys[(-(-s // blocks.block_n) * b * h,)](
        land,
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
        s,
        x.m,
        x.rows,
        x.rows - x.m,
        GAUSSIAN=x.gaussian,
        TAPS=_taps(x),
        **options,
    )
    return k_grad, v_grad


def left(x: Inputs, land: Tensor, middle: Tensor) -> Tensor:
    """The left factor times the middle, and the skip."""
    (b, h, n, _), e, options, blocks = x.q.shape, x.v.shape[-1], x.options(), x.tiles()
    out = empty_like(x.q, e)
    left_kernels.left_forward[(-(-n // blocks.block_n) * b * h,)](
        x.q,
        land,
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
        n,
        x.m,
        x.rows,
        GAUSSIAN=x.gaussian,
        TAPS=_taps(x),
        **options,
    )
    return out


def left_statistics(x: Inputs, land: Tensor, middle: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Two numbers a query, where its weights do not fit into one block; else none."""
    (b, h, n, _), options, blocks = x.q.shape, x.options(), x.tiles()
    whole = x.gaussian or x.m <= blocks.block_m
    logs, deltas = (torch.empty(0 if whole else b * h * n, **x.small) for _ in range(2))
    if not whole:
        left_kernels.left_statistics[(-(-n // blocks.block_n) * b * h,)](
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
    x: Inputs, land: Tensor, middle: Tensor, grad: Tensor, logs: Tensor, deltas: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of the landmarks as keys of the left factor, and of the middle."""
    (b, h, n, d), e, options, blocks = x.q.shape, x.v.shape[-1], x.options(), x.tiles()
    row_blocks = -(-x.m // blocks.block_m)
    count, span = splits(n, b * h * row_blocks, x.m, blocks.block_n, x.q.device)
    land_sums = torch.empty(count, b, h, x.m, d, **x.small)
    middle_sums = torch.empty(count, b, h, x.m, e, **x.small)
    left_kernels.left_landmarks[(row_blocks * b * h * count,)](
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
    x: Inputs, land: Tensor, middle: Tensor, grad: Tensor, logs: Tensor, deltas: Tensor, land_grad: Tensor
) -> Tensor:
    """Gradient of the queries."""
    (b, h, n, _), options, blocks = x.q.shape, x.options(), x.tiles()
    q_grad = empty_like(x.q)
    left_kernels.left_queries[(-(-n // blocks.block_n) * b * h,)](
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
        land_grad,
        q_grad,
        x.q.stride()[:3],
        grad.stride()[:3],
        q_grad.stride()[:3],
        h,
        n,
        x.m,
        x.rows,
        GAUSSIAN=x.gaussian,
        WHOLE=x.m <= blocks.block_m,
        **options,
    )
    return q_grad


def skip_taps(x: Inputs, grad: Tensor) -> Tensor:
    """Gradient (h, taps) of the skip's kernel."""
    assert x.conv is not None
    (b, h, n, e), blocks, taps = x.v.shape, x.tiles(), x.conv.shape[1]
    count, span = splits(n, b * h, 1, blocks.block_n, x.q.device)
    sums = torch.empty(count, b, h, taps, **x.small)
    left_kernels.skip_taps[(b * h * count,)](
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
        ACC=_triton(x.acc),
        PRECISION=FLOAT32_PRECISION,
        TAPS=taps,
        BLOCK_T=power(taps),
        BLOCK_N=blocks.block_n,
        BLOCK_E=blocks.block_e,
    )
    return sums.sum((0, 1))


def inverse(a: Tensor, divisors: Tensor | None, steps: int, *, every: bool = False) -> Tensor:
    """The inverse (b, h, m, m), or with `every` all iterates (b, h, steps + 1, m, m).

    Args:
        a: Matrices.
        divisors: (b, h) What the start value is divided by; None for the product of the norms.
        steps: Iterations.
        every: Give all iterates.
    """
    b, h, m, _ = a.shape
    if m <= LARGEST_WHOLE:
        z = a.new_empty((b, h, steps + 1, m, m) if every else a.shape)
        block = power(m)
        inverse_kernels.inverse_whole[(b * h,)](
            a, divisors, z, m, steps, EVERY=every, PRECISION=FLOAT32_PRECISION, BLOCK=block
        )
        return z
    z = a.new_empty(b, h, steps + 1 if every else 2, m, m)
    z[:, :, 0] = a.mT / _divisors(a, divisors)[..., None, None]
    inverse_kernels.inverse_blocks[(b * h,)](
        a, z, a.new_empty(b, h, 3, m, m), m, steps, EVERY=every, PRECISION=FLOAT32_PRECISION, BLOCK=32
    )
    return z if every else z[:, :, steps % 2].contiguous()


def inverse_backward(a: Tensor, divisors: Tensor | None, steps: int, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient of the matrices, and of the divisors where those were given."""
    b, h, m, _ = a.shape
    iterates = inverse(a, divisors, steps, every=True)
    if m <= LARGEST_WHOLE_BACKWARD:
        a_grad, divisor_grads = torch.empty_like(a), a.new_empty(b, h)
        block = power(m)
        inverse_kernels.inverse_whole_backward[(b * h,)](
            a,
            divisors,
            iterates,
            grad,
            a_grad,
            divisor_grads,
            m,
            steps,
            PRECISION=FLOAT32_PRECISION,
            BLOCK=block,
        )
        return a_grad, divisor_grads
    a_grad, z_grads, divisor_grads = torch.zeros_like(a), a.new_empty(b, h, 2, m, m), a.new_empty(b, h)
    z_grads[:, :, 0] = grad
    whole = power(m) if m <= LARGEST_START else 0
    inverse_kernels.inverse_blocks_backward[(b * h,)](
        a,
        divisors,
        iterates,
        a_grad,
        z_grads,
        divisor_grads,
        a.new_empty(b, h, 6, m, m),
        m,
        steps,
        PRECISION=FLOAT32_PRECISION,
        BLOCK=32,
        WHOLE=whole,
    )
    if whole:
        return a_grad, divisor_grads
    start_grad, value = z_grads[:, :, steps % 2], _divisors(a, divisors)
    a_grad += start_grad.mT / value[..., None, None]
    divisor_grads = -(start_grad * a.mT).sum((-2, -1)) / value.square()
    if divisors is None:
        columns, rows = a.abs().sum(-2), a.abs().sum(-1)
        most, widest = columns.amax(-1, keepdim=True), rows.amax(-1, keepdim=True)
        at_most, at_widest = (columns == most).to(a.dtype), (rows == widest).to(a.dtype)
        share = (divisor_grads[..., None] * widest / at_most.sum(-1, keepdim=True)) * at_most
        a_grad += a.sign() * share[..., None, :]
        share = (divisor_grads[..., None] * most / at_widest.sum(-1, keepdim=True)) * at_widest
        a_grad += a.sign() * share[..., :, None]
    return a_grad, divisor_grads


def empty_like(x: Tensor, width: int | None = None) -> Tensor:
    """An empty tensor of the same tokens, which lie one after the other, or head by head, as those of x do."""
    b, h, n, d = x.shape
    width = d if width is None else width
    if h > 1 and x.stride(1) < x.stride(2):
        return x.new_empty(b, n, h, width).transpose(1, 2)
    return x.new_empty(b, h, n, width)


def _divisors(a: Tensor, divisors: Tensor | None) -> Tensor:
    return a.abs().sum(-2).amax(-1) * a.abs().sum(-1).amax(-1) if divisors is None else divisors


def _taps(x: Inputs) -> int:
    return 0 if x.conv is None else x.conv.shape[1]


def _triton(dtype: torch.dtype) -> Any:
    import triton.language as tl

    return {
        torch.float64: tl.float64,
        torch.float32: tl.float32,
        torch.bfloat16: tl.bfloat16,
        torch.float16: tl.float16,
    }[dtype]
