"""The kernels give exact attention to the sequences that the reference calls short."""

from dataclasses import fields

import pytest
import torch

pytest.importorskip("triton")

from nystrom.gpu.plan import FEW_KEYS, FEW_QUERIES, even_token_plan, segment_plan, token_plan
from nystrom.landmarks import even_draws, short_sequences

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def first(counts, n):
    """Masks whose sequences have given numbers of real tokens, the first ones."""
    return torch.arange(n, device=DEVICE) < torch.tensor(counts, device=DEVICE)[:, None]


def test_both_plans_find_the_sequences_of_few_keys_and_of_few_queries():
    m, n, s = 3, 9, 7
    keep, query_keep = first([0, 3, 4, 7, 4], s), first([9, 2, 3, 4, 0], n)
    few_keys, few_queries = short_sequences(keep, query_keep, m)
    assert few_keys.tolist() == [True, True, False, False, False]
    assert few_queries.tolist() == [False, False, True, False, True]
    as_bytes = [x.view(torch.uint8) for x in (keep, query_keep)]
    plans = segment_plan(*as_bytes, n, s, 5, m, keep), token_plan(keep, query_keep, m, even_draws(m, keep.device))
    for plan in plans:
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
    for field in fields(plan):
        torch.testing.assert_close(getattr(plan, field.name), getattr(wanted, field.name), rtol=0, atol=0)
    assert even_token_plan(b, n, s, m, torch.device(DEVICE)) is plan
