r"""Nyström attention and Skyformer in a few launches of Triton kernels: the same functions as in `nystrom.attention`.

Forward: landmarks, the right factor in splits and their combination, the landmarks' m x m matrix and its inverse, the
middle, and the left factor with the skip. Between the passes, q, k, v and tensors of size m are kept; the backward pass
recomputes everything else. If the landmarks fit into one block, it reads queries, gradient, keys and values twice (with
a skip, the gradient twice more and the values once more). It writes each gradient once.

Sums over tokens are computed in spans, stored separately and then added, so results and gradients are reproducible.

Both passes are programs (`nystrom.gpu.program`), which become part of torch by `nystrom.gpu.operators`.

Source: Xiong et al. (2021), arXiv:2102.03902, eq. (13)-(17); Chen et al. (2021), arXiv:2111.00035, sections 4.2, 4.4.
"""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nystrom.gpu import inversion, stages
from nystrom.gpu.arithmetic import INTERPRETED
from nystrom.gpu.inputs import StageInputs
from nystrom.gpu.launch import LARGEST_WHOLE, Target, check_launch, target_of
from nystrom.gpu.matrix import divisors, divisors_backward, matrix_backward, matrix_of, unscaled, unscaled_backward
from nystrom.gpu.operators import differentiable
from nystrom.gpu.plan import FEW_KEYS, FEW_QUERIES, LandmarkPlan, even_token_plan, segment_plan, token_plan
from nystrom.gpu.program import PROGRAMS, GivenTensor, Program, Slot, empty_like, key_of, packed_size, parts_of
from nystrom.gpu.stages import Small, small_shapes
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
    taps = None if skip is None else skip[:, 0, :, 0].to(v.dtype).contiguous()
    keep, query_keep = (None if x is None else x.contiguous() for x in (keep, query_keep))
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    if gamma is not None and draws is None and torch.compiler.is_compiling():
        # Else the plan would be kept, perhaps in memory of a CUDA graph that the compiler makes.
        draws = even_draws(num_landmarks, q.device)
    return _attend(
        q, k, v, taps, keep, query_keep, draws, num_landmarks, scale, pinv_steps, z0, -1.0 if gamma is None else gamma
    )


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    skip: Tensor | None,
    keep: Tensor | None,
    query_keep: Tensor | None,
    draws: Tensor | None,
    m: int,
    scale: float,
    steps: int,
    z0: str,
    gamma: float,
) -> tuple[Tensor, Tensor]:
    """The output, and what the backward pass needs, see `Small`; a gamma below 0 means softmax."""
    inputs = (q, k, v, skip, keep, query_keep, *given_plan(q, k, keep, query_keep, draws, m, gamma))
    program = forward_program(key_of(*inputs), target_of(q.device), m, scale, steps, z0, gamma)
    kept, out = program(*inputs)
    return out, kept


@functools.lru_cache(maxsize=PROGRAMS)
def forward_program(
    given: tuple[GivenTensor | None, ...], target: Target, m: int, scale: float, steps: int, z0: str, gamma: float
) -> Program:
    """The program of the forward pass for such inputs; its results are what the backward pass needs, and the output.

    Raises:
        ValueError: The kernels cannot take these inputs; the message says what to do.
    """
    names = ("q", "k", "v", "skip", "keep", "query_keep")
    check_launch(m, {name: x for name, x in zip(names, given, strict=False) if x is not None})
    program = Program(given)
    x = _stage_inputs(program, program.inputs, m, scale, gamma)
    (b, h, _, d), e = x.q.shape, x.v.shape[-1]
    small = Small(*program.packed(small_shapes(b, h, d, e, m, x.gaussian), x.acc))
    stages.landmarks(x, small.table, small.share)
    x, land = _centred(x, small.table)
    fused = _is_fused(x, z0)
    with program.reused():
        splits = stages.right_splits(x, land)
        if fused:
            stages.middle_forward(x, splits, small, steps)
        else:
            stages.joined(x, splits, small.right, small.logs)
    if not fused:
        with program.reused():
            matrix, root = x.scratch(b, h, m, m), x.scratch(b, h, m) if x.gaussian else None
            program.torch(_find_matrix, land, x.few, m, scale, gamma, matrix, root)
            inversion.inverse(program, matrix, _find_divisors(x, matrix, z0), steps, small.inverse)
            program.torch(_find_middle, small.inverse, root, small.right, *_short(x), small.middle)
    stages.left(x, land.rows(-m), small.middle)
    return program


