r"""Heavy keys and clusters by Triton kernels: the same choice as in `nystrom.attention.parts.clusters`.

Launches: the centre of the keys, and the means of segments; the scores of the keys with the mean queries; the order of
the keys; of more than _COMPARED_WHOLE, the groups that hold the largest of these; the heavy keys, which leave the
clusters; then for each step of k-means except the last the nearest centre of each sampled key, and their means; in
the last step the nearest centre of each key. With masks, first the ranks of the real tokens. There may be any number of
clusters. Nothing has a size of keys times clusters, the host waits for nothing, and sums are added in a fixed order, so
the same inputs give the same choice.

For s keys, and r <= 8 m of them sampled, the choice reads per sequence and head the queries once, the keys three times
and, in each step except the last, 2 r of them. Most operations are products with centres: s m d in the last step,
and r m d in each other step, as many as for its sums. Each is computed as three, in bfloat16, or tf32 for other keys:
with centres of fewer digits, rounding and so padding would change which is the nearest.

The choice becomes part of torch as in `nystrom.gpu.operators`; it has no gradient.
"""

import functools
from dataclasses import replace
from math import log2
from typing import NamedTuple

import torch
from torch import Tensor

from nystrom.gpu.arguments import ChoiceConstants, ChoiceSizes
from nystrom.gpu.arithmetic import INTERPRETED
from nystrom.gpu.inputs import triton_dtype
from nystrom.gpu.launch import Target, check_launch, power, shared_memory, splits, target_of
from nystrom.gpu.near_far import choice_kernels as kernels
from nystrom.gpu.operators import one_by_one
from nystrom.gpu.program import PROGRAMS, GivenTensor, Program, Slot, key_of
from nystrom.landmarks import reach
from nystrom.precision import accumulator
from nystrom.private_torch import is_transformed

# The widest keys.
LARGEST_WIDTH = 128
# Tokens whose order a program finds, and the most of which each is compared with all others.
_SORTED, _COMPARED_WHOLE = 512, 1024
# Keys that a program compares with others, and with how many at a time.
_RANKED, _COMPARED = 64, 128


def can_choose(width: int, dtype: torch.dtype) -> bool:
    """Whether the kernels take keys of this width; in float64, only Triton's interpreter does."""
    return width <= LARGEST_WIDTH and (dtype != torch.float64 or INTERPRETED.value)


class ChoiceOptions(NamedTuple):
    """Sizes by which heavy keys and clusters are chosen."""

    means: int  # Mean queries whose attention decides which keys are heavy; a power of two, at most 16
    g: int  # Heavy keys
    m: int  # Clusters
    iterations: int  # Steps of k-means
    scale: float  # Factor on the scores


