"""Rotary positions are products of complex numbers, and scores know distances alone."""

import pytest
import torch
from torch.testing import assert_close

from nystrom.models.parts.rotary import rotate, rotation

# float64 rounding of a handful of products.
CLOSE = {"rtol": 1e-11, "atol": 1e-11}


def turn(x, positions, *, heads, share=1.0, across=False):
    by = rotation(
        positions, num_heads=heads, head_dim=x.shape[-1] // heads, share=share, across_heads=across, dtype=x.dtype
    )
    return rotate(x, by, num_heads=heads)


def draw(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize(("share", "turned"), [(1.0, 6), (0.5, 3), (1 / 3, 2), (0.01, 1)])
def test_pairs_turn_as_complex_numbers(across, share, turned):
    heads, pairs = 2, 6
    x, positions = draw(3, 5, heads * 2 * pairs), torch.tensor([[0, 1, 2, 3, 4], [7, 8, 9, 9, 9], [0, 0, 0, 0, 5000]])
    if across:
        turned *= 1 if share == 0.01 else heads
    counted = heads * pairs if across else pairs
    # Half of the pairs: every second one; a third: every third.
    step = counted // turned
    angles = torch.zeros(counted, dtype=torch.float64)
    angles[::step] = 10_000.0 ** (-torch.arange(turned, dtype=torch.float64) / turned)
    angles = angles.view(-1, pairs).expand(heads, pairs)
    z = torch.complex(*x.view(3, 5, heads, 2, pairs).unbind(3))
    wanted = z * torch.exp(1j * positions[:, :, None, None] * angles)
    came = turn(x, positions, heads=heads, share=share, across=across).view(3, 5, heads, 2, pairs)
    assert_close(torch.complex(*came.unbind(3)), wanted, **CLOSE)


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_a_score_depends_on_the_distance(across, share):
    q, k = draw(1, 1, 16).expand(1, 9, 16), draw(1, 1, 16, seed=1).expand(1, 9, 16)
    positions = torch.arange(9)[None]
    scores = []
    for start in (0, 40):
        q_, k_ = (turn(x, positions + start, heads=2, share=share, across=across).view(9, 2, 8) for x in (q, k))
        scores.append(torch.einsum("ihd,jhd->hij", q_, k_))
    assert_close(scores[1], scores[0], **CLOSE)
    for distance in range(-8, 9):
        diagonal = scores[0].diagonal(distance, 1, 2)
        assert_close(diagonal, diagonal[:, :1].expand_as(diagonal), **CLOSE)
    assert not torch.allclose(scores[0][:, 0, 0], scores[0][:, 0, 1])


def test_across_heads_the_first_head_turns_faster_than_the_last():
    by = rotation(torch.tensor([[1]]), num_heads=4, head_dim=8, share=0.5, across_heads=True, dtype=torch.float64)
    angles = torch.atan2(by.sin, by.cos)[0, 0]
    assert angles.shape == (4, 4)
    assert (angles[:, 1::2] == 0).all()
    assert angles[:, ::2].flatten().diff().max() < 0


def test_low_precision_is_the_rotation_rounded_once():
    x, positions = draw(2, 300, 16).bfloat16(), torch.arange(300)[None]
    by = rotation(positions, num_heads=2, head_dim=8, share=1.0, across_heads=False, dtype=torch.float32)
    came = rotate(x, by, num_heads=2)
    assert came.dtype == torch.bfloat16
    assert torch.equal(came, rotate(x.float(), by, num_heads=2).bfloat16())
    # Angles of float32 at position 300 are off by 300 * 6e-8 at most; bfloat16 rounds to 2^-9.
    exact = turn(x.double(), positions, heads=2)
    assert_close(came.double(), exact, rtol=2**-8, atol=1e-4)
