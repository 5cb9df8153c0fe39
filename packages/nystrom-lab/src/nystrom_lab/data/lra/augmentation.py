r"""Augmentations of training samples that keep the class, for text and image tasks.

**Texts** are cropped to a stretch of at least half of their bytes. **Pictures of things** are mirrored left to right
with probability 1/2, and drawn anew by
$$P'_{r, c} = P\big((r - m) / s + m - d_r,\; \pm (c - m) / s + m - d_c\big), \qquad m = (S - 1) / 2,$$
with a scale s in [0.9, 1.1] and shifts $d_r, d_c$ of at most a tenth of the side S, all uniform; values between pixels
are interpolated linearly, and the border is extended. **Pathfinder's lines** are mirrored both ways, each with
probability 1/2: to them a scale would change the width of a line.

ListOps has `nystrom_lab.data.lra.listops.expressions`. Pictures are two-dimensional here; the model still sees
a sequence.

Source: the crops, flips, shifts and scales of arXiv:2501.14850.
Departs from it: crops have random lengths; there are no rotations.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

_SCALE, _SHIFT, _LEAST = 0.1, 0.1, 0.5


def crop_text(tokens: NDArray[Any], rng: np.random.Generator) -> NDArray[Any]:
    """A random stretch of at least half of a text."""
    length = int(rng.integers(math.ceil(_LEAST * len(tokens)), len(tokens), endpoint=True))
    start = int(rng.integers(0, len(tokens) - length, endpoint=True))
    return tokens[start : start + length]


def crop_texts(pair: tuple[NDArray[Any], ...], rng: np.random.Generator) -> tuple[NDArray[Any], ...]:
    """Crop each text of a pair by itself."""
    return tuple(crop_text(tokens, rng) for tokens in pair)


def vary_picture(tokens: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
    """Mirror a square picture left to right or not, shift and scale it."""
    side = math.isqrt(len(tokens))
    scale = rng.uniform(1 - _SCALE, 1 + _SCALE)
    down, right = rng.uniform(-_SHIFT * side, _SHIFT * side, size=2)
    middle = (side - 1) / 2
    places = (np.arange(side) - middle) / scale
    mirror = -1 if rng.random() < 0.5 else 1
    rows, columns = (_between(place + middle, side) for place in (places - down, mirror * places - right))
    varied = rows @ tokens.reshape(side, side) @ columns.T
    return np.rint(varied).astype(np.uint8).reshape(-1)


def mirror_picture(tokens: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
    """Mirror a square picture in both directions, each with probability 1/2."""
    side = math.isqrt(len(tokens))
    down, right = rng.random(2) < 0.5
    return tokens.reshape(side, side)[:: -1 if down else 1, :: -1 if right else 1].reshape(-1)


def _between(places: NDArray[np.float64], side: int) -> NDArray[np.float64]:
    """The matrix that interpolates a line of pixels linearly at these places."""
    places = places.clip(0, side - 1)
    before = np.floor(places).astype(np.int64).clip(0, max(side - 2, 0))
    matrix = np.zeros((len(places), side))
    line = np.arange(len(places))
    share = places - before
    matrix[line, before] = 1 - share
    matrix[line, np.minimum(before + 1, side - 1)] += share
    return matrix
