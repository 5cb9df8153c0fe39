"""Pathfinder: draw pictures of dashed snakes with two discs, which lie on one snake or on two.

Two long snakes start near the middle of a picture and grow in turn, see `snakes`; where one cannot go on, the picture
is discarded. Then short snakes are placed where there is room, with five attempts each. One disc marks the start of a
long snake, the other the end of the same one (label 1) or of the other (label 0). The brightest pixel becomes 255.

Source: Linsley et al. (2018), arXiv:1805.08315; Kim et al. (2020), arXiv:1906.01558.
Departs from the authors' code: one of every two consecutive pictures has the label 1, so classes are balanced; both
ends of the first dash keep their distance from the edges; a short snake tries 64 random places.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nystrom_lab.data.lra.pathfinder.dashes import SEED_ANGLES, Geometry, dashes, disc
from nystrom_lab.data.lra.pathfinder.snakes import EDGE, Ints, Levels, PixelGrid, Planes, Snakes

# Attempts at a short snake, and places that each attempt tries.
SHORT_TRIES, PLACE_TRIES = 5, 64
# Bytes of the planes of the pictures that are started together.
PLANES_BYTES = 2**24


class Scenes(NamedTuple):
    """Pictures and what is on them.

    Attributes:
        pictures: Gray pixels, 0 to 255: picture, row, column.
        labels: Whether the discs of a picture are on one snake.
        far: Row and column of the far end of each dash: the first long snake, the second, then the short ones.
        angles: Direction of each dash in radians, the rows pointing up for a positive sine; NaN for no dash.
        discs: Row and column of the two discs.
    """

    pictures: NDArray[np.uint8]
    labels: NDArray[np.uint8]
    far: Ints
    angles: NDArray[np.float64]
    discs: Ints


def draw_pictures(rng: np.random.Generator, count: int, geometry: Geometry) -> Scenes:
    """Draw an even number of pictures, half of each label."""
    assert count % 2 == 0, "the labels come in pairs"
    margins = rng.integers(len(geometry.margins), size=count)
    one = rng.integers(2, size=count // 2, dtype=np.uint8)
    labels = np.stack([one, 1 - one], axis=1).reshape(-1)
    parts, order = [], []
    for i, margin in enumerate(geometry.margins):
        if (mine := np.flatnonzero(margins == i)).size:
            parts.append(_Painter(geometry, margin).scenes(rng, labels[mine]))
            order.append(mine)
    back = np.argsort(np.concatenate(order))
    return Scenes(*(np.concatenate(arrays)[back] for arrays in zip(*parts, strict=True)))


class _Pairs(NamedTuple):
    """Pictures with two long snakes: far ends and kinds as in `Snakes`, both in a row; planes as in `Planes`."""

    starts: Ints
    far: Ints
    kinds: Ints
    blocked: Levels
    near: Levels


class _Painter:
    """Draws pictures with one margin."""

    def __init__(self, geometry: Geometry, margin: int):
        self.geometry, self.margin, self.dashes = geometry, margin, dashes(geometry, margin)
        stamps = self.dashes.surroundings, disc(geometry)
        self.grid = PixelGrid(geometry.size, max(stamp.shape[-1] // 2 for stamp in stamps))
        self.at_once = PLANES_BYTES // (4 * self.grid.width**2) + 1
        angles = self.dashes.angles[:SEED_ANGLES]
        directions = np.stack([np.sin(angles), np.cos(angles)], axis=1)
        self.dash = np.rint(geometry.length * directions).astype(np.int64)
        self.apart = np.rint(geometry.seed_distance * directions).astype(np.int64)

    def scenes(self, rng: np.random.Generator, labels: NDArray[np.uint8]) -> Scenes:
        """Draw a picture for each label."""
        pairs = self._long_snakes(rng, len(labels))
        far, kinds = self._short_snakes(rng, Planes(pairs.blocked, pairs.near))
        return self._paint(rng, labels, pairs.starts, np.hstack([pairs.far, far]), np.hstack([pairs.kinds, kinds]))

    def _long_snakes(self, rng: np.random.Generator, count: int) -> _Pairs:
        """Grow pairs of snakes until `count` of them have reached their length.

        Each pair takes the same number of rounds, so the order in which they finish does not depend on their shape.
        """
        contour, edges = self.geometry.contour, self._edges()
        slots = np.arange(self.at_once)
        planes = Planes(*(np.empty((2 * len(slots), self.grid.width**2), dtype=np.uint8) for _ in edges))
        snakes = Snakes(self.grid, self.dashes, planes, lanes=2, length=contour)
        starts, age = np.zeros((len(slots), 2, 2), dtype=np.int64), np.zeros(len(slots), dtype=np.int64)
        pairs: list[_Pairs] = []
        while sum(len(part.starts) for part in pairs) < count:
            fresh = slots[age == 0]
            for plane, edge in zip(planes, edges, strict=True):
                plane.reshape(len(slots), 2, -1)[fresh] = edge
            self._begin(rng, snakes, fresh, starts, age)
            for lane in (0, 1):
                rows = slots[age > 0]
                age[rows[~snakes.grow(rng, rows, lane, age[rows])]] = 0
            age[age > 0] += 1
            ready = slots[age == contour]
            far, kinds = (array.reshape(len(slots), 2 * contour)[ready] for array in (snakes.far, snakes.kinds))
            kept = (np.maximum(plane[2 * ready], plane[2 * ready + 1]) for plane in planes)
            pairs.append(_Pairs(starts[ready], far, kinds, *kept))
            age[ready] = 0
        return _Pairs(*(np.concatenate(arrays)[:count] for arrays in zip(*pairs, strict=True)))

    def _begin(self, rng: np.random.Generator, snakes: Snakes, slots: Ints, starts: Ints, age: Ints) -> None:
        """Place the first dashes of some pairs of snakes; those that fit get age 1."""
        geometry = self.geometry
        low, high = 2 * geometry.seed_distance, geometry.size - 2 * geometry.seed_distance
        tails = rng.integers(low, high, size=(len(slots), 1, 2))
        tails = np.hstack([tails, tails + self.apart[rng.integers(SEED_ANGLES, size=(len(slots), 1))]])
        kinds = rng.integers(SEED_ANGLES, size=(len(slots), 2))
        pixels = tails + self.dash[kinds]
        far, starts[slots] = self.grid.places(pixels), tails
        inside = np.flatnonzero(((pixels[:, 0] >= low) & (pixels[:, 0] < high)).all(axis=1))
        snakes.begin(slots[inside], 0, far[inside, 0], kinds[inside, 0])
        inside = inside[snakes.free(2 * slots[inside] + 1, far[inside, 1], kinds[inside, 1])]
        snakes.begin(slots[inside], 1, far[inside, 1], kinds[inside, 1])
        age[slots[inside]] = 1

    def _short_snakes(self, rng: np.random.Generator, planes: Planes) -> tuple[Ints, Ints]:
        """Place short snakes where there is room, and return far ends and kinds of their dashes; kind -1 is no dash."""
        length, count = self.geometry.distractor_length, self.geometry.distractors
        far = np.zeros((len(planes.blocked), count, length), dtype=np.int64)
        kinds = np.full_like(far, -1)
        for number in range(count):
            pending = np.arange(len(far))
            for _ in range(SHORT_TRIES):
                # A copy, which is dropped if the snake cannot reach its length.
                trial = Planes(*(plane[pending] for plane in planes))
                snakes = Snakes(self.grid, self.dashes, trial, lanes=1, length=length)
                grown = self._find_room(rng, snakes)
                for dash in range(1, length):
                    grown = grown[snakes.grow(rng, grown, 0, np.full_like(grown, dash))]
                snakes.lay(grown, snakes.far[grown, -1], snakes.kinds[grown, -1])
                there = pending[grown]
                far[there, number], kinds[there, number] = snakes.far[grown], snakes.kinds[grown]
                for plane, tried in zip(planes, trial, strict=True):
                    plane[there] = tried[grown]
                pending = np.delete(pending, grown)
        return far.reshape(len(far), -1), kinds.reshape(len(far), -1)

    def _find_room(self, rng: np.random.Generator, snakes: Snakes) -> Ints:
        """Place the first dash of each snake, and return the pictures where there was room."""
        placed = np.zeros(len(snakes.far), dtype=bool)
        for _ in range(PLACE_TRIES):
            pending = np.flatnonzero(~placed)
            far = self.grid.places(rng.integers(self.geometry.size, size=(len(pending), 2)))
            kinds = rng.integers(SEED_ANGLES, size=len(pending))
            free = snakes.free(pending, far, kinds)
            snakes.begin(pending[free], 0, far[free], kinds[free])
            placed[pending[free]] = True
        return np.flatnonzero(placed)

    def _edges(self) -> Planes:
        padding = self.geometry.padding
        return Planes(self.grid.edges(padding, EDGE), self.grid.edges(padding + self.margin, 255))

    def _paint(
        self, rng: np.random.Generator, labels: NDArray[np.uint8], tails: Ints, far: Ints, kinds: Ints
    ) -> Scenes:
        """Draw dashes and discs."""
        geometry, grid = self.geometry, self.grid
        canvas = np.zeros((len(labels), grid.width**2), dtype=np.float32)
        for slot in range(far.shape[1]):
            long = slot < 2 * geometry.contour
            contrast = np.float32(geometry.snake_contrast * (geometry.dash_contrast if long else 1))
            rows = np.flatnonzero(kinds[:, slot] >= 0)
            grid.lay(canvas, rows, far[rows, slot], contrast * self.dashes.ink[kinds[rows, slot]])
        rows = np.arange(len(labels))
        start = rng.integers(2, size=len(labels))
        end = np.where(labels == 1, start, 1 - start)
        discs = [tails[rows, start], grid.pixels(far[rows, geometry.contour * (end + 1) - 1])]
        for pixels in discs:
            grid.lay(canvas, rows, grid.places(pixels), np.tile(disc(geometry), (len(rows), 1, 1)))
        canvas = canvas.reshape(-1, grid.width, grid.width)[:, grid.rim : -grid.rim, grid.rim : -grid.rim]
        pictures = np.rint(canvas * (255 / canvas.max(axis=(1, 2), keepdims=True))).astype(np.uint8)
        angles = np.where(kinds >= 0, self.dashes.angles[kinds], np.nan)
        return Scenes(pictures, labels, grid.pixels(far), angles, np.stack(discs, axis=1))
