r"""Near_far with a bias of positions by Triton kernels: the softmax over near, heavy and given far keys.

The bias of a near or heavy key is a number for the distance from its query, of a strip of each head. Torch makes what
clusters take part with, see `nystrom.attention.parts.biased_blocks`: their mean keys, and for each block their mean
values and the logarithms of their weights. These are inputs with gradients of their own, as the strip is.

Torch adds up by distance the gradients of the scores of heavy keys, which are stored, and those of near keys, which the
kernels have added up over blocks.
"""

import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from nystrom.gpu.launch import Target, target_of
from nystrom.gpu.near_far import near_far_stages as stages
from nystrom.gpu.near_far.near_far_attention import check_inputs
from nystrom.gpu.near_far.near_far_inputs import NearFarInputs
from nystrom.gpu.near_far.near_far_stages import Totals
from nystrom.gpu.operators import differentiable
from nystrom.gpu.program import PROGRAMS, GivenTensor, Program, empty_like, key_of
from nystrom.precision import accumulator


def near_far_with_positions(
    q: Tensor, k: Tensor, v: Tensor, strip: Tensor, given: Sequence[Tensor], *, block_size: int, reach: int,
    scale: float
) -> Tensor:  # fmt: skip
    """Self-attention of whole blocks of tokens, the first real one at the begin of the first block.

    The result has a row for each head (b h, n, e): merging these axes outside would compare a symbolic length.

    Args:
        strip: (h, 2 w + 1) The bias of the distances -w to w, key minus query; the ends stand for all beyond.
        given: Mean keys of the clusters (b, h, m, d); for each block the mean values of the far keys of each cluster
            (b, h, l, m, e), and the logarithms of their weights (b, h, l, m); the positions of the heavy keys (b, h,
            g), and which of them exist; the cluster of each key (b, h, n), m for heavy keys and keys that are not real.

    Raises:
        ValueError: The kernels cannot take these inputs; the message says what to do.
        NotImplementedError: An input carries a forward-mode tangent; or, later, if a gradient is differentiated.
    """
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    *given, cluster = (x.contiguous() for x in (strip, *given))
    return _attend(q, k, v, *given, cluster.to(torch.int32), block_size, reach, scale)


