"""Which tokens form which landmark, computed from masks and draws: n integers per sequence, shared by its heads.

Landmarks are the rows of one table per sequence and head.

- Softmax: m rows for the queries, then m for the keys; row j is the mean of segment j.
- Gaussian kernel: m rows, drawn from the tokens of the queries and then of the keys; queries and keys are compared with
  all of them.

If a sequence has at most m real keys, these are its landmarks; otherwise, if it has at most m real queries, those are:
see `few`.
"""

from typing import NamedTuple

import torch

from nystrom.gpu import landmark_segments
from nystrom.gpu.arguments import LandmarkSizes
from nystrom.gpu.launch import power
from nystrom.gpu.program import Program, Slot

# The same numbers as in `nystrom.gpu.landmark_segments`.
FEW_KEYS, FEW_QUERIES = 1, 2
# Tokens that a program counts at a time.
_BLOCK = 4096


class LandmarkPlan(NamedTuple):
    """The landmarks of a batch."""

    starts: Slot  # (b, rows) First token of each landmark
    stops: Slot  # (b, rows) One past its last token; equal to `starts` for a landmark without tokens
    # (b, rows) Whether the landmark is made of keys; None means that the second half of the rows is
    of_keys: Slot | None
    query_group: Slot  # (b, n) Row that a query is part of, or -1
    key_group: Slot  # (b, s) Row that a key is part of, or -1
    few: Slot  # (b,) FEW_KEYS or FEW_QUERIES if a sequence has at most m of them, else 0
    real: Slot  # (b,) Landmarks that queries are compared with: all, or as many as there are keys


def plan_of(program: Program, x: tuple[Slot | None, ...], sizes: LandmarkSizes, *, gaussian: bool) -> LandmarkPlan:
    """Add the plan of the landmarks to a program.

    `x` are real queries (b, n) and real keys (b, s) as bytes, and draws (m,) in [0, 1), where in its segment each drawn
    token is: m // 2 from segments of the queries and the others from segments of the keys. None means all; without
    draws, tokens are spread evenly, see `nystrom.landmarks.even_draws`. Draws are for `gaussian`; else landmarks are
    means.
    """
    b = sizes.BH // sizes.H
    shapes = (b, sizes.ROWS), (b, sizes.ROWS), (b, sizes.M), (b, sizes.N), (b, sizes.S), (b,), (b,)
    parts = [program.scratch(shape, torch.int32) for shape in shapes]
    plan = LandmarkPlan(*parts) if gaussian else LandmarkPlan(*parts)._replace(of_keys=None)
    chunks = -(-max(sizes.N, sizes.S) // _BLOCK)
    program.launch(
        landmark_segments.plan,
        2 * b * chunks,
        *(*x, *plan, sizes.N, sizes.S, sizes.M, chunks),
        **{"DRAWN": gaussian, "BLOCK": _BLOCK, "BLOCK_M": power(sizes.M), "num_warps": 8},
    )
    return plan
