"""Arguments of kernels, in few bundles: tokens, sizes, and the constants that they are compiled for."""

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import triton.language as tl


class StridedTokens(NamedTuple):
    """Tokens (b, h, n, width), with stride 1 along the width: the tensor, and its strides along the others."""

    at: Any
    b: int
    h: int
    n: int


class LandmarkSizes(NamedTuple):
    """Numbers that a kernel is not compiled for."""

    H: int  # Heads
    BH: int  # Sequences times heads
    N: int  # Queries
    S: int  # Keys
    M: int  # Landmarks, or clusters
    ROWS: int  # Rows of the table of landmarks


class NearFarSizes(NamedTuple):
    """Sizes that near_far's kernels are given."""

    H: int  # Heads
    BH: int  # Sequences times heads
    N: int  # Queries
    S: int  # Keys
    G: int  # Heavy keys
    M: int  # Clusters, or heavy keys where they take their place
    SIZE: int  # Queries of a block
    REACH: int  # Tokens on either side of its block that a query sees
    BLOCKS: int  # Blocks of a sequence
    FURTHEST: int  # Distance from which all keys of a side have one bias; 0 without a bias of positions


class ChoiceSizes(NamedTuple):
    """Sizes of the choice of heavy keys and clusters."""

    H: int  # Heads
    BH: int  # Sequences times heads
    N: int  # Queries
    S: int  # Keys
    G: int  # Heavy keys
    M: int  # Clusters
    MOST: int  # Keys that a step samples at most
    MOVES: int  # Steps that move the centres


class _Compiled:
    """Fields that are constants of Triton: kernels take no others for constants."""

    def __post_init__(self) -> None:
        for field in fields(self):  # pyright: ignore[reportArgumentType]
            object.__setattr__(self, field.name, tl.constexpr(getattr(self, field.name)))


@dataclass(frozen=True)
class Constants(_Compiled):
    """The constants that a kernel is compiled for; in a kernel `C.D` is a constant."""

    D: Any  # Width of queries and keys
    E: Any  # Width of values
    SCALE: Any  # Factor on the scores
    ACC: Any  # Dtype of sums
    LOW: Any  # Dtype of weights in products
    PRECISION: Any  # How float32 products are computed, see `nystrom.gpu.arithmetic`
    LOW_PRECISION: Any  # The same for products of weights
    BLOCK_N: Any  # Tokens of a tile
    BLOCK_M: Any  # Landmarks, or clusters, of a tile
    BLOCK_D: Any  # At least D
    BLOCK_E: Any  # At least E
    GAUSSIAN: Any = False  # Whether the Gaussian kernel replaces softmax
    WHOLE: Any = False  # Whether one tile holds all landmarks
    TAPS: Any = 0  # Size of the skip's kernel; 0 without one
    BLOCK_T: Any = 16  # Tokens beyond a tile that it reaches, at a time
    BLOCK_W: Any = 16  # Tokens of a tile of a window
    NEAR: Any = False  # Whether queries have a window


@dataclass(frozen=True)
class ChoiceConstants(_Compiled):
    """Constants of the choice of heavy keys and clusters; a kernel leaves those that it does not need."""

    D: Any  # Width of queries and keys
    BLOCK_D: Any  # At least D
    ACC: Any  # Dtype of sums
    REACH: Any  # Largest coordinate of a centre, see `nystrom.landmarks.reach`
    MEANS: Any  # Mean queries
    SCALE: Any = 1.0  # Factor on the scores
    BLOCK_N: Any = 16  # Tokens of a tile
    BLOCK_M: Any = 16  # Clusters of a tile, or at least MEANS
    GROUP: Any = 1  # Keys of a group, of which the largest order is known
