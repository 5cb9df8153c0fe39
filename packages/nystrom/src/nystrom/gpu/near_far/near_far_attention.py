r"""Attention to near tokens, heavy keys and clusters by Triton kernels: the same function as in `nystrom.attention`.

The heavy keys, and the cluster of each other key, are given. Forward: the sums of each cluster in spans, then one pass
over the queries. Between the passes, q, k, v, the output, each query's normaliser, tensors of size m and, for each
block, the numbers of far tokens are kept; the backward pass recomputes everything else.

Sums over tokens are computed in spans, stored separately and then added, so the kernels always add in the same order.
Heavy keys and clusters are chosen by kernels too, see `nystrom.gpu.near_far.choice`. A call that needs them only for
its output runs both in one program.

Both passes are programs (`nystrom.gpu.program`), which become part of torch by `nystrom.gpu.operators`.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nystrom.gpu.launch import Target, check_launch, target_of
from nystrom.gpu.near_far import near_far_stages as stages
from nystrom.gpu.near_far.choice import ChoiceOptions, add_choice
from nystrom.gpu.near_far.near_far_inputs import NearFarInputs
from nystrom.gpu.near_far.near_far_stages import Totals
from nystrom.gpu.operators import differentiable
from nystrom.gpu.program import PROGRAMS, GivenTensor, Program, empty_like, key_of, packed_size, parts_of
from nystrom.precision import accumulator
from nystrom.private_torch import is_forward_mode, is_transformed

# Wider heads would leave too few registers for the accumulators of keys and values.
LARGEST_WIDTH = 128


def near_far(
    q: Tensor, k: Tensor, v: Tensor, heavy: Tensor, exists: Tensor, cluster: Tensor, *, num_clusters: int,
    block_size: int, reach: int, keep: Tensor | None, scale: float
) -> Tensor:  # fmt: skip
    """Attend to near tokens, heavy keys and clusters.

    Args:
        k: Keys; zeros where they are not real, as for values.
        heavy: (b, h, g) Positions of the heavy keys.
        exists: (b, h, g) Which of them exist.
        cluster: (b, h, s) The cluster of each key; `num_clusters` for heavy keys and keys that are not real.
        block_size: Queries of a block; 0 for cross-attention, where no tokens are near.
        reach: Tokens on either side of its block that a query sees.
        keep: (b, n) Real tokens, from the first of which blocks are counted; None for the first token.

    Raises:
        ValueError: The kernels cannot take these inputs; the message says what to do.
        NotImplementedError: An input carries a forward-mode tangent; or, later, if a gradient is differentiated.
    """
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    keep = None if keep is None else keep.contiguous()
    cluster, heavy, exists = cluster.to(torch.int32).contiguous(), heavy.contiguous(), exists.contiguous()
    return _attend(q, k, v, heavy, exists, cluster, keep, num_clusters, block_size, reach, scale)


def can_choose_and_attend() -> bool:
    """Whether `choose_and_attend` can be called: compilers and transforms see the choice and the attention apart."""
    return not (torch.compiler.is_compiling() or is_transformed() or is_forward_mode())


def choose_and_attend(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, query_keep: Tensor | None, options: ChoiceOptions, *,
    block_size: int, reach: int, is_self: bool
) -> Tensor:  # fmt: skip
    """Choose heavy keys and clusters and attend to them, as `choose_by_kernels` and then `near_far` do.

    Raises:
        ValueError: The kernels cannot take these inputs; the message says what to do.
    """
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    keep, query_keep = (x if x is None else x.contiguous() for x in (keep, query_keep))
    inputs = (q, k, v, keep, query_keep, options, block_size, reach, is_self)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return _ChooseAndAttend.apply(*inputs)
    return _choose_and_forward(*inputs)[-1]


def _choose_and_forward(q, k, v, keep, query_keep, options, block, reach, is_self):
    """Heavy keys, which exist, clusters, what the backward pass needs, and the output."""
    inputs = (q, k, v, keep, query_keep)
    return whole_program(key_of(*inputs), target_of(q.device), options, block, reach, is_self)(*inputs)


@functools.lru_cache(maxsize=PROGRAMS)
def whole_program(
    given: tuple[GivenTensor | None, ...], target: Target, options: ChoiceOptions, block: int, reach: int, is_self: bool
) -> Program:  # fmt: skip
    """The program of the choice and of the forward pass."""
    check_inputs(given)
    program = Program(given)
    q, k, v, keep, query_keep = program.inputs
    with program.reused():
        chosen = add_choice(program, q, k, keep, query_keep, options)
    inputs = (q, k, v, *chosen, keep if is_self else None)
    _attend_to_chosen(_stage_inputs(program, inputs, options.m, block, reach, options.scale))
    return program


def _forward(
    q: Tensor, k: Tensor, v: Tensor, heavy: Tensor, exists: Tensor, cluster: Tensor, keep: Tensor | None, m: int,
    block: int, reach: int, scale: float
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The output, and what the backward pass needs."""
    inputs = (q, k, v, heavy, exists, cluster, keep)
    kept, out = forward_program(key_of(*inputs), target_of(q.device), m, block, reach, scale)(*inputs)
    return out, kept