def _inputs(program: Program, tensors: list, block: int, reach: int, scale: float) -> tuple[NearFarInputs, Totals]:
    """The inputs that all stages share, and those of the clusters."""
    q, k, v, strip, means, values, weights, heavy, exists, cluster = tensors
    x = NearFarInputs(program, q, k, v, means.shape[2], scale, heavy, exists, cluster, None, block, reach, strip)
    return x, Totals(means, values, weights)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, strip: Tensor, means: Tensor, values: Tensor, weights: Tensor, heavy: Tensor,
    exists: Tensor, cluster: Tensor, block: int, reach: int, scale: float
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The output, and the normalisers of the queries."""
    inputs = (q, k, v, strip, means, values, weights, heavy, exists, cluster)
    logs, out = forward_program(key_of(*inputs), target_of(q.device), block, reach, scale)(*inputs)
    return out.flatten(0, 1), logs


@functools.lru_cache(maxsize=PROGRAMS)
def forward_program(
    given: tuple[GivenTensor | None, ...], target: Target, block: int, reach: int, scale: float
) -> Program:
    """The program of the forward pass for such inputs; its results are the normalisers and the output."""
    check_inputs(given)
    program = Program(given)
    x, of = _inputs(program, program.inputs, block, reach, scale)
    logs = program.result((*x.q.shape[:3], 2), x.acc)
    stages.attend(x, program.result((*x.q.shape[:3], x.v.shape[3]), x.q.dtype), of, logs, None)
    return program


def _backward_pass(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, strip: Tensor, means: Tensor, values: Tensor, weights: Tensor,
    heavy: Tensor, exists: Tensor, cluster: Tensor, out: Tensor, logs: Tensor, block: int, reach: int, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v, strip, means, values and weights."""
    grad, out = (x.contiguous().unflatten(0, q.shape[:2]) for x in (grad, out))
    inputs = (grad, logs, out, q, k, v, strip, means, values, weights, heavy, exists, cluster)
    program = backward_program(key_of(*inputs), target_of(q.device), block, reach, scale)
    of_heavy, q_grad, of_means, of_values, of_weights, near, k_grad, v_grad = program(*inputs)
    of_strip = _of_window(near.sum(dim=(0, 1)), reach, strip.shape[1] // 2)
    if heavy.shape[2]:
        of_strip = of_strip + _of_heavy(of_heavy, heavy, strip.shape[1] // 2)
    return q_grad, k_grad, v_grad, of_strip, of_means.sum(dim=2), of_values, of_weights


@functools.lru_cache(maxsize=PROGRAMS)
def backward_program(
    given: tuple[GivenTensor | None, ...], target: Target, block: int, reach: int, scale: float
) -> Program:
    """The program of the backward pass; its results are the gradients of the scores of heavy keys, of q, of means,
    values and weights for each block, spans of those of the scores of near keys, and the gradients of k and of v.
    """
    program = Program(given)
    grad, logs, out, *tensors = program.inputs
    x, of = _inputs(program, tensors, block, reach, scale)
    deltas = stages.queries(x, of, out, logs, grad, program.result((*x.q.shape[:3], x.heavy.shape[2]), x.acc))
    stages.blockwise(x, of, logs, deltas, grad)
    stages.window(x, logs, deltas, grad)
    k_grad, v_grad = stages.keys(x, None, None, logs, deltas, grad, (None, None))
    if x.heavy.shape[2]:
        stages.store_heavy(x, stages.shared(x, None, logs, deltas, grad), k_grad, v_grad)
    return program


def _of_window(near: Tensor, reach: int, furthest: int) -> Tensor:
    """Sums of gradients (h, queries of a block, keys of its window) by distance (h, 2 w + 1)."""
    (_, size, length), more = near.shape, furthest - near.shape[1] - reach + 1
    # Rows that are one longer each time shift by one, so that columns are distances.
    shifted = F.pad(near.flip(1), (0, size)).flatten(1)[:, :-size].unflatten(1, (size, size + length - 1))
    return F.pad(shifted.sum(dim=1), (more, more))


def _of_heavy(scores: Tensor, heavy: Tensor, furthest: int) -> Tensor:
    """Sums of gradients (b, h, queries, heavy keys) by distance (h, 2 w + 1)."""
    place = torch.arange(scores.shape[2], device=scores.device)[:, None]
    distance = heavy[:, :, None] - place
    beyond = distance <= -furthest, distance >= furthest
    sides = [torch.where(side, scores, 0.0).sum(dim=(0, 2, 3)) for side in beyond]
    # Queries at the distances between from each heavy key.
    between = torch.arange(1 - furthest, furthest, device=scores.device)[:, None]
    queries = heavy[:, :, None] - between
    exists = (queries >= 0) & (queries < scores.shape[2])
    near = scores.gather(2, torch.where(exists, queries, 0))
    near = torch.where(exists, near, 0.0).sum(dim=(0, 3))
    return torch.cat([sides[0][:, None], near, sides[1][:, None]], dim=1)


def _fake(q, k, v, strip, means, values, weights, heavy, exists, cluster, block, reach, scale):
    return v.new_empty((v.shape[0] * v.shape[1], *v.shape[2:])), q.new_empty(
        (*q.shape[:3], 2), dtype=accumulator(q.dtype)
    )


def _fake_backward(grad, q, k, v, strip, means, values, weights, *_):
    given = (strip, means, values, weights)
    return (*(empty_like(x) for x in (q, k, v)), *(torch.empty_like(x) for x in given))


_attend = differentiable(
    "near_far_with_positions", _forward, _backward_pass, (_fake, _fake_backward), tensors=10, needs_output=True
)
