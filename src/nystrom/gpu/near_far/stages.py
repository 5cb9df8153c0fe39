# Triton's stubs expect its own wrapper around numbers that a kernel is specialised to.
# pyright: reportArgumentType=false, reportCallIssue=false
"""Launches of the kernels: tensors in, tensors out.

Tensors of tokens are (b, h, n, width), with stride 1 along the width and any other strides; new tensors have the layout
of the tensor that they belong to. Small tensors are (b, h, rows, width), contiguous, and in float32 at least.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nystrom.gpu.inputs import empty_like
from nystrom.gpu.launch import splits
from nystrom.gpu.near_far.forward import near_far_forward
from nystrom.gpu.near_far.inputs import NearFarInputs
from nystrom.gpu.near_far.keys import near_far_keys
from nystrom.gpu.near_far.queries import near_far_queries
from nystrom.gpu.near_far.shared import near_far_shared
from nystrom.gpu.near_far.totals import near_far_totals


class Totals(NamedTuple):
    """Statistics of all tokens of each cluster.

    Attributes:
        means: (b, h, m, d) Their mean key.
        sums: (b, h, m, e) The sum of their values.
        number: (b, h, m) Their number.
    """

    means: Tensor
    sums: Tensor
    number: Tensor


def totals(x: NearFarInputs) -> Totals:
    """Sum keys and values by cluster."""
    (b, h, s, d), e, m, options = x.k.shape, x.v.shape[-1], x.m, x.options()
    row_blocks = -(-m // options["BLOCK_M"])
    spans, span = splits(s, b * h * row_blocks, m, options["BLOCK_N"], x.q.device)
    keys, values, counts = (torch.empty(spans, b, h, m, *width, **x.small) for width in ((d,), (e,), ()))
    wanted = ("D", "E", "ACC", "PRECISION", "BLOCK_N", "BLOCK_M", "BLOCK_D", "BLOCK_E", "num_warps", "num_stages")
    near_far_totals[(row_blocks * b * h * spans,)](
        x.k,
        x.v,
        x.cluster,
        keys,
        values,
        counts,
        x.k.stride()[:3],
        x.v.stride()[:3],
        h,
        b * h,
        s,
        m,
        span,
        **{name: options[name] for name in wanted},
    )
    number = counts.sum(0)
    return Totals(keys.sum(0) / number.clamp(min=1)[..., None], values.sum(0), number)


def rows_of_left(n: int, block: int) -> int:
    """Rows for all blocks, and at least two: with a symbolic length, an export would branch on a single row."""
    return n // block + 2 if block else 0


def attend(x: NearFarInputs, of: Totals) -> tuple[Tensor, Tensor, Tensor]:
    """The outputs, their normalisers, and for each block the number of far tokens of each cluster.

    Without near tokens, the latter are empty: all tokens are far, see `of.number`.
    """
    (b, h, n, _), e = x.q.shape, x.v.shape[-1]
    out, logs = empty_like(x.q, e), torch.empty(b, h, n, 2, **x.small)
    left = torch.empty(b, h, rows_of_left(n, x.block), x.m, **x.small)
    near_far_forward[(b * h * x.blocks * x.parts,)](
        x.q,
        x.k,
        x.v,
        x.heavy_rows(x.k),
        x.heavy_rows(x.v),
        x.found,
        x.cluster,
        x.first,
        *of,
        out,
        logs,
        left,
        x.q.stride()[:3],
        x.k.stride()[:3],
        x.v.stride()[:3],
        out.stride()[:3],
        h,
        n,
        x.k.shape[2],
        x.heavy.shape[2],
        x.m,
        x.size,
        x.reach,
        x.blocks,
        NEAR=x.block > 0,
        **x.options(walk=True),
    )
    return out, logs, left


def queries(x: NearFarInputs, of: Totals, out: Tensor, logs: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient of the queries, and their deltas."""
    (b, h, n, _), q_grad, deltas = x.q.shape, empty_like(x.q), torch.empty_like(logs[..., 0])
    near_far_queries[(b * h * x.blocks * x.parts,)](
        x.q,
        x.k,
        x.v,
        x.heavy_rows(x.k),
        x.heavy_rows(x.v),
        x.found,
        x.cluster,
        x.first,
        *of,
        out,
        logs,
        grad,
        q_grad,
        deltas,
        x.q.stride()[:3],
        x.k.stride()[:3],
        x.v.stride()[:3],
        out.stride()[:3],
        grad.stride()[:3],
        q_grad.stride()[:3],
        h,
        n,
        x.k.shape[2],
        x.heavy.shape[2],
        x.m,
        x.size,
        x.reach,
        x.blocks,
        NEAR=x.block > 0,
        **x.options(walk=True),
    )
    return q_grad, deltas


