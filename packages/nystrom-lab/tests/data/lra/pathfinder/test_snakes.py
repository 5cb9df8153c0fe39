import numpy as np
import pytest

from nystrom_lab.data.lra.pathfinder.dashes import GEOMETRIES, SEED_ANGLES, dashes, disc
from nystrom_lab.data.lra.pathfinder.snakes import PixelGrid, Planes, Snakes


def field(size, margin, count, *, lanes=1):
    """Empty planes, with the first dash of each snake in the middle, pointing right."""
    parts = dashes(GEOMETRIES[size], margin)
    grid = PixelGrid(size, parts.surroundings.shape[-1] // 2)
    planes = Planes(*(np.zeros((count * lanes, grid.width**2), dtype=np.uint8) for _ in range(2)))
    snakes = Snakes(grid, parts, planes, lanes=lanes, length=4)
    middle = np.full(count, grid.places(np.array([size // 2, size // 2])))
    snakes.begin(np.arange(count), 0, middle, np.zeros(count, dtype=np.int64))
    return grid, parts, snakes


def grow(snakes, seed=0, dash=1):
    pictures = np.arange(len(snakes.far) // snakes.lanes)
    return snakes.grow(np.random.default_rng(seed), pictures, 0, np.full(len(pictures), dash))


@pytest.mark.parametrize(("size", "margin"), [(32, 1), (128, 2)])
def test_ends_are_drawn_with_the_published_probability(size, margin):
    grid, parts, snakes = field(size, margin, 4_000)
    geometry = GEOMETRIES[size]
    pivot = np.array([size // 2, size // 2 + margin])
    ends = pivot + parts.circle
    turn = np.abs(np.arctan2(*parts.circle.T))
    chance = np.cos(np.minimum(geometry.continuity * turn, np.pi / 2)) ** 2
    # A mask of 1 and of a half at two ends that are likely.
    likely = np.argsort(-chance)[:2]
    levels = np.zeros(len(chance))
    levels[likely] = 255, 128
    snakes.planes.near[:, grid.places(ends[likely])] = 255, 128
    chance *= 1 - levels / 255
    chance /= chance.sum()
    assert grow(snakes).all()
    drawn = grid.pixels(snakes.far[:, 1])
    counts = (drawn[:, None] == ends).all(axis=-1).sum(axis=0)
    assert counts.sum() == 4_000
    # Five standard errors of a count.
    assert (np.abs(counts - 4_000 * chance) <= 5 * np.sqrt(4_000 * chance * (1 - chance)) + 1e-9).all()


def test_a_snake_stops_where_it_would_have_to_turn_further_than_allowed():
    grid, parts, snakes = field(128, 3, 50)
    turn = np.abs(np.arctan2(*parts.circle.T))
    ahead = grid.places(np.array([64, 67]) + parts.circle[1.8 * turn < np.pi / 2])
    snakes.planes.near[:, ahead] = 255
    assert not grow(snakes).any()


def test_a_dash_is_not_laid_over_another():
    grid, parts, snakes = field(64, 1, 400)
    block = grid.places(np.array([32, 41]))
    rows = np.arange(400)
    grid.lay(snakes.planes.blocked, rows, np.full(400, block), parts.footprint[np.full(400, 90)])
    before = snakes.planes.blocked.copy()
    grown = grow(snakes)
    assert 0 < grown.mean() < 1
    rows = rows[grown]
    under = grid.under(before, rows, snakes.far[rows, 1], parts.footprint.shape[-1]).astype(int)
    assert (under + parts.footprint[snakes.kinds[rows, 1]]).max() <= 1.5 * 255


def test_a_snake_keeps_off_its_dashes_but_for_the_last_and_off_the_other_snake_at_once():
    grid, _, snakes = field(64, 1, 1, lanes=2)
    middle = int(grid.places(np.array([32, 32])))
    for plane in snakes.planes:
        assert plane[0, middle] == 0
        assert plane[1, middle] == 255
    assert grow(snakes).all()
    for plane in snakes.planes:
        assert plane[0, middle] == 255
        assert plane[0, snakes.far[0, 1]] == 0
        assert plane[1, snakes.far[0, 1]] == 255


@pytest.mark.parametrize("size", GEOMETRIES)
def test_stamps_have_the_area_of_what_they_show(size):
    geometry = GEOMETRIES[size]
    for margin in geometry.margins:
        parts = dashes(geometry, margin)
        half = geometry.thickness / 2
        ink = geometry.length * geometry.thickness + np.pi * half**2
        # Drawn on a grid of half pixels, of which the thinnest dashes are one wide; negative lobes are cut off.
        assert parts.ink.sum(axis=(1, 2)) == pytest.approx(
            np.full(len(parts.ink), ink), rel=0.4 if size == 32 else 0.15
        )
        wide = half + margin
        footprint = 2 * wide * geometry.length + np.pi * wide**2
        assert parts.footprint.sum(axis=(1, 2)) / 255 == pytest.approx(np.full(len(parts.ink), footprint), rel=0.06)
        assert (parts.surroundings.sum(axis=(1, 2)) > parts.footprint.sum(axis=(1, 2))).all()
    assert disc(geometry).sum() == pytest.approx(np.pi * geometry.radius**2, rel=0.05)


def test_a_dash_lies_on_its_line():
    parts = dashes(GEOMETRIES[128], 2)
    reach = parts.ink.shape[-1] // 2
    for kind in (0, 37, 90, 200, SEED_ANGLES + 5):
        # The middle of the ink is half a dash before the far end.
        weights = parts.ink[kind] / parts.ink[kind].sum()
        middle = [(weights * steps).sum() for steps in np.indices(weights.shape) - reach]
        wanted = -2.5 * np.array([np.sin(parts.angles[kind]), np.cos(parts.angles[kind])])
        assert middle == pytest.approx(wanted, abs=0.05)
