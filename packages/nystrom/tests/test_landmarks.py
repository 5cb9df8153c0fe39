import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nystrom.landmarks import (
    draw,
    even_draws,
    first_tokens,
    kmeans,
    middle_of,
    nearest_centres,
    segment_means,
    uniform,
    within_reach,
)

few = settings(deadline=None, max_examples=25)


def tokens(n, seed, b=2, h=3, d=4):
    return torch.randn(b, h, n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mask(n, seed, least):
    """Random masks of two sequences with at least `least` real tokens."""
    g = torch.Generator().manual_seed(seed)
    keep = torch.rand(2, n, generator=g) < 0.6
    for row in keep:
        row[torch.randperm(n, generator=g)[:least]] = True
    return keep


def segments(count, m):
    """Ranks of each segment, from the definition: rank r belongs to segment floor(r m / c)."""
    return [[r for r in range(count) if r * m // count == j] for j in range(m)]


@few
@given(n=st.integers(8, 60), m=st.integers(1, 8), seed=st.integers(0, 999))
def test_segments_are_near_equal_and_in_order(n, m, seed):
    sizes = [len(s) for s in segments(n, m)]
    assert max(sizes) - min(sizes) <= 1
    x = tokens(n, seed)
    expected = torch.stack([x[:, :, s].mean(2) for s in segments(n, m)], dim=2)
    torch.testing.assert_close(segment_means(x, m), expected, rtol=1e-12, atol=1e-13)


@few
@given(n=st.integers(8, 60), m=st.integers(1, 8), seed=st.integers(0, 999))
def test_segments_count_real_tokens_only(n, m, seed):
    x, keep = tokens(n, seed), mask(n, seed, least=m)
    out = segment_means(x.masked_fill(~keep[:, None, :, None], torch.nan), m, keep=keep)
    for i in range(2):
        real = x[i][:, keep[i]]
        expected = torch.stack([real[:, s].mean(1) for s in segments(real.shape[1], m)], dim=1)
        torch.testing.assert_close(out[i], expected, rtol=1e-12, atol=1e-13)


def test_a_divisible_length_takes_the_plain_mean_of_the_paper():
    x = tokens(24, 0)
    torch.testing.assert_close(segment_means(x, 6), x.reshape(2, 3, 6, 4, 4).mean(-2), rtol=0, atol=0)


@few
@given(n=st.integers(8, 60), m=st.integers(1, 8), seed=st.integers(0, 999))
def test_uniform_takes_one_token_of_each_segment(n, m, seed):
    x, keep = tokens(n, seed), mask(n, seed, least=m)
    out = uniform(x, m, keep=keep, draws=draw(m, torch.Generator().manual_seed(seed), x.device))
    for i in range(2):
        real = x[i][:, keep[i]]
        for j, ranks in enumerate(segments(real.shape[1], m)):
            assert (out[i, :, j, None] == real[:, ranks]).all(-1).any(-1).all()


def test_uniform_draws_every_token_of_a_segment_alike():
    n, m, rounds = 12, 4, 3000
    x = torch.arange(n, dtype=torch.float64)[None, None, :, None]
    g = torch.Generator().manual_seed(0)
    drawn = torch.cat([uniform(x, m, draws=draw(m, g, x.device)).flatten() for _ in range(rounds)])
    counts = np.bincount(drawn.long().numpy(), minlength=n)
    # 1000 expected for each; five standard deviations of a binomial are 130.
    assert abs(counts - rounds * m / n).max() < 130


def test_even_draws_are_distinct_and_spread():
    draws = even_draws(64, torch.device("cpu")).sort().values
    assert draws[0] >= 0
    assert draws[-1] < 1
    # Three-distance theorem: no gap of a golden-ratio sequence exceeds 2.7 / m.
    assert draws.diff().min() > 0.3 / 64
    assert draws.diff().max() < 2.7 / 64


@few
@given(n=st.integers(10, 40), seed=st.integers(0, 999))
def test_kmeans_is_lloyd_from_the_segment_means(n, seed):
    m, steps = 4, 3
    x, keep = tokens(n, seed), mask(n, seed, least=m)
    out = kmeans(x, m, keep=keep, steps=steps)
    for i in range(2):
        for j in range(3):
            points = x[i, j, keep[i]].numpy()
            centres = np.stack([points[s].mean(0) for s in segments(len(points), m)])
            for _ in range(steps):
                nearest = ((points[:, None] - centres) ** 2).sum(-1).argmin(-1)
                for c in set(nearest):
                    centres[c] = points[nearest == c].mean(0)
            np.testing.assert_allclose(out[i, j].numpy(), centres, rtol=1e-9, atol=1e-10)


def test_first_tokens_are_the_first_real_ones():
    keep = torch.tensor([[False, True, False, True, True], [False, False, True, False, False]])
    positions, real = first_tokens(keep, 2)
    assert positions[real].tolist() == [1, 3, 2]
    assert real.tolist() == [[True, True], [True, False]]


def test_low_precision_is_summed_in_float32():
    x = torch.full((1, 1, 4096, 1), 1.001).bfloat16()
    for keep in (None, torch.ones(1, 4096, dtype=torch.bool)):
        means = segment_means(x, 2, keep=keep)
        assert means.dtype == torch.float32
        torch.testing.assert_close(means, x[:, :, :2].float(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("choose", [segment_means, uniform, kmeans])
def test_gradients_are_right(choose):
    x = tokens(7, 1, b=1, h=1, d=2).requires_grad_()
    keep = torch.tensor([[True] * 6 + [False]])
    assert torch.autograd.gradcheck(lambda x: choose(x, 3, keep=keep), x)


def test_of_about_equally_near_centres_the_first_is_the_nearest():
    # All corners of a square are equally far from its middle; a shift of everything changes nothing.
    corners = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])
    middle = torch.zeros(1, 5, 2) + 1e-6 * torch.randn(1, 5, 2, generator=torch.Generator().manual_seed(0))
    for shift in (0.0, 1000.0):
        near = nearest_centres(middle + shift, corners[None] + shift)
        assert torch.equal(near, torch.zeros(1, 5, dtype=torch.long))
        assert torch.equal(nearest_centres(corners[None] * 0.9 + shift, corners[None] + shift), torch.arange(4)[None])


@pytest.mark.refuses
@pytest.mark.parametrize("choose", [segment_means, uniform, kmeans])
def test_what_is_no_token_no_count_and_no_mask_is_refused(choose):
    x = tokens(9, 0)
    for arguments, message in (
        (([1], 3), "x is a list; expected a tensor"),
        ((x[0], 3), r"x has shape \(3, 9, 4\); expected four axes"),
        ((x, 0), "m is 0; expected a whole number of at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            choose(*arguments)
    with pytest.raises(ValueError, match=r"keep has dtype torch\.float32; expected torch\.bool"):
        choose(x, 3, keep=torch.ones(2, 9))


@pytest.mark.parametrize("huge", [1e4, 1e30])
def test_the_middle_is_among_the_real_tokens_beside_a_huge_one(huge):
    x = 1000 + tokens(50, 3, h=1, d=2).float()
    keep = torch.ones(2, 50, dtype=torch.bool)
    keep[1, 3:] = False
    # The median of any 50 tokens, and of three.
    x[:, :, 1] = huge
    x = x.masked_fill(~keep[:, None, :, None], 0.0)
    assert (middle_of(x, keep) - 1000).abs().max() < 3
    assert (middle_of(x[:1]) - 1000).abs().max() < 3


def test_landmarks_have_finite_products_with_any_token():
    landmarks = tokens(6, 4, h=1, d=64).float()
    landmarks[:, :, 2] = 1e30
    held = within_reach(landmarks)
    ordinary = [0, 1, 3, 4, 5]
    assert torch.equal(held[:, :, ordinary], landmarks[:, :, ordinary])
    assert (landmarks @ landmarks.mT).isinf().any()
    assert (held @ landmarks.mT).isfinite().all()
    # Still far from all others.
    assert held[:, :, 2].min() > 1e5
