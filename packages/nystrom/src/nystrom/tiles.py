"""Tokens with a place in the plane, such as tiles of a slide: an order that keeps neighbours close, and a heat map.

Attention with segment landmarks, near tokens or a skip convolution depends on the order of the tokens. In the usual
order, row by row, horizontal neighbours are close and vertical neighbours far apart.
"""

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nystrom.shapes import check_keep, check_tensor


def hilbert_order(
    coordinates: Int[Tensor, "*b n 2"], *, keep: Bool[Tensor, "b n"] | None = None
) -> Int[Tensor, "*b n"]:
    """The order in which a Hilbert curve visits tiles: in `x[hilbert_order(xy)]`, neighbours in the plane are close.

    Args:
        coordinates: x and y of each tile, whole numbers on any grid: columns and rows, or pixels.
        keep: Real tiles of a batch; the others come last.

    Returns:
        Indices of the tiles along the curve; tiles at the same place stay in their order.

    Raises:
        ValueError: Coordinates that are not whole numbers in pairs.
    """
    check_tensor("coordinates", coordinates)
    if coordinates.ndim not in (2, 3) or coordinates.shape[-1] != 2 or coordinates.dtype not in _WHOLE:
        raise ValueError(
            f"coordinates are {tuple(coordinates.shape)} of {coordinates.dtype}; expected whole numbers (tiles, 2) or "
            "(batch, tiles, 2): round them to the grid of the tiles."
        )
    if keep is not None:
        check_keep("keep", keep, coordinates, "coordinates")
    if not coordinates.numel():
        return coordinates.new_zeros(coordinates.shape[:-1], dtype=torch.int64)
    place = coordinates.long()
    real = place if keep is None else place.masked_fill(~keep[..., None], torch.iinfo(torch.int64).max)
    first = real.amin(dim=-2, keepdim=True)
    x, y = ((place if keep is None else torch.where(keep[..., None], place, first)) - first).unbind(-1)
    if torch.maximum(x, y).amax() >= 1 << _BITS:
        raise ValueError(f"coordinates are more than 2^{_BITS} apart: count them in tiles, or in pixels.")
    along = torch.zeros_like(x)
    # Always all bits, so that the curve does not depend on other items of the batch.
    for bit in reversed(range(_BITS)):
        right, up = x >> bit & 1, y >> bit & 1
        along += (3 * right ^ up) << 2 * bit
        # The curve inside a quadrant is the whole curve, mirrored or turned.
        mirrored = (up == 0) & (right == 1)
        x, y = (torch.where(mirrored, (1 << bit) - 1 - each, each) for each in (x, y))
        x, y = torch.where(up == 0, y, x), torch.where(up == 0, x, y)
        x, y = (each & ((1 << bit) - 1) for each in (x, y))
    if keep is not None:
        along = torch.where(keep, along, torch.iinfo(torch.int64).max)
    return along.argsort(dim=-1, stable=True)


def heat_map(
    values: Float[Tensor, " n"], coordinates: Int[Tensor, "n 2"], *, tile: int | None = None
) -> Float[Tensor, "rows columns"]:
    """Values of tiles on their grid, as an image: `plt.imshow(heat_map(row, xy))`.

    Args:
        values: A number for each tile, such as a row of the attention matrix (`weight_queries`).
        coordinates: x and y of each tile, whole numbers.
        tile: Distance of neighbours: 1 if coordinates count tiles, else the size of a tile in pixels. None takes the
            largest number that divides all distances, which it is if the tiles are on one grid.

    Returns:
        The values by row y and column x, from the smallest of each; NaN without a tile, the sum of several tiles.

    Raises:
        ValueError: Numbers of values and tiles that differ, coordinates that are not whole numbers in pairs, `tile`
            below 1, or tiles without `tile` that are not on one grid.
    """
    check_tensor("values", values)
    check_tensor("coordinates", coordinates)
    if values.ndim != 1 or coordinates.shape != (len(values), 2) or coordinates.dtype not in _WHOLE:
        raise ValueError(
            f"values are {tuple(values.shape)} and coordinates {tuple(coordinates.shape)} of {coordinates.dtype}; "
            "expected (tiles) and whole numbers (tiles, 2)."
        )
    if tile is not None and tile < 1:
        raise ValueError(f"tile is {tile}; expected at least 1, the distance of neighbours.")
    if not len(values):
        return values.new_zeros(0, 0)
    place = coordinates.long()
    place = place - place.amin(dim=0)
    step = (math.gcd(*place.unique().tolist()) or 1) if tile is None else tile
    x, y = (place // step).unbind(1)
    shape = int(y.amax()) + 1, int(x.amax()) + 1
    if tile is None and math.prod(shape) > _MOST_CELLS * len(values):
        raise ValueError(
            f"coordinates of {len(values)} tiles span a grid of {shape[0]:,} x {shape[1]:,} cells, so their "
            "distance is not plain: pass tile=, the size of a tile in pixels, or tile=1 if coordinates count tiles."
        )
    grid, seen = (
        values.new_zeros(shape).index_put((y, x), each, accumulate=True) for each in (values, torch.ones_like(values))
    )
    return torch.where(seen > 0, grid, torch.nan)


# Bits of a coordinate; a place along the curve has twice as many.
_BITS = 31
_WHOLE = (
    *(torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint64, torch.uint32, torch.uint16, torch.uint8),
)
# Cells of a map per tile: pixels of tiles that are on no grid have more, and tiles of a slide, counted, have fewer.
_MOST_CELLS = 1000
