r"""A bias of the scores that is a function of the positions of query and key: small objects, never n x n numbers.

$$A_{ij} = \frac{e^{c\, q_i^\top k_j + b_h(x_i, x_j)}}{\sum_l e^{c\, q_i^\top k_l + b_h(x_i, x_l)}}$$
for head h, with the position $x_i$ of token i: its number, in which padding and holes count, or its coordinates.

| object | $b_h(x_i, x_j)$ | source |
|---|---|---|
| `RelativeBuckets` | an entry of a table, by the distance $j - i$ | T5, Raffel et al. 2020, arXiv:1910.10683 |
| `Alibi` | $-\mathrm{slope}_h\, \lvert i - j \rvert$ | Press et al. 2022, arXiv:2108.12409, both directions |
| `Alibi2d` | $-\mathrm{slope}_h\, \lVert x_i - x_j \rVert_2$ | TITAN, Ding et al. 2024, arXiv:2411.19666 |

Queries and keys are the same tokens: the bias is one of self-attention. Gradients reach tables and slopes, and not
coordinates.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from nystrom.checks import check_at_least, check_flag
from nystrom.shapes import check_tensor

# The error of `check_same_tokens` for cross-attention.
SELF_BIAS = "bias is one of positions, which is self-attention: leave it out of cross-attention"


@dataclass(frozen=True, eq=False)
class PositionBias:
    """The base of the three kinds; `weight` is the tensor (h, w) that is learned."""

    @property
    def weight(self) -> Float[Tensor, "h w"]:
        """The numbers of each head."""
        raise NotImplementedError

    @property
    def coordinates_of_tokens(self) -> Float[Tensor, "b n p"] | None:
        """Coordinates of the tokens, if they are not their number; b may be 1."""
        return None

    @property
    def furthest(self) -> int | None:
        """The distance from which all keys of a side have one bias; None if there is none."""
        return None

    def of_heads(self, heads: Sequence[int] | slice) -> "PositionBias":
        """The bias of some heads."""
        raise NotImplementedError

    def at(self, coordinates: Float[Tensor, "b n p"]) -> "PositionBias":
        """The bias for tokens that are somewhere else; itself if only their numbers count."""
        return self

    def places(self, q: Float[Tensor, "b h n d"]) -> Shaped[Tensor, "#b n p"]:
        """The positions of tokens: numbers, one for each, or coordinates."""
        coordinates = self.coordinates_of_tokens
        if coordinates is None:
            return torch.arange(q.shape[2], device=q.device)[None, :, None]
        # Half the digits would merge neighbours.
        return coordinates.detach().to(torch.promote_types(q.dtype, torch.float32))

    def distance(self, x: Shaped[Tensor, "*#b r p"], y: Shaped[Tensor, "*#b s p"]) -> Shaped[Tensor, "*#b r s"]:
        """The distance on which the bias of queries at x and keys at y depends."""
        return y[..., None, :, 0] - x[..., :, None, 0]

    def at_distance(self, weight: Float[Tensor, " w"], distance: Shaped[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        """The bias of one head, whose numbers `weight` are."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class RelativeBuckets(PositionBias):
    r"""The relative positions of T5: each distance has a bucket, and each bucket a number for each head.

    With $\delta = j - i$ and B buckets, half of them for $\delta > 0$ if `bidirectional`, and else all for
    $\max(-\delta, 0)$. The first half of the B' buckets of a side hold one distance each, and the others
    $$\frac{B'}{2} + \left\lfloor \frac{B'}{2}\,
    \frac{\log (2 \lvert\delta\rvert / B')}{\log (2 D / B')} \right\rfloor,$$
    at most B' - 1: from the distance D = `max_distance` on, a side has one bucket.

    Args:
        table: (h, buckets), of T5's layers `relative_attention_bias.weight.T`.
        max_distance: Distance from which all keys of a side have one bias.
        bidirectional: Whether the sides differ; False as in T5's decoders, where later keys have the bias of distance
            0.
    """

    table: Float[Tensor, "h buckets"]
    max_distance: int = 128
    bidirectional: bool = True

    def __post_init__(self) -> None:
        check_tensor("table", self.table)
        check_flag("bidirectional", self.bidirectional)
        check_at_least("max_distance", self.max_distance, 1)
        if self.table.ndim != 2 or not self.table.is_floating_point():
            raise ValueError(
                f"table has shape {tuple(self.table.shape)} and dtype {self.table.dtype}; expected floats (heads, "
                "buckets): of a layer of T5, relative_attention_bias.weight.T."
            )
        sides = 2 if self.bidirectional else 1
        buckets = self.table.shape[1]
        if buckets % (2 * sides) or not 0 < buckets // (2 * sides) < self.max_distance:
            raise ValueError(
                f"table has {buckets} buckets and max_distance is {self.max_distance}; expected a multiple of "
                f"{2 * sides}, and fewer single distances on a side than max_distance."
            )

    @property
    def weight(self) -> Float[Tensor, "h w"]:
        """The table."""
        return self.table

    @property
    def furthest(self) -> int | None:
        """The distance from which each side has one bucket."""
        return self.max_distance

    def of_heads(self, heads: Sequence[int] | slice) -> "RelativeBuckets":
        """The bias of some heads."""
        return replace(self, table=self.table[heads])

    def buckets(self, distance: Int[Tensor, "*b"]) -> Int[Tensor, "*b"]:
        """The bucket of each distance, as T5 computes it."""
        count, start = self.table.shape[1], 0
        if self.bidirectional:
            count //= 2
            start = count * (distance > 0)
            distance = distance.abs()
        else:
            distance = (-distance).clamp(min=0)
        single = count // 2
        share = (distance.clamp(min=1).float() / single).log() / math.log(self.max_distance / single)
        large = (single + (share * (count - single)).long()).clamp(max=count - 1)
        return start + torch.where(distance < single, distance, large)

    def of_each_distance(self, weight: Float[Tensor, "*h w"]) -> Float[Tensor, "*h x"]:
        """The bias of the distances from -`max_distance` to `max_distance`, from rows of the table."""
        most = self.max_distance
        return weight[..., self.buckets(torch.arange(-most, most + 1, device=weight.device))]

    def at_distance(self, weight: Float[Tensor, "... w"], distance: Shaped[Tensor, "..."]) -> Float[Tensor, "..."]:
        """The bias of one head, whose row of the table is `weight`, or of each, if it has a row for each."""
        most = self.max_distance
        return self.of_each_distance(weight)[..., distance.clamp(-most, most) + most]


