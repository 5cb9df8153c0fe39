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
from nystrom.gpu.landmark_plan import plan_of
from nystrom.gpu.launch import LARGEST_WHOLE, Target, check_launch, target_of
from nystrom.gpu.operators import differentiable
from nystrom.gpu.program import PROGRAMS, GivenTensor, Program, Slot, empty_like, key_of, packed_size, parts_of
from nystrom.gpu.stages import Small, small_shapes
from nystrom.landmarks import middle_of
from nystrom.precision import accumulator


def landmark_attention(
    q: Tensor, k: Tensor, v: Tensor, *, num_landmarks: int, keep: Tensor | None, query_keep: Tensor | None,
    scale: float, pinv_steps: int, z0: str = "paper", gamma: float | None = None, draws: Tensor | None = None,
    skip: Tensor | None = None
) -> Tensor:  # fmt: skip
    """Attend through landmarks, as `nystrom_attention` and, with `gamma`, as `skyformer_attention` do.

    Args:
        num_landmarks: Landmarks m, at most 256; n and s are larger, or there are masks.
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
    return _attend(
        q, k, v, taps, keep, query_keep, draws, num_landmarks, scale, pinv_steps, z0, -1.0 if gamma is None else gamma
    )


def _forward(
    q: Tensor, k: Tensor, v: Tensor, skip: Tensor | None, keep: Tensor | None, query_keep: Tensor | None,
    draws: Tensor | None, m: int, scale: float, steps: int, z0: str, gamma: float
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The output, and what the backward pass needs, see `Small`; a gamma below 0 means softmax."""
    inputs = (q, k, v, skip, keep, query_keep, draws)
    program = forward_program(key_of(*inputs), target_of(q.device), m, scale, steps, z0, gamma)
    kept, out = program(*inputs)
    return out, kept


@functools.lru_cache(maxsize=PROGRAMS)
def forward_program(
    given: tuple[GivenTensor | None, ...], target: Target, m: int, scale: float, steps: int, z0: str, gamma: float
) -> Program:
    """The program of the forward pass for such inputs; its results are what the backward pass needs, and the output."""
    names = ("q", "k", "v", "skip", "keep", "query_keep", "draws")
    check_launch(m, {name: x for name, x in zip(names, given, strict=True) if x is not None})
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
            matrix, roots = stages.matrix_blocks(x, land, gamma)
            inversion.inverse(program, matrix, _find_divisors(x, matrix, z0), steps, small.inverse)
            stages.middle_blocks(x, small, roots)
    stages.left(x, land.rows(-m), small.middle)
    return program


def _fake(q, k, v, skip, keep, query_keep, draws, m, scale, steps, z0, gamma):
    (b, h, _, d), e = q.shape, v.shape[-1]
    size = packed_size(small_shapes(b, h, d, e, m, gamma >= 0))
    return empty_like(q, e), q.new_empty(size, dtype=accumulator(q.dtype))


def _backward_pass(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, skip: Tensor | None, keep: Tensor | None, query_keep: Tensor | None,
    draws: Tensor | None, kept: Tensor, m: int, scale: float, steps: int, z0: str, gamma: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v and of the skip's kernel (empty without a skip)."""
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    inputs = (grad, kept, q, k, v, skip, keep, query_keep, draws)
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
        matrix, roots = stages.matrix_blocks(x, table, gamma)
        middle_grad, right_grad, inverse_grad, root_grad, deltas = stages.middle_blocks_backward(
            x, small, roots, middle_sums
        )
        divided = _find_divisors(x, matrix, z0)
        matrix_grad, divisor_grads = inversion.inverse_backward(program, matrix, divided, steps, inverse_grad)
        if divided is not None:
            program.torch(_through_divisors, matrix, divided, divisor_grads, z0, matrix_grad)
        query_sums = stages.right_queries(x, table, right_grad, small.logs, deltas)
        of_matrix = (matrix, roots, matrix_grad, root_grad)
        table_grad = stages.table_blocks_backward(x, table, small.share, of_matrix, query_sums, key_sums)
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


def _stage_inputs(program: Program, inputs: Sequence[Any], m: int, scale: float, gamma: float) -> StageInputs:
    """The inputs that all stages share, with a plan of the landmarks if they depend on masks or draws."""
    q, k, v, conv, keep, query_keep, draws = inputs
    masked = keep is not None or query_keep is not None or min(q.shape[2], k.shape[2]) <= m
    x = StageInputs(program, q, k, v, m, scale, conv, keep, query_keep, None, masked, gamma >= 0)
    if not masked and not x.gaussian:
        return x
    return replace(x, plan=plan_of(program, (query_keep, keep, draws), x.sizes, gaussian=x.gaussian))


def _is_fused(x: StageInputs, z0: str) -> bool:
    """Whether one tile holds what lies between the passes, see `nystrom.gpu.middle`, or `nystrom.gpu.middle_blocks`."""
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


def _find_divisors(x: StageInputs, matrix: Slot, z0: str) -> Slot | None:
    if z0 == "paper":
        return None
    given = x.scratch(*matrix.shape[:2])
    x.program.torch(lambda matrix, given: given.copy_(inversion.divisors(matrix, z0)), matrix, given)
    return given


def _through_divisors(matrix: Tensor, given: Tensor, divisor_grads: Tensor, z0: str, matrix_grad: Tensor) -> None:
    matrix_grad += inversion.divisors_backward(matrix, given, divisor_grads, z0)
