"""The kernels give exact attention to the sequences that the reference calls short."""

import pytest
import torch

pytest.importorskip("triton")

from nystrom.gpu.plan import FEW_KEYS, FEW_QUERIES, LandmarkPlan, even_token_plan, segment_plan, token_plan
from nystrom.gpu.program import Program, key_of
from nystrom.landmarks import even_draws, short_sequences

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def first(counts, n):
    """Masks whose sequences have given numbers of real tokens, the first ones."""
    return torch.arange(n, device=DEVICE) < torch.tensor(counts, device=DEVICE)[:, None]


def by_segments(keep, query_keep, m):
    """The plan of segment means, copied out of the workspace of a program."""
    program = Program(key_of(keep, query_keep))
    plan = segment_plan(program, *program.inputs, query_keep.shape[1], keep.shape[1], keep.shape[0], m)
    names = [name for name, slot in plan._asdict().items() if slot is not None]
    for name in names:
        slot = getattr(plan, name)
        program.torch(lambda x, copy: copy.copy_(x), slot, program.result(slot.shape, slot.dtype))
    empty = dict.fromkeys(LandmarkPlan._fields)
    return LandmarkPlan(**{**empty, **dict(zip(names, program(keep, query_keep), strict=True))})


def test_both_plans_find_the_sequences_of_few_keys_and_of_few_queries():
    m, n, s = 3, 9, 7
    keep, query_keep = first([0, 3, 4, 7, 4], s), first([9, 2, 3, 4, 0], n)
    few_keys, few_queries = short_sequences(keep, query_keep, m)
    assert few_keys.tolist() == [True, True, False, False, False]
    assert few_queries.tolist() == [False, False, True, False, True]
    for plan in by_segments(keep, query_keep, m), token_plan(keep, query_keep, m, even_draws(m, keep.device)):
        assert (plan.few == FEW_KEYS).tolist() == few_keys.tolist()
        assert (plan.few == FEW_QUERIES).tolist() == few_queries.tolist()
        assert plan.real.tolist() == [0, 3, 3, 3, 3]


def test_a_mask_of_both_queries_and_keys_is_counted_once():
    keep = first([0, 3, 4], 6)
    assert short_sequences(keep, keep, 3)[1] is None
    assert token_plan(keep, keep, 3, even_draws(3, keep.device)).few.tolist() == [FEW_KEYS, FEW_KEYS, 0]


def test_the_plan_of_evenly_spread_tokens_is_that_of_their_draws_and_is_kept():
    b, n, s, m = 2, 23, 31, 6
    every = [torch.ones(b, tokens, dtype=torch.bool, device=DEVICE) for tokens in (s, n)]
    wanted = token_plan(*every, m, even_draws(m, torch.device(DEVICE)))
    plan = even_token_plan(b, n, s, m, torch.device(DEVICE))
    for mine, theirs in zip(plan, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    assert even_token_plan(b, n, s, m, torch.device(DEVICE)) is plan