@dataclass(frozen=True, eq=False)
class Alibi(PositionBias):
    """Attention with linear biases: minus the slope of the head times the distance of query and key.

    Args:
        slopes: One for each head, at least 0.
    """

    slopes: Float[Tensor, " h"]

    def __post_init__(self) -> None:
        _check_slopes(self.slopes)

    @property
    def weight(self) -> Float[Tensor, "h w"]:
        """The slopes."""
        return self.slopes[:, None]

    def of_heads(self, heads: Sequence[int] | slice) -> "Alibi":
        """The bias of some heads."""
        return replace(self, slopes=self.slopes[heads])

    def at_distance(self, weight: Float[Tensor, " w"], distance: Shaped[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        """The bias of one head, whose slope is `weight`."""
        return -weight[0] * distance.abs()


@dataclass(frozen=True, eq=False)
class Alibi2d(PositionBias):
    """Attention with linear biases over Euclidean distances, such as those of the tiles of a slide.

    Args:
        slopes: One for each head, at least 0.
        coordinates: (n, p) or (b, n, p), usually p = 2, in the unit of the slopes: TITAN counts tiles. Near_far cuts
            tokens into blocks in their order, so tokens in an order in which neighbours are near each other, such as a
            Hilbert curve, are attended to more exactly.
    """

    slopes: Float[Tensor, " h"]
    coordinates: Shaped[Tensor, "b n p"] | Shaped[Tensor, "n p"]

    def __post_init__(self) -> None:
        _check_slopes(self.slopes)
        check_tensor("coordinates", self.coordinates)
        shape, dtype = self.coordinates.shape, self.coordinates.dtype
        if len(shape) not in (2, 3) or shape[-1] == 0 or dtype.is_complex:
            raise ValueError(
                f"coordinates has shape {tuple(shape)} and dtype {dtype}; expected real numbers (tokens, 2), or "
                "(batch, tokens, 2)."
            )

    @property
    def weight(self) -> Float[Tensor, "h w"]:
        """The slopes."""
        return self.slopes[:, None]

    @property
    def coordinates_of_tokens(self) -> Float[Tensor, "b n p"]:
        """The coordinates; b may be 1."""
        return self.coordinates if self.coordinates.ndim == 3 else self.coordinates[None]

    def of_heads(self, heads: Sequence[int] | slice) -> "Alibi2d":
        """The bias of some heads."""
        return replace(self, slopes=self.slopes[heads])

    def at(self, coordinates: Float[Tensor, "b n p"]) -> "Alibi2d":
        """The bias for tokens at other coordinates."""
        return replace(self, coordinates=coordinates)

    def distance(self, x: Shaped[Tensor, "*#b r p"], y: Shaped[Tensor, "*#b s p"]) -> Shaped[Tensor, "*#b r s"]:
        """The distance of each query from each key."""
        square = (x[..., :, None, 0] - y[..., None, :, 0]).square()
        for axis in range(1, x.shape[-1]):
            square = square + (x[..., :, None, axis] - y[..., None, :, axis]).square()
        return square.sqrt()

    def at_distance(self, weight: Float[Tensor, " w"], distance: Shaped[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        """The bias of one head, whose slope is `weight`."""
        return -weight[0] * distance


def as_bias(bias: object) -> PositionBias:
    """The bias that a function is given.

    Raises:
        ValueError: It is a tensor, or something else that is no function of positions.
    """
    if not isinstance(bias, PositionBias):
        kinds = "nystrom.RelativeBuckets (T5), nystrom.Alibi or nystrom.Alibi2d"
        if not isinstance(bias, Tensor):
            raise ValueError(f"bias is of type {type(bias).__name__}; expected None, or {kinds}.")
        raise ValueError(
            f"bias is a tensor {tuple(bias.shape)}, and one number per pair of tokens does not fit in linear memory: "
            f"pass the function of positions that it is, {kinds}; others take "
            "torch.nn.functional.scaled_dot_product_attention."
        )
    return bias


def check_bias(bias: PositionBias, q: Float[Tensor, "b h n d"]) -> None:
    """Check a bias that a function is given, for these queries.

    Raises:
        ValueError: It does not fit heads, tokens or device.
    """
    if len(bias.weight) != q.shape[1]:
        raise ValueError(f"bias has {len(bias.weight)} heads but q has {q.shape[1]}: pass one row or slope per head.")
    if bias.weight.device != q.device:
        raise ValueError(f"bias is on {bias.weight.device} but q is on {q.device}: move it there.")
    places = bias.coordinates_of_tokens
    if places is not None and (places.shape[1] != q.shape[2] or places.shape[0] not in (1, q.shape[0])):
        raise ValueError(
            f"bias has coordinates of {tuple(places.shape[:2])} tokens but q holds {(q.shape[0], q.shape[2])}: pass "
            "one row of coordinates per token."
        )
    if places is not None and places.device != q.device:
        raise ValueError(f"the coordinates of bias are on {places.device} but q is on {q.device}: move them there.")


def real_places(
    bias: PositionBias, q: Float[Tensor, "b h n d"], keep: Bool[Tensor, "b n"] | None
) -> Shaped[Tensor, "#b n p"]:
    """The positions of tokens, zeros for those that are not real where these are coordinates."""
    places = bias.places(q)
    return places if keep is None or not places.is_floating_point() else torch.where(keep[..., None], places, 0.0)


def _check_slopes(slopes: Tensor) -> None:
    check_tensor("slopes", slopes)
    if slopes.ndim != 1 or not slopes.is_floating_point():
        raise ValueError(
            f"slopes has shape {tuple(slopes.shape)} and dtype {slopes.dtype}; expected one float per head."
        )
