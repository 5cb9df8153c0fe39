r"""Attention to near tokens, heavy keys and clusters by Triton kernels: the same function as in `nystrom.attention`.

The heavy keys, and the cluster of each other key, are given. Forward: the sums of each cluster in spans, then one pass
over the queries. Between the passes, q, k, v, the output, each query's normaliser, tensors of size m and, for each
block, the numbers of far tokens are kept; the backward pass recomputes everything else.

Sums over tokens are computed in spans, stored separately and then added, so the kernels always add in the same order.
(Heavy keys and clusters are chosen by kernels too, see `nystrom.gpu.near_far.choice`, or by torch if there are more
clusters than those take; the sums of torch on a GPU may differ from call to call.)

Both passes are custom operators of torch, see `nystrom.gpu.attention`. There is no second derivative and no
forward-mode derivative: asking for one raises.
"""

import torch
from torch import Tensor
from torch.autograd import forward_ad

from nystrom.gpu.attention import one_by_one
from nystrom.gpu.inputs import empty_like
from nystrom.gpu.launch import check_launch, launching_on
from nystrom.gpu.near_far import stages
from nystrom.gpu.near_far.inputs import NearFarInputs
from nystrom.gpu.near_far.stages import Totals
from nystrom.precision import accumulator

# Wider heads would leave too few registers for the accumulators of keys and values.
LARGEST_WIDTH = 128


def near_far(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heavy: Tensor,
    found: Tensor,
    cluster: Tensor,
    *,
    num_clusters: int,
    block_size: int,
    reach: int,
    keep: Tensor | None,
    scale: float,
) -> Tensor:
    """Attend to near tokens, heavy keys and clusters.

    Args:
        q: Queries (b, h, n, d).
        k: Keys (b, h, s, d); zeros where they are not real, as for values.
        v: Values (b, h, s, e).
        heavy: (b, h, g) Positions of the heavy keys.
        found: (b, h, g) Which of them exist.
        cluster: (b, h, s) The cluster of each key; `num_clusters` for heavy keys and keys that are not real.
        num_clusters: Clusters m.
        block_size: Queries of a block; 0 for cross-attention, where no tokens are near.
        reach: Tokens on either side of its block that a query sees.
        keep: (b, n) Real tokens; blocks are counted from the first of them. None if they are counted from the first
            token.
        scale: Factor on the scores.

    Raises:
        ValueError: The kernels cannot take these inputs; the message says what to do.
        NotImplementedError: An input carries a forward-mode tangent; or, later, if a gradient is differentiated.
    """
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    if any(forward_ad.unpack_dual(x).tangent is not None for x in (q, k, v)):
        raise NotImplementedError(
            "backend 'triton' has no derivative in forward mode, as torch's fused calls have none: use reverse mode, "
            "such as torch.func.vjp or jacrev, or a method with second derivatives (see `nystrom methods`)."
        )
    first = None
    if keep is not None:
        here = torch.arange(keep.shape[1], dtype=torch.int32, device=keep.device)
        first = torch.where(keep, here, keep.shape[1]).amin(dim=-1)
    # A compiler uses the operator directly.
    attend = _attention if torch.compiler.is_compiling() else _NearFar.apply
    cluster = cluster.to(torch.int32).contiguous()
    return attend(q, k, v, heavy, found, cluster, first, num_clusters, block_size, reach, scale)[0]


