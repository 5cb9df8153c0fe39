"""Pictures are judged by the dashes on them; their order and snakes are not used unless a test says so."""

from dataclasses import replace

import numpy as np
import pytest

from nystrom_lab.data.lra.pathfinder.curves import draw_pictures
from nystrom_lab.data.lra.pathfinder.dashes import GEOMETRIES

COUNTS = {32: 200, 64: 20, 128: 20, 256: 16}
# Long snakes rarely fit into 64 and 128 pixels, which takes time; shorter ones follow the same rules.
GEOMETRY = GEOMETRIES | {64: replace(GEOMETRIES[64], contour=9), 128: replace(GEOMETRIES[128], contour=9, margins=(3,))}


@pytest.fixture(scope="module", params=GEOMETRIES)
def drawn(request):
    size = request.param
    return GEOMETRY[size], draw_pictures(np.random.default_rng(3), COUNTS[size], GEOMETRY[size])


def lines(scenes, geometry):
    """The two ends of each dash, as rows and columns."""
    directions = np.stack([np.sin(scenes.angles), np.cos(scenes.angles)], axis=-1)
    return scenes.far - geometry.length * directions, scenes.far.astype(float), directions


def snake_of(slots, geometry):
    long = np.repeat([0, 1], geometry.contour)
    short = 2 + np.arange(slots - long.size) // geometry.distractor_length
    return np.concatenate([long, short])


def follow(near, far, directions, disc, geometry):
    """Walk from the dash that starts at a disc to the next one, while there is one, and return the last end."""
    (margin,) = geometry.margins
    current = np.abs(near - disc).max(axis=1).argmin()
    unused = set(range(len(near))) - {int(current)}
    while unused:
        rest = np.array(sorted(unused))
        # The next dash starts a margin after the pivot, which is a margin after this one.
        starts = near[rest] - margin * directions[rest]
        off = np.hypot(*(far[current] + margin * directions[current] - starts).T)
        off[geometry.continuity * np.arccos((directions[rest] @ directions[current]).clip(-1, 1)) >= np.pi / 2] = np.inf
        # Pivots and ends are rounded to whole pixels, each by at most half a diagonal.
        if off.min() > np.sqrt(2):
            break
        current = rest[off.argmin()]
        unused.discard(int(current))
    return far[current]


def test_following_the_dashes_from_a_disc_gives_the_label(drawn):
    geometry, scenes = drawn
    right = []
    shuffle = np.random.default_rng(0).permutation(scenes.far.shape[1])
    for picture in range(len(scenes.labels)):
        there = shuffle[~np.isnan(scenes.angles[picture, shuffle])]
        near, far, directions = (part[picture, there] for part in lines(scenes, geometry))
        end = follow(near, far, directions, scenes.discs[picture, 0], geometry)
        right.append((end == scenes.discs[picture, 1]).all() == scenes.labels[picture])
    # In a crowded picture another snake's dash may, by rounding, be closer to the path than the next one.
    assert np.mean(right) >= (0.9 if geometry.size == 32 else 1)


def test_the_order_of_the_slots_agrees_with_the_label(drawn):
    geometry, scenes = drawn
    near, far, _ = lines(scenes, geometry)
    rows, contour = np.arange(len(scenes.labels)), geometry.contour
    starts, ends = near[:, [0, contour]], far[:, [contour - 1, 2 * contour - 1]]
    # A start is a whole pixel, and so is the far end of its dash: each coordinate is off by half a pixel at most.
    begins = np.abs(starts - scenes.discs[:, :1]).max(axis=2)
    snake = begins.argmin(axis=1)
    assert begins[rows, snake].max() <= 0.5
    assert (ends[rows, np.where(scenes.labels, snake, 1 - snake)] == scenes.discs[:, 1]).all()
    # The discs may mark either snake, and the label does not say which.
    assert {(0, 0), (0, 1), (1, 0), (1, 1)} == set(zip(snake.tolist(), scenes.labels.tolist(), strict=True))


def test_of_each_two_pictures_one_has_the_label_1(drawn):
    _, scenes = drawn
    assert (scenes.labels.reshape(-1, 2).sum(axis=1) == 1).all()
    assert 0 < scenes.labels[::2].mean() < 1


def test_snakes_keep_off_each_other(drawn):
    geometry, scenes = drawn
    near, far, _ = lines(scenes, geometry)
    share = np.linspace(0, 1, 4 * geometry.length + 1)[:, None]
    snakes = snake_of(far.shape[1], geometry)
    one, other = np.triu_indices(len(snakes), 1)
    strangers = snakes[one] != snakes[other]
    one, other = one[strangers], other[strangers]
    for picture in range(len(far)):
        along = near[picture, :, None] + (far[picture] - near[picture])[:, None] * share
        gaps = np.linalg.norm(along[one][:, :, None] - along[other][:, None], axis=-1).min(axis=(1, 2))
        # Margins may overlap by half of a full footprint: well over half of twice the margin remains between the inks.
        assert np.nanmin(gaps) - geometry.thickness > 0.85 * min(geometry.margins)


