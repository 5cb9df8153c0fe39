"""Dropout on a CPU, beside the binomial distribution and torch's own."""

import math

import pytest
import torch
import torch.nn.functional as F

from nystrom.models.parts.dropout import Dropout, dropout

# Five standard deviations: one draw in two million is beyond them, and the seeds are fixed.
FAR = 5


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 0.9])
def test_the_share_is_dropped_at_every_place_of_a_draw_and_of_neighbours_together(share):
    torch.manual_seed(0)
    zero = dropout(torch.ones(400_000), share) == 0
    for place in range(4):
        part = zero[place::4].double()
        assert abs(part.mean() - share) < FAR * math.sqrt(share * (1 - share) / len(part))
    for apart in (1, 2, 3, 4):
        both = (zero[apart:] & zero[:-apart]).double()
        wanted = share**2
        # Neighbouring pairs overlap: at most twice the variance of independent ones, and a little more.
        assert abs(both.mean() - wanted) < FAR * math.sqrt(3 * wanted * (1 - wanted) / len(both))


@pytest.mark.parametrize("share", [0.1, 0.3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_what_is_kept_is_scaled_by_the_share_that_is_dropped_and_so_is_its_gradient(share, dtype):
    torch.manual_seed(1)
    x = (torch.rand(7, 33, dtype=dtype) + 1).requires_grad_()
    out = dropout(x, share)
    kept = out != 0
    # The share that is dropped is the nearest multiple of 2^-16.
    scale = torch.tensor(1 / (1 - round(share * 2**16) / 2**16), dtype=dtype)
    assert out.dtype == dtype
    assert 0 < kept.sum() < kept.numel()
    torch.testing.assert_close(out, torch.where(kept, x * scale, 0), rtol=0, atol=0)
    (grad,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(grad, torch.where(kept, scale, 0), rtol=0, atol=0)
    # 2^-17 away from the rate of the caller, divided by the share that is kept; and the rounding of the dtype.
    torch.testing.assert_close(scale.double().item(), 1 / (1 - share), rtol=2**-16 + torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 1001])
def test_any_number_of_numbers(count):
    assert dropout(torch.ones(count), 0.5).shape == (count,)
    assert dropout(torch.ones(count, 3).mT, 0.5).shape == (3, count)


def test_a_seed_repeats_its_draws_and_goes_on_with_others():
    found = []
    for _ in range(2):
        torch.manual_seed(2)
        found.append([dropout(torch.ones(100), 0.5) for _ in range(2)])
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert not torch.equal(found[0][0], found[0][1])


@pytest.mark.parametrize("share", [0.0, 1e-7, 1.0, 1 - 1e-7])
def test_shares_that_16_bits_do_not_tell_from_none_or_all_are_those_of_torch(share):
    x = torch.ones(1000)
    torch.manual_seed(3)
    found = dropout(x, share)
    torch.manual_seed(3)
    assert torch.equal(found, F.dropout(x, share))


@pytest.mark.parametrize("share", [-0.1, 1.5, math.nan])
def test_what_is_no_probability_is_refused(share):
    layer = Dropout(0.5)
    layer.p = share
    with pytest.raises(ValueError, match=f"share is {share}; expected a probability from 0 to 1"):
        layer(torch.ones(3))


def test_copies_of_vmap_have_draws_of_their_own_or_the_same():
    torch.manual_seed(4)
    x = torch.ones(2, 200)
    one, other = torch.vmap(lambda x: dropout(x, 0.5), randomness="different")(x)
    assert not torch.equal(one, other)
    one, other = torch.vmap(lambda x: dropout(x, 0.5), randomness="same")(x)
    assert torch.equal(one, other)


def test_in_evaluation_nothing_is_dropped():
    x, layer = torch.ones(1000), Dropout(0.5)
    assert (layer(x) == 0).any()
    assert layer.eval()(x) is x
