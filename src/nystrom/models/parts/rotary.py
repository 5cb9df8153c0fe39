r"""Rotary positions: queries and keys turned by angles that grow with the position, so that a score knows the distance.

Channels j and j + d/2 of a head of width d are one complex number $z_j$, at position p turned to
$$z_j\, e^{i p \theta_j}, \qquad \theta_j = 10000^{-k_j / R},$$
so that the score of a query at p and a key at p' depends on their positions through p - p' alone. R of the P pairs
turn, those with $(j R \bmod P) < R$, evenly spread; $k_j = \lfloor j R / P \rfloor$ counts them. The other pairs have
$\theta_j = 0$ and see no position.

Within each head, P = d/2 and all heads turn alike. Across heads, the pairs of all heads are counted in their order, so
that the first head turns fast and is local, and the last one turns slowly and sees far.

Angles are computed in float32 at least, and so are the products, which are rounded once to the dtype of the input.

Source: Su et al. (2021), arXiv:2104.09864; across heads, with every second pair at rest, arXiv:2501.14850.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nystrom.precision import at_least_float32

_BASE = 10_000.0


class Rotation(NamedTuple):
    """What turns the pairs of every head at every position.

    Attributes:
        cos: Cosines of the angles; the third axis has one entry where all heads turn alike.
        sin: Their sines.
    """

    cos: Float[Tensor, "#b n #h pairs"]
    sin: Float[Tensor, "#b n #h pairs"]


def turned_pairs(pairs: int, share: float) -> int:
    """How many of the pairs turn: the nearest number to the share, and one at least."""
    return max(1, round(share * pairs))


def rotation(
    positions: Int[Tensor, "#b n"],
    *,
    num_heads: int,
    head_dim: int,
    share: float,
    across_heads: bool,
    dtype: torch.dtype,
) -> Rotation:
    """The rotation at these positions.

    Args:
        positions: Of the tokens; the first real one has 0.
        num_heads: Heads.
        head_dim: Width of a head, an even number.
        share: Share of the pairs that turn, in (0, 1].
        across_heads: Count the pairs across the heads.
        dtype: float32, or float64 for more digits.
    """
    heads = num_heads if across_heads else 1
    pairs = heads * head_dim // 2
    turned = turned_pairs(pairs, share)
    place = torch.arange(pairs, device=positions.device) * turned
    frequency = _BASE ** (-(place // pairs).to(dtype) / turned)
    frequency = torch.where(place % pairs < turned, frequency, 0.0).unflatten(0, (heads, -1))
    angle = positions[..., None, None].to(dtype) * frequency
    return Rotation(angle.cos(), angle.sin())


def rotate(x: Float[Tensor, "b n w"], by: Rotation, *, num_heads: int) -> Float[Tensor, "b n w"]:
    """Turn projected queries or keys.

    Args:
        x: Queries or keys, their heads side by side.
        by: From `rotation`.
        num_heads: Heads.
    """
    real, imaginary = at_least_float32(x).unflatten(-1, (num_heads, 2, -1)).unbind(-2)
    turned = torch.stack([real * by.cos - imaginary * by.sin, real * by.sin + imaginary * by.cos], dim=-2)
    return turned.flatten(-3).to(x.dtype)
