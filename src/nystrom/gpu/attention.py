r"""Nyström attention and Skyformer in a few launches of Triton kernels: the same functions as in `nystrom.attention`.

Forward: landmarks, the right factor in splits and their combination, the landmarks' m x m matrix and its inverse, the
middle, and the left factor with the skip. Between the passes, q, k, v and tensors of size m are kept; the backward pass
recomputes everything else. If the landmarks fit into one block, it reads queries, gradient, keys and values twice (with
a skip, the gradient twice more and the values once more). It writes each gradient once.

Sums over tokens are computed in spans, stored separately and then added, so results and gradients are reproducible.

Both passes are custom operators of torch, so compile, export, autocast, checkpointing and distributed wrappers each see
one node. Outside a compiler, they are called through `torch.autograd.Function`, which torch.func supports; under vmap,
they run one slice at a time. There is no second derivative and no forward-mode derivative: asking for one raises.

Source: Xiong et al. (2021), arXiv:2102.03902, eq. (13)-(17); Chen et al. (2021), arXiv:2111.00035, sections 4.2, 4.4.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.autograd import forward_ad

from nystrom.gpu import inversion, stages
from nystrom.gpu.arithmetic import INTERPRETED
from nystrom.gpu.inputs import StageInputs, empty_like
from nystrom.gpu.launch import LARGEST_WHOLE, check_launch, launching_on
from nystrom.gpu.matrix import divisors, matrix_backward, matrix_of, unscaled, unscaled_backward
from nystrom.gpu.plan import FEW_KEYS, FEW_QUERIES, even_token_plan, segment_plan, token_plan
from nystrom.landmarks import all_are_short, all_real, even_draws, middle_of
from nystrom.precision import accumulator


def landmark_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    num_landmarks: int,
    keep: Tensor | None,
    query_keep: Tensor | None,
    scale: float,
    pinv_steps: int,
    z0: str = "paper",
    gamma: float | None = None,
    draws: Tensor | None = None,
    skip: Tensor | None = None,
) -> Tensor:
    """Attend through landmarks, as `nystrom_attention` and, with `gamma`, as `skyformer_attention` do.

    Args:
        q: Queries (b, h, n, d).
        k: Keys (b, h, s, d).
        v: Values (b, h, s, e).
        num_landmarks: Landmarks m, at most 256; n and s are larger, or there are masks.
        keep: Real keys (b, s).
        query_keep: Real queries (b, n).
        scale: Factor on the scores.
        pinv_steps: Iterations of the inverse.
        z0: Start value of the inverse, see `nystrom.linalg.pinv`.
        gamma: Ridge of Skyformer, whose landmarks are drawn tokens; None means Nyström attention with means.
        draws: (m,) Positions of Skyformer's tokens in their segments; None spreads them evenly.
        skip: (h, 1, taps, 1) Kernel of the skip convolution, for self-attention only.

    Raises:
        ValueError: The kernels cannot take these inputs; the message says what to do.
        NotImplementedError: An input carries a forward-mode tangent; or, later, if a gradient is differentiated.
    """
    taps = None if skip is None else skip[:, 0, :, 0].to(v.dtype)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    if any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in (q, k, v, taps)):
        raise NotImplementedError(
            "backend 'triton' has no derivative in forward mode, as torch's fused calls have none: use reverse mode, "
            "such as torch.func.vjp or jacrev, or a method with second derivatives (see `nystrom methods`)."
        )
    # A compiler uses the operator directly.
    attend = _attention if torch.compiler.is_compiling() else _Attention.apply
    return attend(
        q, k, v, taps, keep, query_keep, draws, num_landmarks, scale, pinv_steps, z0, -1.0 if gamma is None else gamma
    )[0]


@torch.library.custom_op("nystrom::landmark_attention", mutates_args=())
def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    skip: torch.Tensor | None,
    keep: torch.Tensor | None,
    query_keep: torch.Tensor | None,
    draws: torch.Tensor | None,
    m: int,
    scale: float,
    steps: int,
    z0: str,
    gamma: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The output, and what the backward pass needs; a gamma below 0 means softmax."""
    tensors = {"q": q, "k": k, "v": v, "keep": keep, "query_keep": query_keep, "skip": skip}
    check_launch(m, {name: x for name, x in tensors.items() if x is not None})
    with launching_on(q.device):
        return forward_pass(inputs_of(q, k, v, skip, keep, query_keep, draws, m, scale, gamma), steps, z0, gamma)


