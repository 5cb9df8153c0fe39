"""The plan of the landmarks is that of `nystrom.landmarks`, and finds the sequences that the reference calls short."""

import pytest
import torch

pytest.importorskip("triton")

from nystrom.gpu.arguments import LandmarkSizes
from nystrom.gpu.landmark_plan import FEW_KEYS, FEW_QUERIES, LandmarkPlan, plan_of
from nystrom.gpu.program import Program, key_of
from nystrom.landmarks import even_draws, short_sequences, uniform_positions

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def first(counts, n):
    """Masks whose sequences have given numbers of real tokens, the first ones."""
    return torch.arange(n, device=DEVICE) < torch.tensor(counts, device=DEVICE)[:, None]


def plan(keep, query_keep, m, *, gaussian, draws=None):
    """The plan, copied out of the workspace of a program."""
    (b, n), s = query_keep.shape, keep.shape[1]
    program = Program(key_of(query_keep, keep, draws))
    sizes = LandmarkSizes(1, b, n, s, m, m if gaussian else 2 * m)
    slots = plan_of(program, tuple(program.inputs), sizes, gaussian=gaussian)
    names = [name for name, slot in slots._asdict().items() if slot is not None]
    for name in names:
        slot = getattr(slots, name)
        program.torch(lambda x, copy: copy.copy_(x), slot, program.result(slot.shape, slot.dtype))
    empty = dict.fromkeys(LandmarkPlan._fields)
    return LandmarkPlan(**{**empty, **dict(zip(names, program(query_keep, keep, draws), strict=True))})


@pytest.mark.parametrize("gaussian", [False, True])
def test_both_plans_find_the_sequences_of_few_keys_and_of_few_queries(gaussian):
    m, n, s = 3, 9, 7
    keep, query_keep = first([0, 3, 4, 7, 4], s), first([9, 2, 3, 4, 0], n)
    few_keys, few_queries = short_sequences(keep, query_keep, m)
    assert few_keys.tolist() == [True, True, False, False, False]
    assert few_queries.tolist() == [False, False, True, False, True]
    found = plan(keep, query_keep, m, gaussian=gaussian)
    assert (found.few == FEW_KEYS).tolist() == few_keys.tolist()
    assert (found.few == FEW_QUERIES).tolist() == few_queries.tolist()
    assert found.real.tolist() == [0, 3, 3, 3, 3]


@pytest.mark.parametrize("spread", ["evenly", "drawn"])
def test_drawn_tokens_are_those_of_the_reference(spread):
    """Beyond one part of the tokens too, with holes, and with one mask or none."""
    m, n, s = 7, 5000, 9001
    draws = torch.rand(m, generator=torch.Generator().manual_seed(0)).to(DEVICE) if spread == "drawn" else None
    given = even_draws(m, torch.device(DEVICE)) if draws is None else draws
    keep = torch.rand(2, s, generator=torch.Generator().manual_seed(1)).to(DEVICE) > 0.4
    for query_keep in (torch.ones(2, n, dtype=torch.bool, device=DEVICE), keep[:, :n].contiguous()):
        found = plan(keep, query_keep, m, gaussian=True, draws=draws)
        wanted = [uniform_positions(query_keep, m // 2, given[: m // 2])]
        wanted = torch.cat([*wanted, uniform_positions(keep, m - m // 2, given[m // 2 :])], dim=1)
        assert torch.equal(found.starts, wanted.int())
        assert torch.equal(found.stops, wanted.int() + 1)
        assert found.of_keys.tolist() == [[0] * 3 + [1] * 4] * 2
        groups = [torch.full((2, tokens), -1, device=DEVICE, dtype=torch.int32) for tokens in (n, s)]
        for row in range(m):
            groups[row >= 3].scatter_(1, wanted[:, row : row + 1], row)
        assert torch.equal(found.query_group, groups[0])
        assert torch.equal(found.key_group, groups[1])


def test_a_short_side_gives_all_of_its_tokens():
    m, keep, query_keep = 3, first([2, 6], 6), first([5, 2], 6)
    found = plan(keep, query_keep, m, gaussian=True)
    assert found.starts.tolist() == [[0, 1, 0], [0, 1, 0]]
    assert found.stops.tolist() == [[1, 2, 0], [1, 2, 0]]
    assert found.of_keys.tolist() == [[1, 1, 1], [0, 0, 0]]
    assert found.key_group.tolist() == [[0, 1, -1, -1, -1, -1], [-1] * 6]
    assert found.query_group.tolist() == [[-1] * 6, [0, 1, -1, -1, -1, -1]]