@torch.no_grad()
def choose_by_kernels(
    q: Tensor, k: Tensor, keep: Tensor | None, query_keep: Tensor | None, options: ChoiceOptions
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Positions of the heavy keys (b, h, g), which of them exist, and the cluster of each key (b, h, s) as int32.

    Raises:
        ValueError: The kernels cannot take these inputs; the message says what to do.
    """
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    keep, query_keep = (x if x is None else x.contiguous() for x in (keep, query_keep))
    choice = _choose
    if torch.compiler.is_compiling():
        choice = _choice
    elif is_transformed():
        choice = _Choice.apply
    return choice(q, k, keep, query_keep, *options)


def _choose(
    q: Tensor, k: Tensor, keep: Tensor | None, query_keep: Tensor | None, means: int, g: int, m: int, iterations: int,
    scale: float
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Positions of the heavy keys, which of them exist, and the cluster of each key."""
    inputs = (q, k, keep, query_keep)
    heavy, exists, cluster = program_of(key_of(*inputs), target_of(q.device), means, g, m, iterations, scale)(*inputs)
    return heavy, exists, cluster


_choice = torch.library.custom_op("nystrom::near_far_choice", _choose, mutates_args=())


@_choice.register_fake
def _(q, k, keep, query_keep, means, g, m, iterations, scale):
    b, h, s = k.shape[:3]
    heavy = q.new_empty(b, h, g, dtype=torch.long)
    return heavy, torch.empty_like(heavy, dtype=torch.bool), q.new_empty(b, h, s, dtype=torch.int32)


class _Choice(torch.autograd.Function):
    """The choice in the form that torch.func needs."""

    @staticmethod
    def forward(*inputs):
        return _choose(*inputs)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.mark_non_differentiable(*output)

    @staticmethod
    def backward(ctx, *gradients):
        return (None,) * 9

    @staticmethod
    def jvp(ctx, *tangents):
        return (None,) * 3

    @staticmethod
    def vmap(info, in_dims, *inputs):
        return one_by_one(_Choice, info, in_dims, inputs)


@functools.lru_cache(maxsize=PROGRAMS)
def program_of(
    given: tuple[GivenTensor | None, ...], target: Target, means: int, g: int, m: int, iterations: int, scale: float
) -> Program:  # fmt: skip
    """The program for such queries, keys and their masks; its results are those of `choose_by_kernels`."""
    check_launch(1, {"q": given[0], "k": given[1], "v": given[1]})
    program = Program(given)
    q, k, keep, query_keep = program.inputs
    add_choice(program, q, k, keep, query_keep, ChoiceOptions(means, g, m, iterations, scale))
    return program


def add_choice(
    program: Program, q: Slot, k: Slot, keep: Slot | None, query_keep: Slot | None, options: ChoiceOptions
) -> tuple[Slot, Slot, Slot]:
    """Add the launches; returns their results, which are those of `choose_by_kernels`."""
    means, g, m, iterations, scale = options
    (b, h, n, d), s, acc = q.shape, k.shape[2], accumulator(k.dtype)
    heavy, exists = program.result((b, h, g), torch.long), program.result((b, h, g), torch.bool)
    cluster = program.result((b, h, s), torch.int32)
    # The sample of a step has MOST keys at most.
    sizes = ChoiceSizes(h, b * h, n, s, g, m, MOST=min(s, max(m, min(8 * m, -(-s // 4)))), MOVES=iterations - 1)
    constants = ChoiceConstants(d, power(d), triton_dtype(acc), reach(acc), means)
    places, counts = _room(program, keep)
    query_places, query_counts = _room(program, query_keep)
    if counts is not None or query_counts is not None:
        masks = (query_keep, keep, query_places, places, query_counts, counts)
        program.launch(kernels.near_far_ranks, 2 * b, *masks, sizes, num_warps=8)
    centre, table = program.scratch((b, h, d), acc), program.scratch((b, h, means + m, d), acc)
    program.launch(kernels.near_far_middle, b * h, k.tokens, places, counts, centre, sizes, constants)
    program.launch(
        kernels.near_far_segments,
        (means + m) * b * h,
        *(q.tokens, k.tokens, query_places, places, query_counts, counts, centre, table, sizes),
        replace(constants, BLOCK_N=64),
        num_warps=4,
    )
    with program.reused():
        _take_heavy(program, k, keep, centre, table, (heavy, exists, cluster), sizes, replace(constants, SCALE=scale))
    sampled = program.scratch((b, h, sizes.MOST), torch.int32)
    block_n, block_m, stages = _blocks(k, m, program.device)
    launching, nearest = {"num_warps": 8, "num_stages": stages}, replace(constants, BLOCK_N=block_n, BLOCK_M=block_m)
    moved = replace(nearest, BLOCK_N=min(block_n, 128 // k.dtype.itemsize))
    of_keys, clusters = (k.tokens, places, counts, centre, table, cluster), -(-m // block_m)
    for step in range(sizes.MOVES):
        tiles = -(-sizes.MOST // block_n) * b * h
        program.launch(kernels.near_far_nearest, tiles, *of_keys, sampled, step, sizes, nearest, **launching)
        sums = (k.tokens, counts, cluster, sampled, centre, table, sizes)
        program.launch(kernels.near_far_moved, clusters * b * h, *sums, moved, **launching)
    tiles = -(-s // block_n) * b * h
    program.launch(kernels.near_far_nearest, tiles, *of_keys, None, sizes.MOVES, sizes, nearest, **launching)
    return heavy, exists, cluster


def _blocks(k: Slot, m: int, device: torch.device) -> tuple[int, int, int]:
    """Tokens and centres of a tile whose parts fit into shared memory and registers, and loads in flight."""
    # From compute capability 9.0 on, products take their operands from shared memory and not from registers.
    large, narrow = shared_memory(device) >= 192 * 1024, power(k.shape[-1]) * accumulator(k.dtype).itemsize <= 256
    if k.dtype == torch.bfloat16:
        block_n, block_m, stages = (128, 64, 2) if large else (64, 32, 2)
    else:
        block_n, block_m, stages = 64 if large or narrow else 32, 64 if large and narrow else 32, 1
    return block_n, min(block_m, power(m)), stages


def _room(program: Program, keep: Slot | None) -> tuple[Slot | None, Slot | None]:
    """Room for the positions of the real tokens by rank, and for their number; None without a mask."""
    if keep is None:
        return None, None
    return program.scratch(keep.shape, torch.int32), program.scratch(keep.shape[:1], torch.int32)


def _take_heavy(
    program: Program, k: Slot, keep: Slot | None, centre: Slot, table: Slot, results: tuple[Slot, Slot, Slot],
    sizes: ChoiceSizes, constants: ChoiceConstants
) -> None:  # fmt: skip
    """Sort the keys by the attention that they receive; the first are heavy, the others may join clusters."""
    (b, h, s, _), acc, means, cluster = k.shape, accumulator(k.dtype), constants.MEANS.value, results[2]
    block = 32 if constants.BLOCK_D.value > 64 else 64
    spans, span = splits(s, b * h, means, block, program.device)
    scores = program.scratch((b, h, s, means), acc)
    tops, totals = (program.scratch((spans, b, h, means), acc) for _ in range(2))
    program.launch(
        kernels.near_far_scores,
        b * h * spans,
        *(k.tokens, keep, centre, table, scores, tops, totals, span, sizes),
        replace(constants, BLOCK_N=block, BLOCK_M=power(means)),
        num_warps=4,
        num_stages=2,
    )
    size, ranked = group_size(s, sizes.G), replace(constants, SCALE=1.0, BLOCK_N=_RANKED, BLOCK_M=_COMPARED)
    order, count, candidates, groups, largest = program.scratch((b, h, s), torch.long), -(-s // size), s, None, None
    if size > 1:
        candidates, ranked = sizes.G * size, replace(ranked, GROUP=size)
        largest, groups = program.scratch((b, h, count), torch.long), program.scratch((b, h, sizes.G), torch.int32)
    program.launch(
        kernels.near_far_order,
        -(-s // _SORTED) * b * h,
        *(scores, tops, totals, keep, order, largest, cluster, spans, sizes),
        replace(ranked, BLOCK_N=_SORTED, BLOCK_M=16),
        num_warps=4,
    )
    if groups is not None:
        tiles = -(-count // _RANKED) * b * h
        program.launch(kernels.near_far_groups, tiles, largest, groups, count, sizes, replace(ranked, GROUP=1))
    if sizes.G:
        tiles = -(-max(candidates, sizes.G) // _RANKED) * b * h
        program.launch(kernels.near_far_taken, tiles, order, groups, *results, candidates, sizes, ranked)


def group_size(s: int, g: int) -> int:
    """Keys of a group, of which the g with the largest keys hold the g largest keys of s; 1 to compare all keys.

    With groups of about sqrt(s / g), finding the groups and then the keys takes s g comparisons each.
    """
    if s <= _COMPARED_WHOLE or not g:
        return 1
    return min(_SORTED, 1 << max(0, round(log2(s / g) / 2)))
