r"""The parts of a Pathfinder picture: its sizes, and its dashes and discs as small pieces of a pixel grid.

A snake is a row of dashes. Each starts at a pivot $p$ and points along an angle $\theta$: it covers the line from
$p + g\,u$ to $p + (g + l)\,u$ with $u = (\sin\theta, \cos\theta)$ in rows and columns, length $l$ and margin $g$; the
next pivot is $p + (l + 2g)\,u$, so dashes are $2g$ pixels apart. Pivots and the far ends of dashes are whole pixels,
rounded to the nearest, so there are few different dashes: one per degree to start a snake, and one per pixel of the
circle of radius $l + g$ around a pivot to continue it. Each is drawn once, as three stamps around its far end: its ink;
its footprint, the dash dilated by the margin, where nothing else may be; and the footprint dilated by the margin
again, where no other dash may end.

Antialiasing: a piece is drawn on a grid finer by a factor, and reduced by Lanczos' filter of three lobes.

Source: the sizes of Tay et al. (2021), arXiv:2011.04006, for their four resolutions; the pictures of Linsley et al.
(2018), arXiv:1805.08315, and Kim et al. (2020), arXiv:1906.01558.
Departs from the authors' code: positions are rounded to the nearest pixel, not always up or always down.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

SEED_ANGLES = 360
LOBES = 3
# The outer lobes of the filter carry about a hundredth of a shape; anything further out is cut off.
BLUR = 1


@dataclass(frozen=True)
class Geometry:
    """The sizes of a Pathfinder picture, in pixels.

    Attributes:
        size: Rows and columns.
        margins: Free space around a dash; one of them is drawn for each picture.
        padding: Free space at the edges.
        length: Length of a dash.
        thickness: Thickness of a dash.
        radius: Radius of the discs.
        seed_distance: Distance between the starts of the two long snakes; the first keeps twice this from the edges.
        continuity: Larger values give straighter snakes.
        distractor_pieces: Dashes in all short snakes together.
        snake_contrast: Contrast of the short snakes; a disc has 1.
        dash_contrast: The contrast of the two long snakes is this times `snake_contrast`.
        contour: Dashes of a long snake; short ones have a third.
        antialias: Factor of the finer grid that pieces are drawn on.
    """

    size: int
    margins: tuple[int, ...]
    padding: int
    length: int
    thickness: float
    radius: float
    seed_distance: int
    continuity: float
    distractor_pieces: int
    snake_contrast: float
    dash_contrast: float = 1.0
    contour: int = 14
    antialias: int = 2

    @property
    def distractor_length(self) -> int:
        """Dashes of a short snake."""
        return self.contour // 3

    @property
    def distractors(self) -> int:
        """Short snakes that are attempted."""
        return self.distractor_pieces // self.distractor_length


GEOMETRIES: dict[int, Geometry] = {
    32: Geometry(32, (1,), 1, 2, 0.5, 1.5, 7, 1.0, 20, 2.0, dash_contrast=0.75),
    64: Geometry(64, (1,), 1, 5, 1.0, 2.5, 12, 1.8, 22, 0.8),
    128: Geometry(128, (2, 3), 1, 5, 1.5, 3.0, 20, 1.8, 35, 0.9),
    # The published sizes for 256 do not include the padding: it is the authors' default.
    256: Geometry(256, (3,), 22, 5, 2.0, 5.0, 27, 1.8, 30, 1.0),
}


@dataclass(frozen=True)
class Dashes:
    """Every dash of one geometry and margin.

    The first `SEED_ANGLES` point along whole degrees, the others are those of `circle`.

    Attributes:
        angles: Directions, in radians.
        steps: Steps from the far end of a dash to the next pivot.
        circle: Steps from a pivot to the far ends of the dashes that may follow.
        weights: Weight with which each of `circle` follows a dash: cos^2(min(continuity * turn, pi / 2)).
        ink: Stamps of the dash itself, from 0 to about 1.
        footprint: Stamps of where nothing else may be, from 0 to 255.
        surroundings: Stamps of where no other dash may end, from 0 to 255; these are the largest.
    """

    angles: NDArray[np.float64]
    steps: NDArray[np.int64]
    circle: NDArray[np.int64]
    weights: NDArray[np.float32]
    ink: NDArray[np.float32]
    footprint: NDArray[np.uint8]
    surroundings: NDArray[np.uint8]


@cache
def dashes(geometry: Geometry, margin: int) -> Dashes:
    """Draw every dash of a geometry."""
    radius = geometry.length + margin
    # An angle per pixel of the circle, in octants that mirror each other.
    arcs = np.linspace(0, 2 * np.pi, 8 * int(np.ceil(np.pi * radius / 4)), endpoint=False)
    circle = np.unique(_rounded(radius * _direction(arcs)), axis=0)
    angles = np.concatenate([np.deg2rad(np.arange(SEED_ANGLES)), np.arctan2(circle[:, 0], circle[:, 1])])
    turn = np.abs((angles[:, None] - angles[SEED_ANGLES:] + np.pi) % (2 * np.pi) - np.pi)
    bent = geometry.continuity * turn
    # The cosine of pi / 2 is not 0 in floating point.
    weights = np.where(bent < np.pi / 2, np.cos(bent) ** 2, 0)
    reach = geometry.length + 2 * margin + int(np.ceil(geometry.thickness / 2)) + BLUR
    ink, footprint = (
        np.stack([_stamp(geometry, reach, angle, geometry.thickness / 2 + grown) for angle in angles])
        for grown in (0, margin)
    )
    levels = np.rint(255 * footprint.clip(0, 1)).astype(np.uint8)
    inner = slice(margin, -margin)
    return Dashes(
        angles=angles,
        steps=_rounded(margin * _direction(angles)),
        circle=circle,
        weights=weights.astype(np.float32),
        ink=np.ascontiguousarray(ink[:, inner, inner].clip(0), dtype=np.float32),
        footprint=np.ascontiguousarray(levels[:, inner, inner]),
        surroundings=_grown(levels, margin),
    )


@cache
def disc(geometry: Geometry) -> NDArray[np.float32]:
    """Draw a disc, from 0 to 1, around the middle of its stamp."""
    reach = int(np.ceil(geometry.radius)) + BLUR
    stamp = _antialiased(geometry.antialias, reach, lambda y, x: np.hypot(y, x) - geometry.radius)
    return stamp.clip(0, 1).astype(np.float32)


def _stamp(geometry: Geometry, reach: int, angle: float, half_width: float) -> NDArray[np.float64]:
    """Draw the points within half a width of the line that runs along an angle and ends in the middle."""
    up, right = _direction(np.array(angle))

    def outside(y: NDArray[np.float64], x: NDArray[np.float64]) -> NDArray[np.float64]:
        along = np.clip(y * up + x * right, -geometry.length, 0)
        return np.hypot(y - along * up, x - along * right) - half_width

    return _antialiased(geometry.antialias, reach, outside)


def _antialiased(
    factor: int, reach: int, outside: Callable[[NDArray[np.float64], NDArray[np.float64]], NDArray[np.float64]]
) -> NDArray[np.float64]:
    """Draw the shape with the given signed distance on a finer grid, and reduce it."""
    pixels = 2 * reach + 1
    fine = (np.arange(pixels * factor) + 0.5) / factor - pixels / 2
    # The coverage of a fine pixel on the outline is the depth of its centre inside the shape.
    drawn = np.clip(0.5 - factor * outside(fine[:, None], fine[None, :]), 0, 1)
    away = np.arange(-reach, reach + 1)[:, None] - fine
    lanczos = np.where(np.abs(away) < LOBES, np.sinc(away) * np.sinc(away / LOBES), 0)
    lanczos /= lanczos.sum(axis=1, keepdims=True)
    return lanczos @ drawn @ lanczos.T


def _grown(stamps: NDArray[np.uint8], margin: int) -> NDArray[np.uint8]:
    """Take the largest value within the margin around each pixel."""
    grown = stamps.copy()
    size = stamps.shape[-1]
    for y in range(-margin, margin + 1):
        for x in range(-margin, margin + 1):
            if y * y + x * x <= margin * margin:
                here, there = (
                    (..., slice(max(dy, 0), size + min(dy, 0)), slice(max(dx, 0), size + min(dx, 0)))
                    for dy, dx in ((y, x), (-y, -x))
                )
                grown[here] = np.maximum(grown[here], stamps[there])
    return grown


def _direction(angles: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.stack([np.sin(angles), np.cos(angles)], axis=-1)


def _rounded(places: NDArray[np.float64]) -> NDArray[np.int64]:
    return np.rint(places).astype(np.int64)
