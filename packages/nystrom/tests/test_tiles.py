"""Tiles along a Hilbert curve, and on their grid."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from nystrom import heat_map, hilbert_order


def grid(side):
    y, x = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    return torch.stack([x, y], dim=-1).flatten(0, 1)


@pytest.mark.parametrize("side", [1, 2, 4, 8, 32])
def test_each_tile_of_a_square_is_beside_the_one_before(side):
    place = grid(side)
    order = hilbert_order(place)
    assert sorted(order.tolist()) == list(range(side**2))
    assert (place[order].diff(dim=0).abs().sum(dim=1) == 1).all()


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.integers(0, 2**31), st.integers(-(2**20), 2**20), st.sampled_from([1, 4, 256]))
def test_the_order_hangs_on_where_tiles_are_to_each_other_alone(n, seed, shift, scale):
    place = torch.randint(0, 30, (n, 2), generator=torch.Generator().manual_seed(seed))
    order = hilbert_order(place)
    assert sorted(order.tolist()) == list(range(n))
    assert_close(hilbert_order(place + shift), order)
    # A power of four: cells of the coarser grid are cells of the finer one, and the curve is turned as before.
    assert_close(hilbert_order(scale * place), order)


def test_a_batch_has_the_order_of_each_and_padding_last():
    torch.manual_seed(0)
    place = torch.randint(0, 50, (2, 20, 2))
    keep = torch.ones(2, 20, dtype=torch.bool)
    keep[1, 3:8] = False
    order = hilbert_order(place, keep=keep)
    assert_close(order[0], hilbert_order(place[0]))
    real = keep[1].nonzero()[:, 0]
    assert_close(order[1, :15], real[hilbert_order(place[1, real])])
    assert sorted(order[1, 15:].tolist()) == [3, 4, 5, 6, 7]


def test_no_tile_has_no_order():
    assert hilbert_order(torch.zeros(0, 2, dtype=torch.long)).shape == (0,)
    assert hilbert_order(torch.zeros(2, 0, 2, dtype=torch.long)).shape == (2, 0)
    assert heat_map(torch.zeros(0), torch.zeros(0, 2, dtype=torch.long)).shape == (0, 0)


@pytest.mark.parametrize("size", [1, 256])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint64, torch.uint32, torch.uint16])
def test_a_map_has_values_where_tiles_are(dtype, size):
    """The step is found; of two tiles at one place it has the sum."""
    place = size * (torch.tensor([[2, 1], [0, 0], [2, 1]]) + 5)
    nan = torch.nan
    for tile in (size, None):
        found = heat_map(torch.tensor([1.0, 2.0, 0.5]), place.to(dtype), tile=tile)
        assert_close(found, torch.tensor([[2.0, nan, nan], [nan, nan, 1.5]]), equal_nan=True)
    assert_close(hilbert_order(place.to(dtype)), hilbert_order(place))


def test_one_place_is_a_map_of_one_cell():
    assert_close(heat_map(torch.tensor([1.0, 2.0]), torch.full((2, 2), 512)), torch.tensor([[3.0]]))


def test_tiles_in_pixels_that_are_on_no_grid_want_their_size():
    """A magnification may be rounded: without the size the map would hold a cell for each pixel."""
    place = 256 * grid(40) + torch.randint(0, 3, (1600, 2), generator=torch.Generator().manual_seed(1))
    place[:2] = torch.tensor([[0, 0], [257, 0]])
    with pytest.raises(ValueError, match=r"coordinates of 1600 tiles span a grid of [\d,]+ x [\d,]+ cells.*pass tile="):
        heat_map(torch.ones(1600), place)
    assert_close(heat_map(torch.ones(1600), place, tile=256), torch.ones(40, 40))


@pytest.mark.refuses
def test_what_is_no_place_is_refused():
    for wrong in (torch.zeros(3, 2), torch.zeros(3, 3, dtype=torch.long), torch.zeros(2, dtype=torch.long)):
        with pytest.raises(ValueError, match=r"coordinates are .*expected whole numbers"):
            hilbert_order(wrong)
    with pytest.raises(ValueError, match=r"more than 2\^31 apart"):
        hilbert_order(torch.tensor([[0, 0], [2**40, 0]]))
    with pytest.raises(ValueError, match=r"values are \(2,\) and coordinates \(3, 2\)"):
        heat_map(torch.zeros(2), torch.zeros(3, 2, dtype=torch.long))
    with pytest.raises(ValueError, match="tile is 0; expected at least 1"):
        heat_map(torch.zeros(3), torch.zeros(3, 2, dtype=torch.long), tile=0)