def shared(
    x: NearFarInputs,
    keys: Tensor,
    values: Tensor,
    number: Tensor,
    logs: Tensor,
    deltas: Tensor,
    grad: Tensor,
    *,
    near: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of the keys that all queries see, and shares for their values; see `nystrom.gpu.near_far.shared`.

    Args:
        x: What all stages share.
        keys: (b, h, rows, d) The keys.
        values: (b, h, rows, e) Sums of the values of the tokens that they stand for.
        number: (b, h, rows) How many tokens each key stands for.
        logs: Normalisers of the queries.
        deltas: The deltas from `queries`.
        grad: Gradient of the outputs.
        near: Whether to leave out the tokens of a query's window.
    """
    (b, h, rows, d), e, options = keys.shape, values.shape[-1], x.options()
    row_blocks, tile = -(-rows // options["BLOCK_M"]), options["BLOCK_N"]
    spans, span = splits(x.blocks * x.parts * tile, b * h * row_blocks, rows, tile, x.q.device)
    key_sums, value_sums = (torch.empty(spans, b, h, rows, width, **x.small) for width in (d, e))
    near_far_shared[(row_blocks * b * h * spans,)](
        x.q,
        grad,
        x.v,
        x.cluster,
        x.first,
        keys,
        values,
        number,
        logs,
        deltas,
        key_sums,
        value_sums,
        x.q.stride()[:3],
        grad.stride()[:3],
        x.v.stride()[:3],
        h,
        b * h,
        x.q.shape[2],
        x.k.shape[2],
        rows,
        x.size,
        x.reach,
        x.blocks,
        span // tile,
        NEAR=near,
        **options,
    )
    return key_sums.sum(0), value_sums.sum(0)


def keys(
    x: NearFarInputs,
    of: Totals,
    left: Tensor,
    logs: Tensor,
    deltas: Tensor,
    grad: Tensor,
    mean_grad: Tensor,
    value_grad: Tensor,
) -> tuple[Tensor, Tensor]:
    """Gradients of keys and values; zeros for heavy ones.

    Args:
        x: What all stages share.
        of: Statistics of all tokens of each cluster.
        left: Number of far tokens of each cluster for each block.
        logs: Normalisers of the queries.
        deltas: The deltas from `queries`.
        grad: Gradient of the outputs.
        mean_grad: (b, h, m, d) Gradient that each key of a cluster gets through the mean.
        value_grad: (b, h, m, e) Gradient that each value of a cluster would get if it were far from all queries.
    """
    (b, h, s, _), options = x.k.shape, x.options()
    k_grad, v_grad = empty_like(x.k), empty_like(x.v)
    near_far_keys[(b * h * -(-s // options["BLOCK_W"]),)](
        x.q,
        x.k,
        x.v,
        x.cluster,
        x.first,
        of.means,
        left,
        logs,
        deltas,
        grad,
        mean_grad,
        value_grad,
        k_grad,
        v_grad,
        x.q.stride()[:3],
        x.k.stride()[:3],
        x.v.stride()[:3],
        grad.stride()[:3],
        k_grad.stride()[:3],
        v_grad.stride()[:3],
        h,
        x.q.shape[2],
        s,
        x.m,
        x.size,
        x.reach,
        x.blocks,
        NEAR=x.block > 0,
        **options,
    )
    return k_grad, v_grad
