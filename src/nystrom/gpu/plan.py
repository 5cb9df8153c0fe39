"""Which tokens form which landmark, computed from the masks: n integers per sequence, shared by its heads.

Landmarks are the rows of one table per sequence and head.

- Softmax: m rows for the queries, then m for the keys; row j is the mean of segment j.
- Gaussian kernel: m rows, drawn from the tokens of the queries and then of the keys; queries and keys are compared with
  all of them.

If a sequence has at most m real keys, these are its landmarks; otherwise, if it has at most m real queries, those are:
see `few`.
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nystrom.gpu import segments
from nystrom.gpu.launch import power
from nystrom.gpu.program import Program, Slot
from nystrom.landmarks import even_draws, ranks, short_sequences, uniform_positions

# As in `nystrom.gpu.segments`.
FEW_KEYS, FEW_QUERIES = 1, 2
# Tokens that a program counts at a time.
_BLOCK = 4096


class LandmarkPlan(NamedTuple):
    """The landmarks of a batch: tensors, or their slots in a program.

    Attributes:
        starts: (b, rows) First token of each landmark.
        stops: (b, rows) One past its last token; equal to `starts` for a landmark without tokens.
        of_keys: (b, rows) Whether the landmark is made of keys; None means that the second half of the rows is.
        query_group: (b, n) Row that a query is part of, or -1.
        key_group: (b, s) Row that a key is part of, or -1.
        few: (b,) FEW_KEYS or FEW_QUERIES if a sequence has at most m of them, else 0.
        real: (b,) Landmarks that queries are compared with: all, or as many as there are keys.
    """

    starts: Any
    stops: Any
    of_keys: Any
    query_group: Any
    key_group: Any
    few: Any
    real: Any


def segment_plan(
    program: Program, keep: Slot | None, query_keep: Slot | None, n: int, s: int, b: int, m: int
) -> LandmarkPlan:
    """Landmarks as means of m segments of the real queries and of the real keys.

    Args:
        program: What to add to.
        keep: Real keys (b, s) as bytes; None means all.
        query_keep: Real queries (b, n) as bytes; None means all.
        n: Queries.
        s: Keys.
        b: Sequences.
        m: Landmarks on each side.
    """
    shapes = (b, 2 * m), (b, 2 * m), (b, n), (b, s), (b,), (b,)
    starts, stops, query_group, key_group, few, real = (program.scratch(shape, torch.int32) for shape in shapes)
    program.launch(
        segments.segment_plan,
        2 * b,
        query_keep,
        keep,
        starts,
        stops,
        query_group,
        key_group,
        few,
        real,
        n,
        s,
        m,
        BLOCK=_BLOCK,
        BLOCK_M=power(m),
        num_warps=8,
    )
    return LandmarkPlan(starts, stops, None, query_group, key_group, few, real)


def token_plan(keep: Tensor, query_keep: Tensor, m: int, draws: Tensor) -> LandmarkPlan:
    """Landmarks as tokens: m // 2 from the queries and the others from the keys, one drawn from each segment."""
    half = m // 2
    few, real = _few(keep, query_keep, m)
    places = torch.cat(
        [uniform_positions(query_keep, half, draws[:half]), uniform_positions(keep, m - half, draws[half:])], dim=1
    )
    row = torch.arange(m, device=keep.device)
    of_keys, there = (row >= half).expand_as(places), torch.ones_like(places, dtype=torch.bool)
    for kind, mask in ((FEW_KEYS, keep), (FEW_QUERIES, query_keep)):
        here = (few == kind)[:, None]
        rank, count = ranks(mask)
        first = _position_of_rank(rank, row.expand_as(places).contiguous())
        places = torch.where(here, first, places)
        of_keys = torch.where(here, kind == FEW_KEYS, of_keys)
        there = torch.where(here, row < count[:, None], there)
    groups = []
    for mask, side in ((query_keep, ~of_keys), (keep, of_keys)):
        # An extra place, dropped afterwards, takes the rows of the other side.
        group = torch.full((mask.shape[0], mask.shape[1] + 1), -1, dtype=torch.int64, device=keep.device)
        groups.append(group.scatter(1, torch.where(side & there, places, mask.shape[1]), row.expand_as(places)))
    stops = places + there.to(places.dtype)
    return _plan(places, stops, of_keys, groups[0][:, :-1], groups[1][:, :-1], few, real)


def even_token_plan(b: int, n: int, s: int, m: int, device: torch.device) -> LandmarkPlan:
    """`token_plan` of evenly spread tokens where all are real; computed once for these sizes, and kept."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        # What a graph computes has no values before the graph is replayed.
        return _even_token_plan.__wrapped__(b, n, s, m, device)
    return _even_token_plan(b, n, s, m, device)


@functools.lru_cache(maxsize=8)
def _even_token_plan(b: int, n: int, s: int, m: int, device: torch.device) -> LandmarkPlan:
    keys, queries = (torch.ones(b, tokens, dtype=torch.bool, device=device) for tokens in (s, n))
    plan = token_plan(keys, queries, m, even_draws(m, device))
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        # Another stream may use it next.
        torch.cuda.current_stream(device).synchronize()
    return plan


def _position_of_rank(rank: Tensor, wanted: Tensor) -> Tensor:
    """Position of the real token of each rank: ranks never decrease, and the search finds the leftmost."""
    return torch.searchsorted(rank, wanted.contiguous()).clamp(max=rank.shape[1] - 1)


def _few(keep: Tensor, query_keep: Tensor, m: int) -> tuple[Tensor, Tensor]:
    few_keys, few_queries = short_sequences(keep, query_keep, m)
    few = FEW_KEYS * few_keys if few_queries is None else FEW_KEYS * few_keys + FEW_QUERIES * few_queries
    return few, keep.sum(-1).clamp(max=m)


def _plan(*parts: Tensor) -> LandmarkPlan:
    return LandmarkPlan(*(part.to(torch.int32).contiguous() for part in parts))
