"""Entropy, locality and effective rank of rows."""

import math

import torch
from torch.testing import assert_close

from nystrom.inspection.layer_sample import REACH, participation_rank, row_facts


def test_uniform_and_single_weights_are_the_two_ends():
    n = 8
    rows = torch.stack([torch.full((n, n), 1 / n), torch.eye(n)]).double()
    places = torch.arange(n)
    facts = row_facts(rows, places, places, n)
    assert_close(facts.entropy.mean(dim=1), torch.tensor([math.log(n), 0.0], dtype=torch.float64))
    # The mean of |i - j| over all pairs is (n^2 - 1) / 3n.
    assert_close(facts.distance.mean(dim=1), torch.tensor([(n * n - 1) / (3 * n), 0.0], dtype=torch.float64))
    assert_close(facts.rank, torch.tensor([1.0, n], dtype=torch.float64))


def test_near_are_the_keys_within_the_reach():
    rows = torch.full((1, 1, 200), 1 / 200)
    facts = row_facts(rows, torch.tensor([100]), torch.arange(200), 200)
    assert_close(facts.near, torch.tensor([[(2 * REACH + 1) / 200]]))
    # A hole: what lies behind it is as near as if it were not there.
    facts = row_facts(rows, torch.tensor([0]), torch.arange(200) - 160, 200)
    assert_close(facts.near, torch.tensor([[(2 * REACH + 1) / 200]]))


def test_all_rows_give_the_rank_of_the_singular_values():
    rows = torch.softmax(2 * torch.randn(3, 40, 40, generator=torch.Generator().manual_seed(0)).double(), dim=-1)
    squares = torch.linalg.svdvals(rows).square()
    wanted = squares.sum(dim=-1).square() / squares.square().sum(dim=-1)
    assert_close(participation_rank(rows, 40), wanted, rtol=1e-12, atol=0)


def test_some_rows_estimate_the_rank_without_bias_in_its_parts():
    generator = torch.Generator().manual_seed(0)
    rows = torch.softmax(2 * torch.randn(1, 64, 64, generator=generator).double(), dim=-1)
    wanted = participation_rank(rows, 64)
    drawn = [rows[:, torch.randperm(64, generator=generator)[:16]] for _ in range(400)]
    found = torch.stack([participation_rank(some, 64) for some in drawn])
    # A ratio of two unbiased estimates over 400 draws; taking the 16 rows for all would give less than 16 of some 30.
    assert_close(found.mean(dim=0), wanted, rtol=0.05, atol=0)
    assert wanted > 20