def forward_pass(
    x: StageInputs, steps: int, z0: str, gamma: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Launch the forward pass; returns the output, and what the backward pass needs."""
    table, share = stages.landmarks(x)
    x, land = _centred(x, table)
    # The right factor comes first, so that its splits and the landmarks' matrices never exist at the same time.
    splits = stages.right_splits(x, land)
    # In float64, which is for checks, only Triton's interpreter has room for it.
    fits = x.m <= LARGEST_WHOLE and (x.q.dtype != torch.float64 or INTERPRETED.value)
    if fits and z0 == "paper" and not x.gaussian and x.few is None:
        middle, inverse, right, logs = stages.middle_whole(x, table, splits, steps)
    else:
        right, logs = stages.joined(x, splits)
        matrix, root = matrix_of(x, land, gamma)
        inverse = inversion.inverse(matrix, divisors(matrix, z0), steps)
        del matrix
        middle = _middle(x, unscaled(inverse, root), right)
    del splits
    return stages.left(x, land[:, :, -x.m :], middle), table, share, inverse, right, logs


@_attention.register_fake
def _(q, k, v, skip, keep, query_keep, draws, m, scale, steps, z0, gamma):
    (b, h, _, d), e, acc = q.shape, v.shape[-1], accumulator(q.dtype)
    rows = 2 * m if gamma < 0 else m
    shapes = ((b, h, rows, d), (b, h, rows), (b, h, m, m), (b, h, m, e), (b, h, m if gamma < 0 else 0, 2))
    return (empty_like(q, e), *(q.new_empty(shape, dtype=acc) for shape in shapes))


@torch.library.custom_op("nystrom::landmark_attention_backward", mutates_args=())
def _attention_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    skip: torch.Tensor | None,
    keep: torch.Tensor | None,
    query_keep: torch.Tensor | None,
    draws: torch.Tensor | None,
    table: torch.Tensor,
    share: torch.Tensor,
    inverse: torch.Tensor,
    right: torch.Tensor,
    logs: torch.Tensor,
    m: int,
    scale: float,
    steps: int,
    z0: str,
    gamma: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k, v and of the skip's kernel (empty without a skip)."""
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    with launching_on(q.device):
        x = inputs_of(q, k, v, skip, keep, query_keep, draws, m, scale, gamma)
        return backward_pass(x, grad, table, share, inverse, right, logs, steps, z0, gamma)


def backward_pass(
    x: StageInputs,
    grad: Tensor,
    table: Tensor,
    share: Tensor,
    inverse: Tensor,
    right: Tensor,
    logs: Tensor,
    steps: int,
    z0: str,
    gamma: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launch the backward pass; returns the gradients of q, k, v and the skip's kernel (empty without a skip)."""
    m = x.m
    x, table = _centred(x, table)
    keys = table[:, :, -m:]
    matrix, root = matrix_of(x, table, gamma)
    whole = unscaled(inverse, root)
    middle = _middle(x, whole, right)
    statistics = stages.left_statistics(x, keys, middle, grad)
    keys_grad, middle_grad = stages.left_landmarks(x, keys, middle, grad, *statistics)

    # middle = inverse @ right, except with few queries (middle = right) or few keys (middle = their values).
    right_grad, whole_grad = whole.mT @ middle_grad, middle_grad @ right.mT
    if x.few is not None:
        few_keys, few_queries = ((x.few == kind)[:, None, None, None] for kind in (FEW_KEYS, FEW_QUERIES))
        right_grad = torch.where(few_queries, middle_grad, torch.where(few_keys, 0.0, right_grad))
        whole_grad = torch.where(few_keys | few_queries, 0.0, whole_grad)
    matrix_grad, root_grad = unscaled_backward(matrix, inverse, root, whole_grad, steps, z0)
    deltas = (right_grad * right).sum(-1)
    queries_grad = stages.right_queries(x, table, right_grad, logs, deltas)
    table_grad = matrix_backward(x, table, matrix, root, matrix_grad, root_grad, gamma)
    table_grad[:, :, :m] += queries_grad
    table_grad[:, :, -m:] += keys_grad
    table_grad *= share[..., None]

    q_grad = stages.left_queries(x, keys, middle, grad, *statistics, table_grad)
    k_grad, v_grad = stages.right_keys(x, table, right_grad, logs, deltas, table_grad, middle_grad, grad)
    taps_grad = grad.new_empty(0) if x.conv is None else stages.skip_taps(x, grad).to(x.conv.dtype)
    return q_grad, k_grad, v_grad, taps_grad


@_attention_backward.register_fake
def _(grad, q, k, v, skip, keep, query_keep, draws, table, share, inverse, right, logs, m, scale, steps, z0, gamma):
    return empty_like(q), empty_like(k), empty_like(v), q.new_empty(0) if skip is None else torch.empty_like(skip)


def _keep_for_backward(ctx, inputs, output) -> None:
    tensors, numbers = inputs[:7], inputs[7:]
    _, *small = output
    ctx.save_for_backward(*tensors, *small)
    ctx.numbers = numbers


def _backward(ctx, grad, *_):
    tensors = ctx.saved_tensors
    # A compiler uses the operator directly.
    differentiate = _attention_backward if torch.compiler.is_compiling() else _Gradients.apply
    q_grad, k_grad, v_grad, taps_grad = differentiate(grad, *tensors, *ctx.numbers)
    return q_grad, k_grad, v_grad, None if tensors[3] is None else taps_grad, *(None,) * 8


class _Attention(torch.autograd.Function):
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
        return one_by_one(_Attention, info, in_dims, inputs)


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


def one_by_one(function, info, in_dims, inputs):
    """Apply a function to each slice of a vmap, and stack the results."""
    results = [
        function.apply(*(x if dim is None else x.select(dim, i) for x, dim in zip(inputs, in_dims, strict=True)))
        for i in range(info.batch_size)
    ]
    stacked = tuple(torch.stack(parts) for parts in zip(*results, strict=True))
    return stacked, (0,) * len(stacked)


_attention.register_autograd(_backward, setup_context=_keep_for_backward)


def inputs_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    skip: Tensor | None,
    keep: Tensor | None,
    query_keep: Tensor | None,
    draws: Tensor | None,
    m: int,
    scale: float,
    gamma: float,
) -> StageInputs:
    """What all stages share, with a plan of the landmarks if they depend on masks or draws."""
    masked, plan = keep is not None or query_keep is not None or all_are_short(q, k, m), None
    gaussian = gamma >= 0
    if gaussian and not masked and draws is None:
        plan = even_token_plan(q.shape[0], q.shape[2], k.shape[2], m, q.device)
    elif gaussian:
        keys, queries = (all_real(x) if mask is None else mask for x, mask in ((k, keep), (q, query_keep)))
        plan = token_plan(keys, queries, m, even_draws(m, q.device) if draws is None else draws)
    keep, query_keep = (None if x is None else x.contiguous().view(torch.uint8) for x in (keep, query_keep))
    if masked and not gaussian:
        plan = segment_plan(keep, query_keep, q.shape[2], k.shape[2], q.shape[0], m, q)
    conv = None if skip is None else skip.contiguous()
    return StageInputs(q, k, v, conv, keep, query_keep, plan, masked, m, scale, gaussian)


def _centred(x: StageInputs, table: Tensor) -> tuple[StageInputs, Tensor]:
    """For distances, the inputs with the centre of the landmarks, and the landmarks relative to it."""
    # Products of 16-bit tokens are exact in float32, but shifted tokens would be rounded to 16 bits.
    if not x.gaussian or x.q.element_size() < 4:
        return x, table
    centre = middle_of(table)
    return replace(x, centre=centre[:, :, 0].contiguous()), table - centre


def _middle(x: StageInputs, whole: Tensor, right: Tensor) -> Tensor:
    middle = whole @ right
    if x.few is None or x.plan is None:
        return middle
    few_keys, few_queries = ((x.few == kind)[:, None, None, None] for kind in (FEW_KEYS, FEW_QUERIES))
    starts, stops = x.plan.starts[:, -x.m :], x.plan.stops[:, -x.m :]
    places = starts.long()[:, None, :, None].expand(-1, x.v.shape[1], -1, x.v.shape[-1])
    # A place without a key may hold NaN, which must not reach the middle.
    there = (stops > starts)[:, None, :, None] & few_keys
    values = torch.where(there, x.v.gather(2, torch.where(there, places, 0)), 0.0)
    return torch.where(few_queries, right, torch.where(few_keys, values.to(right.dtype), middle)).contiguous()