@functools.lru_cache(maxsize=PROGRAMS)
def forward_program(
    given: tuple[GivenTensor | None, ...], target: Target, m: int, block: int, reach: int, scale: float
) -> Program:
    """The program of the forward pass for such inputs; its results are what the backward pass needs, and the output."""
    check_inputs(given)
    program = Program(given)
    _attend_to_chosen(_stage_inputs(program, program.inputs, m, block, reach, scale))
    return program


def check_inputs(given: tuple[GivenTensor | None, ...]) -> None:
    """Raise ValueError for what the kernels do not support, of q, k and v, which come first."""
    tensors = {"q": given[0], "k": given[1], "v": given[2]}
    for name, x in tensors.items():
        if x is not None and x.shape[-1] > LARGEST_WIDTH:
            raise ValueError(
                f"{name} has head width {x.shape[-1]}; expected at most {LARGEST_WIDTH} in near_far: split heads or "
                "pass backend='torch'."
            )
    # There may be any number of clusters.
    check_launch(1, tensors)


def _attend_to_chosen(x: NearFarInputs) -> None:
    """Add the launches of the forward pass; its results are what the backward pass needs, and the output."""
    means, sums, number, logs, left = x.program.packed(_shapes(x.q, x.v, x.m, x.block), x.acc)
    of = Totals(means, sums, number)
    with x.program.reused():
        stages.totals(x, of)
    stages.attend(x, x.program.like(x.q, x.v.shape[-1]), of, logs, left)


def _shapes(q: Any, v: Any, m: int, block: int) -> tuple[tuple[int, ...], ...]:
    """Shapes of what is kept: means, sums and numbers of the clusters, normalisers, and numbers of far tokens."""
    (b, h, n, d), e = q.shape, v.shape[-1]
    return (b, h, m, d), (b, h, m, e), (b, h, m), (b, h, n, 2), (b, h, stages.rows_of_left(n, block), m)


def _fake(q, k, v, heavy, exists, cluster, keep, m, block, reach, scale):
    size = packed_size(_shapes(q, v, m, block))
    return empty_like(q, v.shape[-1]), q.new_empty(size, dtype=accumulator(q.dtype))


def _backward_pass(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, heavy: Tensor, exists: Tensor, cluster: Tensor, keep: Tensor | None,
    out: Tensor, kept: Tensor, m: int, block: int, reach: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v."""
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    inputs = (grad, kept, out, q, k, v, heavy, exists, cluster, keep)
    program = backward_program(key_of(*inputs), target_of(q.device), m, block, reach, scale)
    q_grad, k_grad, v_grad = program(*inputs)
    return q_grad, k_grad, v_grad


@functools.lru_cache(maxsize=PROGRAMS)
def backward_program(
    given: tuple[GivenTensor | None, ...], target: Target, m: int, block: int, reach: int, scale: float
) -> Program:
    """The program of the backward pass; its results are the gradients of q, k and v."""
    program = Program(given)
    grad, kept, out, *inputs = program.inputs
    x = _stage_inputs(program, inputs, m, block, reach, scale)
    means, sums, number, logs, left = parts_of(kept, _shapes(x.q, x.v, m, block))
    of = Totals(means, sums, number)
    deltas = stages.queries(x, of, out, logs, grad)
    # A mean is taken over all keys of its cluster, near or far.
    through_mean = Totals(x.scratch(*means.shape), x.scratch(*sums.shape), number)
    with program.reused():
        stages.join(x, (*stages.shared(x, of, logs, deltas, grad), None), through_mean)
    k_grad, v_grad = stages.keys(x, means, left, logs, deltas, grad, through_mean[:2])
    if x.heavy.shape[2]:
        stages.store_heavy(x, stages.shared(x, None, logs, deltas, grad), k_grad, v_grad)
    return program


def _fake_backward(grad, q, k, v, heavy, exists, cluster, keep, out, kept, m, block, reach, scale):
    return empty_like(q), empty_like(k), empty_like(v)


_attend = differentiable("near_far", _forward, _backward_pass, (_fake, _fake_backward), tensors=7, needs_output=True)


class _ChooseAndAttend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        q, k, v, keep, _, options, block, reach, is_self = inputs
        *chosen, kept, out = _choose_and_forward(*inputs)
        tensors, numbers = (q, k, v, *chosen, keep if is_self else None), (options.m, block, reach, options.scale)
        _attend.keep(ctx, (*tensors, *numbers), (out, kept))
        return out

    backward = staticmethod(_attend.differentiate)  # pyright: ignore[reportAssignmentType]


def _stage_inputs(
    program: Program, inputs: Sequence[Any], m: int, block: int, reach: int, scale: float
) -> NearFarInputs:
    """The inputs that all stages share."""
    q, k, v, heavy, exists, cluster, keep = inputs
    first = None if keep is None else stages.first_real(program, keep)
    return NearFarInputs(program, q, k, v, m, scale, heavy, exists, cluster, first, block, reach)