def test_dashes_of_a_snake_are_two_margins_apart_and_turn_no_more_than_continuity_allows(drawn):
    geometry, scenes = drawn
    (margin,) = geometry.margins
    near, far, directions = lines(scenes, geometry)
    snakes = snake_of(far.shape[1], geometry)
    follows = np.flatnonzero(snakes[1:] == snakes[:-1])
    gap = np.linalg.norm(near[:, follows + 1] - far[:, follows], axis=-1)
    bend = np.arccos((directions[:, follows + 1] * directions[:, follows]).sum(axis=-1).clip(-1, 1))
    bend = bend[~np.isnan(bend)]
    assert (geometry.continuity * bend).max() < np.pi / 2 + 1e-6
    # Straight on, the gap is two margins, up to the rounding of the pivot and of the end, half a diagonal each.
    assert np.nanmax(gap) <= 2 * margin + np.sqrt(2)
    assert np.nanmedian(gap) == pytest.approx(2 * margin, abs=0.5)


def test_dashes_keep_away_from_the_edges_and_the_first_one_is_in_the_middle(drawn):
    geometry, scenes = drawn
    there = ~np.isnan(scenes.angles)
    inside = geometry.padding + min(geometry.margins)
    # The first dash of a short snake may end anywhere that its footprint fits.
    grown = there & (np.diff(snake_of(there.shape[1], geometry), prepend=-1) == 0)
    assert scenes.far[grown].min() == inside
    assert scenes.far[grown].max() == geometry.size - 1 - inside
    assert scenes.far[there].min() >= geometry.padding
    middle = scenes.far[:, 0]
    low = 2 * geometry.seed_distance
    assert middle.min() >= low
    assert middle.max() < geometry.size - low


def test_short_snakes_are_whole_or_missing(drawn):
    geometry, scenes = drawn
    short = scenes.angles[:, 2 * geometry.contour :].reshape(len(scenes.labels), geometry.distractors, -1)
    assert short.shape[2] == geometry.contour // 3
    missing = np.isnan(short)
    assert (missing.all(axis=2) == missing.any(axis=2)).all()
    assert (~missing[:, :, 0]).sum(axis=1).mean() > 0.6 * geometry.distractors
    assert not np.isnan(scenes.angles[:, : 2 * geometry.contour]).any()


def test_ink_is_where_the_dashes_and_discs_are(drawn):
    geometry, scenes = drawn
    assert scenes.pictures.shape == (len(scenes.labels), geometry.size, geometry.size)
    assert scenes.pictures.dtype == np.uint8
    assert (scenes.pictures.max(axis=(1, 2)) == 255).all()
    near, far, _ = lines(scenes, geometry)
    pixels = np.stack(np.indices(scenes.pictures.shape[1:]), axis=-1)
    for picture in range(12 if geometry.size < 128 else 2):
        there = ~np.isnan(scenes.angles[picture])
        start, line = near[picture, there], (far - near)[picture, there]
        along = (((pixels[:, :, None] - start) * line).sum(axis=-1) / geometry.length**2).clip(0, 1)
        away = np.linalg.norm(pixels[:, :, None] - start - along[..., None] * line, axis=-1).min(axis=-1)
        discs = np.linalg.norm(pixels[:, :, None] - scenes.discs[picture], axis=-1).min(axis=-1)
        ink = scenes.pictures[picture].astype(int)
        # A pixel and a half outside the outline only the filter's outer lobes remain, about a hundredth.
        assert ink[(away > geometry.thickness / 2 + 1.5) & (discs > geometry.radius + 1.5)].max(initial=0) <= 16
        assert ink[discs <= geometry.radius - 1].min() > 150
        assert ink[away <= 0.3].min() > 50


def test_the_brightness_of_the_two_kinds_of_snakes_is_as_published():
    geometry = replace(GEOMETRIES[32], antialias=8)
    scenes = draw_pictures(np.random.default_rng(0), 60, geometry)
    sums = []
    for slots in (slice(0, 28), slice(28, None)):
        there = ~np.isnan(scenes.angles[:, slots])
        index = np.nonzero(there)[0], *scenes.far[:, slots][there].T
        sums.append(np.median(scenes.pictures[index]))
    # The long ones have 0.75 of the contrast of the short ones; a median of hundreds of dashes is good to a twentieth.
    assert sums[0] / sums[1] == pytest.approx(0.75, abs=0.08)


@pytest.mark.long
def test_the_margin_of_a_picture_is_one_of_those_given():
    geometry = replace(GEOMETRIES[128], contour=6)
    scenes = draw_pictures(np.random.default_rng(5), 24, geometry)
    near, far, _ = lines(scenes, geometry)
    gaps = np.median(np.linalg.norm(near[:, 1:6] - far[:, :5], axis=-1), axis=1)
    margins = np.rint(gaps / 2)
    assert set(margins) == {2, 3}
    # Pictures of one margin are drawn together, and then return to their places among the others.
    assert margins.tolist() != sorted(margins)
    assert (scenes.labels.reshape(-1, 2).sum(axis=1) == 1).all()
    assert len(np.unique(scenes.pictures.reshape(24, -1), axis=0)) == 24
