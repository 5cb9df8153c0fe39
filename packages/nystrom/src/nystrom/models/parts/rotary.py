r"""Rotary positions: queries and keys rotate by angles that grow with the position, so scores depend on distances.

Channels j and j + d/2 of a head of width d form one complex number $z_j$, which position p rotates to
$$z_j\, e^{i p \theta_j}, \qquad \theta_j = 10000^{-k_j / R},$$
so the score of a query at p and a key at p' depends on their positions only through p - p'. R of the P pairs are
rotated: those with $(j R \bmod P) < R$, which are evenly spread; $k_j = \lfloor j R / P \rfloor$ numbers them. The
other pairs have $\theta_j = 0$ and do not depend on the position.

Within each head, P = d/2, and all heads are rotated alike. Across heads, the pairs of all heads are numbered one after
the other, so the first head rotates fast and is local, and the last one rotates slowly and sees far.

Angles and products are computed in float32 at least; the results are rounded once, to the dtype of the input.

Source: Su et al. (2021), arXiv:2104.09864; across heads, with every second pair at rest, arXiv:2501.14850.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nystrom.precision import at_least_float32

_BASE = 10_000.0


class Rotation(NamedTuple):
    """The angles of the pairs of every head at every position."""

    # Cosines of the angles; the third axis has one entry if all heads are rotated alike
    cos: Float[Tensor, "#b n #h pairs"]
    sin: Float[Tensor, "#b n #h pairs"]  # Sines of the angles


def rotation(
    positions: Int[Tensor, "#b n"],
    *,
    num_heads: int,
    head_dim: int,
    share: float,
    across_heads: bool,
    dtype: torch.dtype,
) -> Rotation:
    """The rotation of the `share` of pairs, numbered across the heads or in each, at these positions; the first is 0.

    `dtype` is float32, or float64 for more digits.
    """
    heads = num_heads if across_heads else 1
    pairs = heads * head_dim // 2
    turned = max(1, round(share * pairs))
    place = torch.arange(pairs, device=positions.device) * turned
    frequency = _BASE ** (-(place // pairs).to(dtype) / turned)
    frequency = torch.where(place % pairs < turned, frequency, 0.0).unflatten(0, (heads, -1))
    angle = positions[..., None, None].to(dtype) * frequency
    return Rotation(angle.cos(), angle.sin())


def rotate(x: Float[Tensor, "b n w"], by: Rotation, *, num_heads: int) -> Float[Tensor, "b n w"]:
    """Rotate projected queries or keys, with their heads side by side, by the result of `rotation`."""
    real, imaginary = at_least_float32(x).unflatten(-1, (num_heads, 2, -1)).unbind(-2)
    turned = torch.stack([real * by.cos - imaginary * by.sin, real * by.sin + imaginary * by.cos], dim=-2)
    return turned.flatten(-3).to(x.dtype)
