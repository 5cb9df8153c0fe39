r"""Snakes of dashes that grow in many pictures at once, one dash at a time, and keep away from each other.

With the pivot and the circle of `dashes`, the next dash ends at a pixel of the circle with probability
$$P \propto \cos^2\big(\min(c\,|\Delta\theta|, \tfrac{\pi}{2})\big)\,(1 - M),$$
where $c$ is the continuity, $\Delta\theta$ the turn and $M$ the mask there: the surroundings of the edges, of other
snakes and of the snake itself except its last dash. If the footprint of the drawn dash overlaps another one, a
new dash is drawn, up to three times; after that the snake cannot go on.

Source: Linsley et al. (2018), arXiv:1805.08315.
Departs from the authors' code: the last dash of one snake enters the mask of the other immediately, and footprints of
dashes may overlap less (up to 1.5 times a full one, not 1.8), so that snakes never touch.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from nystrom_lab.data.lra.pathfinder.dashes import SEED_ANGLES, Dashes

Ints = NDArray[np.int64]
Levels = NDArray[np.uint8]

# Dashes that are drawn at a pivot before the snake is abandoned.
DASH_TRIES = 3
# Two footprints that meet (each up to 255) sum to at most 1.5 times 255: only their edges overlap.
OVERLAP = 382
# A footprint may cover this much of a pixel at the edges: four fifths of a full one.
EDGE = OVERLAP - 204


class Planes(NamedTuple):
    """Pixels that snakes keep away from: a plane for each snake of each picture, `lanes` of them in each picture.

    Attributes:
        blocked: Footprints of dashes; no other footprint may overlap them.
        near: Surroundings of dashes; another dash may not end there.
    """

    blocked: Levels
    near: Levels


class PixelGrid:
    """A square of pixels with a rim. A place is the index of a pixel, counted row by row, the rim included.

    Args:
        size: Rows and columns without the rim.
        rim: Width of the rim; no stamp is larger.
    """

    def __init__(self, size: int, rim: int):
        self.size, self.rim, self.width = size, rim, size + 2 * rim

    def offsets(self, steps: Ints) -> Ints:
        """Convert steps in rows and columns to steps in places."""
        return steps[..., 0] * self.width + steps[..., 1]

    def places(self, pixels: Ints) -> Ints:
        """Convert rows and columns to places."""
        return self.offsets(pixels + self.rim)

    def pixels(self, places: Ints) -> Ints:
        """Convert places to rows and columns."""
        return np.stack(np.divmod(places, self.width), axis=-1) - self.rim

    def edges(self, inside: int, level: int) -> Levels:
        """Fill a plane except for the pixels at least `inside` pixels from the edge."""
        plane = np.full((self.width, self.width), level, dtype=np.uint8)
        free = slice(self.rim + inside, self.rim + self.size - inside)
        plane[free, free] = 0
        return plane.reshape(-1)

    def lay(self, planes: NDArray[Any], rows: Ints, places: Ints, stamps: NDArray[Any]) -> None:
        """Brighten each of some planes, all different, by a stamp around a place."""
        windows, index = self._windows(planes, rows, places, stamps.shape[-1])
        under = windows[index]
        windows[index] = np.maximum(under, stamps, out=under)

    def under(self, planes: NDArray[Any], rows: Ints, places: Ints, side: int) -> NDArray[Any]:
        """Copy the window of `side` x `side` pixels around a place in each of some planes."""
        windows, index = self._windows(planes, rows, places, side)
        return windows[index]

    def _windows(
        self, planes: NDArray[Any], rows: Ints, places: Ints, side: int
    ) -> tuple[NDArray[Any], tuple[Ints, Ints, Ints]]:
        # Copying whole rows of a window is three times as fast as copying pixel by pixel.
        square = planes.reshape(-1, self.width, self.width)
        windows = sliding_window_view(square, (side, side), axis=(1, 2), writeable=True)
        return windows, (rows, *np.divmod(places - side // 2 * (self.width + 1), self.width))


class Snakes:
    """Snakes of many pictures.

    Args:
        grid: The pictures' pixels.
        dashes: Dashes of the snakes.
        planes: Pixels to keep away from; written to.
        lanes: Snakes in a picture.
        length: Dashes of a snake.
    """

    def __init__(self, grid: PixelGrid, dashes: Dashes, planes: Planes, *, lanes: int, length: int):
        self.grid, self.dashes, self.planes, self.lanes = grid, dashes, planes, lanes
        self.far = np.zeros((len(planes.blocked), length), dtype=np.int64)
        self.kinds = np.zeros_like(self.far)
        self._circle = grid.offsets(dashes.circle)
        self._steps = grid.offsets(dashes.steps)
        # The largest value allowed under each pixel of a footprint.
        self._limits = (OVERLAP - dashes.footprint.astype(np.int64)).clip(max=255).astype(np.uint8)

    def free(self, planes: Ints, far: Ints, kinds: Ints) -> NDArray[np.bool_]:
        """Find the dashes that overlap no other dash of their plane."""
        under = self.grid.under(self.planes.blocked, planes, far, self._limits.shape[-1])
        return np.asarray((under <= self._limits[kinds]).all(axis=(1, 2)))

    def lay(self, planes: Ints, far: Ints, kinds: Ints) -> None:
        """Add a dash to each of some planes, for their snakes to keep away from."""
        self.grid.lay(self.planes.blocked, planes, far, self.dashes.footprint[kinds])
        self.grid.lay(self.planes.near, planes, far, self.dashes.surroundings[kinds])

    def begin(self, pictures: Ints, lane: int, far: Ints, kinds: Ints) -> None:
        """Give one snake in each of some pictures its first dash."""
        planes = pictures * self.lanes + lane
        self.far[planes, 0], self.kinds[planes, 0] = far, kinds
        self._lay_for_others(planes, lane, far, kinds)

    def grow(self, rng: np.random.Generator, pictures: Ints, lane: int, dashes: Ints) -> NDArray[np.bool_]:
        """Add a dash to one snake of each picture, and find the pictures where there was room for it."""
        planes = pictures * self.lanes + lane
        last, last_kinds = self.far[planes, dashes - 1], self.kinds[planes, dashes - 1]
        ends = (last + self._steps[last_kinds])[:, None] + self._circle
        mask = self.planes.near.reshape(-1)[planes[:, None] * self.grid.width**2 + ends]
        chances = np.cumsum(self.dashes.weights[last_kinds] * (255 - mask), axis=1)
        grown = np.zeros(len(pictures), dtype=bool)
        pending = np.flatnonzero(chances[:, -1] > 0)
        for _ in range(DASH_TRIES):
            # Below the sum of the weights even when rounded, so the drawn end has a weight above zero.
            level = rng.random(len(pending)) * chances[pending, -1]
            drawn = (chances[pending] <= level[:, None]).sum(axis=1)
            far, kinds = ends[pending, drawn], SEED_ANGLES + drawn
            free = self.free(planes[pending], far, kinds)
            there, far, kinds = pending[free], far[free], kinds[free]
            self.far[planes[there], dashes[there]], self.kinds[planes[there], dashes[there]] = far, kinds
            self._lay_for_others(planes[there], lane, far, kinds)
            grown[there] = True
            pending = pending[~free]
        self.lay(planes[grown], last[grown], last_kinds[grown])
        return grown

    def _lay_for_others(self, planes: Ints, lane: int, far: Ints, kinds: Ints) -> None:
        for other in range(self.lanes):
            if other != lane:
                self.lay(planes + other - lane, far, kinds)