def _fake(q, k, v, skip, keep, query_keep, draws, m, scale, steps, z0, gamma):
    (b, h, _, d), e = q.shape, v.shape[-1]
    size = packed_size(small_shapes(b, h, d, e, m, gamma >= 0))
    return empty_like(q, e), q.new_empty(size, dtype=accumulator(q.dtype))


def _backward_pass(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    skip: Tensor | None,
    keep: Tensor | None,
    query_keep: Tensor | None,
    draws: Tensor | None,
    kept: Tensor,
    m: int,
    scale: float,
    steps: int,
    z0: str,
    gamma: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and of the skip's kernel (empty without a skip)."""
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    inputs = (grad, kept, q, k, v, skip, keep, query_keep, *given_plan(q, k, keep, query_keep, draws, m, gamma))
    program = backward_program(key_of(*inputs), target_of(q.device), m, scale, steps, z0, gamma)
    gradients = program(*inputs)
    q_grad, k_grad, v_grad, taps_grad = gradients if skip is not None else (*gradients, grad.new_empty(0))
    return q_grad, k_grad, v_grad, taps_grad


@functools.lru_cache(maxsize=PROGRAMS)
def backward_program(
    given: tuple[GivenTensor | None, ...], target: Target, m: int, scale: float, steps: int, z0: str, gamma: float
) -> Program:
    """The program of the backward pass; its results are the gradients of q, k, v and, with a skip, of its kernel."""
    program = Program(given)
    grad, kept, *inputs = program.inputs
    x = _stage_inputs(program, inputs, m, scale, gamma)
    (b, h, _, d), e = x.q.shape, x.v.shape[-1]
    small = Small(*parts_of(kept, small_shapes(b, h, d, e, m, x.gaussian)))
    x, table = _centred(x, small.table)
    keys = table.rows(-m)
    statistics = stages.left_statistics(x, keys, small.middle, grad)
    key_sums, middle_sums = stages.left_landmarks(x, keys, small.middle, grad, *statistics)
    if _is_fused(x, z0):
        matrix, middle_grad, right_grad, inverse_grad, deltas = stages.middle_backward(x, small, middle_sums)
        matrix_grad, _ = inversion.inverse_backward(program, matrix, None, steps, inverse_grad)
        query_sums = stages.right_queries(x, table, right_grad, small.logs, deltas)
        table_grad = stages.table_backward(x, small, matrix, matrix_grad, query_sums, key_sums)
    else:
        keys_grad, middle_grad = x.summed(key_sums), x.summed(middle_sums)
        matrix, root, root_grad = x.scratch(b, h, m, m), *(x.scratch(b, h, m) if x.gaussian else None for _ in range(2))
        program.torch(_find_matrix, table, x.few, m, scale, gamma, matrix, root)
        right_grad, inverse_grad, deltas = x.scratch(b, h, m, e), x.scratch(b, h, m, m), x.scratch(b, h, m)
        given_grads = right_grad, inverse_grad, root_grad, deltas
        program.torch(_inverse_gradient, small.inverse, root, small.right, x.few, middle_grad, *given_grads)
        divided = _find_divisors(x, matrix, z0)
        matrix_grad, divisor_grads = inversion.inverse_backward(program, matrix, divided, steps, inverse_grad)
        queries_grad = x.summed(stages.right_queries(x, table, right_grad, small.logs, deltas))
        of_matrix, table_grad = (table, x.few, matrix, root, matrix_grad, root_grad), x.scratch(b, h, x.rows, d)
        program.torch(_through_matrix, *of_matrix, scale, gamma, divided, divisor_grads, z0, table_grad)
        program.torch(_add_sides, queries_grad, keys_grad, small.share, table_grad)

    stages.left_queries(x, keys, small.middle, grad, *statistics, table_grad)
    stages.right_keys(x, table, right_grad, small.logs, deltas, table_grad, middle_grad, grad)
    if x.conv is not None:
        stages.skip_taps(x, grad)
    return program


def _fake_backward(grad, q, k, v, skip, keep, query_keep, draws, kept, m, scale, steps, z0, gamma):
    return empty_like(q), empty_like(k), empty_like(v), q.new_empty(0) if skip is None else torch.empty_like(skip)


_attend = differentiable(
    "landmark_attention", _forward, _backward_pass, (_fake, _fake_backward), tensors=7, needs_output=False
)


def given_plan(
    q: Tensor,
    k: Tensor,
    keep: Tensor | None,
    query_keep: Tensor | None,
    draws: Tensor | None,
    m: int,
    gamma: float,
) -> tuple[Tensor | None, ...]:
    """For the Gaussian kernel, the parts of the plan of its landmarks."""
    if gamma < 0:
        return ()
    masked = keep is not None or query_keep is not None or all_are_short(q, k, m)
    if not masked and draws is None:
        return even_token_plan(q.shape[0], q.shape[2], k.shape[2], m, q.device)
    keys, queries = (all_real(x) if mask is None else mask for x, mask in ((k, keep), (q, query_keep)))
    return token_plan(keys, queries, m, even_draws(m, q.device) if draws is None else draws)


def _stage_inputs(program: Program, inputs: Sequence[Any], m: int, scale: float, gamma: float) -> StageInputs:
    """What all stages share, with a plan of the landmarks if they depend on masks or draws."""
    q, k, v, conv, keep, query_keep, *plan = inputs
    (b, _, n, _), s = q.shape, k.shape[2]
    gaussian, masked = gamma >= 0, keep is not None or query_keep is not None or min(n, s) <= m
    whole = LandmarkPlan(*plan) if gaussian else None
    if masked and not gaussian:
        whole = segment_plan(program, keep, query_keep, n, s, b, m)
    return StageInputs(program, q, k, v, conv, keep, query_keep, whole, masked, m, scale, gaussian)


def _is_fused(x: StageInputs, z0: str) -> bool:
    """Whether kernels compute what lies between the passes, see `nystrom.gpu.middle`; elsewhere torch does."""
    # In float64, which is for checks, only Triton's interpreter has room for it.
    fits = x.m <= LARGEST_WHOLE and (x.q.dtype != torch.float64 or INTERPRETED.value)
    return fits and z0 == "paper" and not x.gaussian


def _centred(x: StageInputs, table: Slot) -> tuple[StageInputs, Slot]:
    """For distances, the inputs with the centre of the landmarks, and the landmarks relative to it."""
    # Products of 16-bit tokens are exact in float32, but shifted tokens would be rounded to 16 bits.
    if not x.gaussian or x.q.dtype.itemsize < 4:
        return x, table
    b, h, _, d = table.shape
    centre, moved = x.scratch(b, h, d), x.scratch(*table.shape)
    x.program.torch(_find_centre, table, centre, moved)
    return replace(x, centre=centre), moved


def _find_centre(table: Tensor, centre: Tensor, moved: Tensor) -> None:
    middle = middle_of(table)
    centre.copy_(middle[:, :, 0])
    torch.sub(table, middle, out=moved)


def _find_matrix(
    table: Tensor, few: Tensor | None, m: int, scale: float, gamma: float, matrix: Tensor, root: Tensor | None
) -> None:
    found, roots = matrix_of(table, few, m, scale, gamma)
    matrix.copy_(found)
    if root is not None and roots is not None:
        root.copy_(roots)


def _find_divisors(x: StageInputs, matrix: Slot, z0: str) -> Slot | None:
    if z0 == "paper":
        return None
    given = x.scratch(*matrix.shape[:2])
    x.program.torch(lambda matrix, given: given.copy_(divisors(matrix, z0)), matrix, given)
    return given


def _short(x: StageInputs) -> tuple[Slot | None, ...]:
    """What the middle of short sequences is found from: which are short, and the values of their keys."""
    if x.few is None or x.plan is None:
        return None, None, None, None
    return x.few, x.plan.starts.rows(-x.m), x.plan.stops.rows(-x.m), x.v


def _find_middle(
    inverse: Tensor,
    root: Tensor | None,
    right: Tensor,
    few: Tensor | None,
    starts: Tensor | None,
    stops: Tensor | None,
    v: Tensor | None,
    middle: Tensor,
) -> None:
    torch.matmul(unscaled(inverse, root), right, out=middle)
    if few is None or starts is None or stops is None or v is None:
        return
    few_keys, few_queries = ((few == kind)[:, None, None, None] for kind in (FEW_KEYS, FEW_QUERIES))
    places = starts.long()[:, None, :, None].expand(-1, v.shape[1], -1, v.shape[-1])
    # A place without a key may hold NaN, which must not reach the middle.
    there = (stops > starts)[:, None, :, None] & few_keys
    values = torch.where(there, v.gather(2, torch.where(there, places, 0)), 0.0)
    middle.copy_(torch.where(few_queries, right, torch.where(few_keys, values.to(right.dtype), middle)))


def _inverse_gradient(
    inverse: Tensor,
    root: Tensor | None,
    right: Tensor,
    few: Tensor | None,
    middle_grad: Tensor,
    right_grad: Tensor,
    inverse_grad: Tensor,
    root_grad: Tensor | None,
    deltas: Tensor,
) -> None:
    """Gradients of the right factor, the inverse and the roots from that of the middle."""
    # middle = inverse @ right, except with few queries (middle = right) or few keys (middle = their values).
    torch.matmul(unscaled(inverse, root).mT, middle_grad, out=right_grad)
    whole_grad = middle_grad @ right.mT
    if few is not None:
        few_keys, few_queries = ((few == kind)[:, None, None, None] for kind in (FEW_KEYS, FEW_QUERIES))
        right_grad.copy_(torch.where(few_queries, middle_grad, torch.where(few_keys, 0.0, right_grad)))
        whole_grad = torch.where(few_keys | few_queries, 0.0, whole_grad)
    scaled, roots = unscaled_backward(inverse, root, whole_grad)
    inverse_grad.copy_(scaled)
    if root_grad is not None and roots is not None:
        root_grad.copy_(roots)
    torch.sum(right_grad * right, -1, out=deltas)


def _through_matrix(
    table: Tensor,
    few: Tensor | None,
    matrix: Tensor,
    root: Tensor | None,
    matrix_grad: Tensor,
    root_grad: Tensor | None,
    scale: float,
    gamma: float,
    given: Tensor | None,
    divisor_grads: Tensor,
    z0: str,
    table_grad: Tensor,
) -> None:
    if given is not None:
        matrix_grad = matrix_grad + divisors_backward(matrix, given, divisor_grads, z0)
    table_grad.copy_(matrix_backward(table, few, matrix, root, matrix_grad, root_grad, scale, gamma))


def _add_sides(queries_grad: Tensor, keys_grad: Tensor, share: Tensor, table_grad: Tensor) -> None:
    m = keys_grad.shape[2]
    table_grad[:, :, :m] += queries_grad
    table_grad[:, :, -m:] += keys_grad
    table_grad *= share[..., None]