@torch.library.custom_op("nystrom::near_far", mutates_args=())
def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    heavy: torch.Tensor,
    found: torch.Tensor,
    cluster: torch.Tensor,
    first: torch.Tensor | None,
    m: int,
    block: int,
    reach: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The output, and what the backward pass needs."""
    for name, x in (("q", q), ("v", v)):
        if x.shape[-1] > LARGEST_WIDTH:
            raise ValueError(
                f"{name} has head width {x.shape[-1]}; expected at most {LARGEST_WIDTH} in near_far: split heads or "
                "pass backend='torch'."
            )
    # There may be any number of clusters.
    check_launch(1, {"q": q, "k": k, "v": v})
    with launching_on(q.device):
        x = _inputs(q, k, v, heavy, found, cluster, first, m, block, reach, scale)
        of = stages.totals(x)
        out, logs, left = stages.attend(x, of)
        return out, logs, left, of.means, of.sums, of.number


@_attention.register_fake
def _(q, k, v, heavy, found, cluster, first, m, block, reach, scale):
    (b, h, n, d), e, acc = q.shape, v.shape[-1], accumulator(q.dtype)
    shapes = ((b, h, n, 2), (b, h, stages.rows_of_left(n, block), m), (b, h, m, d), (b, h, m, e), (b, h, m))
    return (empty_like(q, e), *(q.new_empty(shape, dtype=acc) for shape in shapes))


@torch.library.custom_op("nystrom::near_far_backward", mutates_args=())
def _attention_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    heavy: torch.Tensor,
    found: torch.Tensor,
    cluster: torch.Tensor,
    first: torch.Tensor | None,
    out: torch.Tensor,
    logs: torch.Tensor,
    left: torch.Tensor,
    means: torch.Tensor,
    sums: torch.Tensor,
    count: torch.Tensor,
    m: int,
    block: int,
    reach: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v."""
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    with launching_on(q.device):
        x = _inputs(q, k, v, heavy, found, cluster, first, m, block, reach, scale)
        return gradients(x, Totals(means, sums, count), out, logs, left, grad)


def gradients(
    x: NearFarInputs, of: Totals, out: Tensor, logs: Tensor, left: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the backward pass; returns the gradients of q, k and v."""
    q_grad, deltas = stages.queries(x, of, out, logs, grad)
    mean_grad, value_grad = stages.shared(x, *of, logs, deltas, grad, near=x.block > 0)
    # A mean is taken over all keys of its cluster, near or far.
    mean_grad /= of.number.clamp(min=1)[..., None]
    k_grad, v_grad = stages.keys(x, of, left, logs, deltas, grad, mean_grad, value_grad)
    if x.heavy.shape[2]:
        heavy = x.heavy_rows(x.k), x.heavy_rows(x.v), x.found
        some = stages.shared(x, *heavy, logs, deltas, grad, near=False)
        for whole, part in zip((k_grad, v_grad), some, strict=True):
            # These tokens hold zeros so far, and a key that was not found adds zeros: the order does not matter.
            most = torch.finfo(whole.dtype).max
            index = x.heavy[..., None].expand_as(part)
            whole.scatter_add_(2, index, part.clamp(-most, most).to(whole.dtype))
    return q_grad, k_grad, v_grad


@_attention_backward.register_fake
def _(grad, q, k, v, heavy, found, cluster, first, out, logs, left, means, sums, count, m, block, reach, scale):
    return empty_like(q), empty_like(k), empty_like(v)


def _keep_for_backward(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:7], *output)
    ctx.numbers = inputs[7:]


def _backward(ctx, grad, *_):
    # A compiler uses the operator directly.
    differentiate = _attention_backward if torch.compiler.is_compiling() else _Gradients.apply
    return *differentiate(grad, *ctx.saved_tensors, *ctx.numbers), *(None,) * 8


class _NearFar(torch.autograd.Function):
    """The operator and its gradient in the form that torch.func needs."""

    @staticmethod
    def forward(*inputs):
        return _attention(*inputs)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        _keep_for_backward(ctx, inputs, output)

    @staticmethod
    def backward(ctx, *gradients):
        return _backward(ctx, *gradients)

    @staticmethod
    def vmap(info, in_dims, *inputs):
        return one_by_one(_NearFar, info, in_dims, inputs)


class _Gradients(torch.autograd.Function):
    """The operator of the backward pass, whose own gradient does not exist."""

    @staticmethod
    def forward(*inputs):
        return _attention_backward(*inputs)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        pass

    @staticmethod
    def backward(ctx, *gradients):
        raise NotImplementedError(
            "backend 'triton' has no second derivative, as torch's fused calls have none: use a method with second "
            "derivatives (see `nystrom methods`)."
        )

    @staticmethod
    def vmap(info, in_dims, *inputs):
        return one_by_one(_Gradients, info, in_dims, inputs)


_attention.register_autograd(_backward, setup_context=_keep_for_backward)


def _inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heavy: Tensor,
    found: Tensor,
    cluster: Tensor,
    first: Tensor | None,
    m: int,
    block: int,
    reach: int,
    scale: float,
) -> NearFarInputs:
    """What all stages share."""
    found = found.to(accumulator(q.dtype)).contiguous()
    return NearFarInputs(q, k, v, heavy, found, cluster, first, m, block, reach, scale)
