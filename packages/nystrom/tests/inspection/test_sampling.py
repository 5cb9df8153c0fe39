"""Sums over all queries from some of them."""

import torch
from torch.testing import assert_close

from nystrom.inspection.sampling import Sample, draw_queries, estimate_ratio


def tailed(count, seed=0):
    """Squared errors of 3 heads with a long tail, and squared norms that go with them."""
    generator = torch.Generator().manual_seed(seed)
    bottom = torch.rand(3, count, generator=generator, dtype=torch.float64) + 0.5
    top = bottom * torch.randn(3, count, generator=generator, dtype=torch.float64).mul(0.7).exp()
    return top, bottom


def test_all_queries_give_the_ratio_itself_without_an_interval():
    (top, bottom), (other, below) = tailed(20), tailed(7, seed=1)
    found = estimate_ratio([Sample(20, top, bottom), Sample(7, other, below)])
    wanted = (top.sum(dim=1) + other.sum(dim=1)) / (bottom.sum(dim=1) + below.sum(dim=1))
    for value in found:
        assert_close(value, wanted, rtol=1e-14, atol=0)
    rooted = estimate_ratio([Sample(20, top, bottom), Sample(7, other, below)], root=True)
    assert_close(rooted.value, wanted.sqrt(), rtol=1e-14, atol=0)


def test_a_sequence_counts_by_its_size_and_not_by_its_sample():
    ones = torch.ones(1, 5)
    found = estimate_ratio([Sample(100, 3 * ones, ones), Sample(300, 7 * ones[:, :2], ones[:, :2])])
    assert_close(found.value, torch.tensor([6.0], dtype=torch.float64))


def test_the_interval_holds_the_ratio_of_all_about_95_times_of_100():
    generator = torch.Generator().manual_seed(2)
    held = near = count = 0
    for seed in range(200):
        texts = [tailed(512, seed=2 * seed), tailed(512, seed=2 * seed + 1)]
        wanted = estimate_ratio([Sample(512, *text) for text in texts], root=True).value
        drawn = [draw_queries(torch.arange(512), 128, generator) for _ in texts]
        samples = [Sample(512, top[:, at], bottom[:, at]) for (top, bottom), at in zip(texts, drawn, strict=True)]
        found = estimate_ratio(samples, root=True)
        held += int(((found.low <= wanted) & (wanted <= found.high)).sum())
        near += int(((found.value / wanted - 1).abs() < 0.2).sum())
        count += 3
    # 600 of them at .95 have a standard error of .009; a long tail takes a little.
    assert 0.92 <= held / count <= 0.98
    assert near / count > 0.99


def test_no_error_at_all_is_zero_with_certainty():
    zeros, ones = torch.zeros(2, 4), torch.ones(2, 4)
    found = estimate_ratio([Sample(9, zeros, ones), Sample(9, zeros, zeros)], root=True)
    assert all(torch.equal(value, torch.zeros(2, dtype=torch.float64)) for value in found)
    nothing = estimate_ratio([Sample(9, zeros, zeros)])
    assert torch.equal(nothing.high, torch.zeros(2, dtype=torch.float64))


def test_queries_are_drawn_from_the_real_ones_without_replacement():
    real, generator = torch.tensor([2, 3, 5, 8, 9, 11]), torch.Generator().manual_seed(0)
    draws = [draw_queries(real, 4, generator).tolist() for _ in range(40)]
    assert all(len(set(drawn)) == 4 and drawn == sorted(drawn) and set(drawn) <= set(real.tolist()) for drawn in draws)
    assert len(set(map(tuple, draws))) > 5
    assert {place for drawn in draws for place in drawn} == set(real.tolist())
    assert draw_queries(real, 6, generator) is real


def test_what_is_not_a_number_is_no_ratio_of_zero():
    top, bottom = tailed(20)
    bottom[1, 3] = torch.nan
    estimate = estimate_ratio([Sample(20, top, bottom)])
    assert estimate.value.isnan().tolist() == [False, True, False]
    assert estimate.low.isnan().tolist() == [False, True, False]


def test_draws_are_on_the_cpu_whatever_the_default_device_is():
    with torch.device("meta"):
        drawn = draw_queries(torch.arange(50, device="cpu"), 7, torch.Generator("cpu").manual_seed(0))
    assert len({*drawn.tolist()}) == 7
