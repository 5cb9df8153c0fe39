"""What kernels are given, in few bundles: tokens, sizes, and the constants that they are compiled for."""

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
    """Numbers that a kernel is not compiled for.

    Attributes:
        H: Heads.
        BH: Sequences times heads.
        N: Queries.
        S: Keys.
        M: Landmarks, or clusters.
        ROWS: Rows of the table of landmarks.
    """

    H: int
    BH: int
    N: int
    S: int
    M: int
    ROWS: int


class NearFarSizes(NamedTuple):
    """The same for near_far.

    Attributes:
        H: Heads.
        BH: Sequences times heads.
        N: Queries.
        S: Keys.
        G: Heavy keys.
        M: Clusters, or heavy keys where they take their place.
        SIZE: Queries of a block.
        REACH: Tokens on either side of its block that a query sees.
        BLOCKS: Blocks of a sequence.
    """

    H: int
    BH: int
    N: int
    S: int
    G: int
    M: int
    SIZE: int
    REACH: int
    BLOCKS: int


class ChoiceSizes(NamedTuple):
    """The same for the choice of heavy keys and clusters.

    Attributes:
        H: Heads.
        BH: Sequences times heads.
        N: Queries.
        S: Keys.
        G: Heavy keys.
        M: Clusters.
        MOST: Keys that a step samples at most.
        MOVES: Steps that move the centres.
    """

    H: int
    BH: int
    N: int
    S: int
    G: int
    M: int
    MOST: int
    MOVES: int


class _Compiled:
    """Fields that are constants of Triton: kernels take no others for constants."""

    def __post_init__(self) -> None:
        for field in fields(self):  # pyright: ignore[reportArgumentType]
            object.__setattr__(self, field.name, tl.constexpr(getattr(self, field.name)))


@dataclass(frozen=True)
class Constants(_Compiled):
    """What a kernel is compiled for; in a kernel `C.D` is a constant.

    Attributes:
        D: Width of queries and keys.
        E: Width of values.
        SCALE: Factor on the scores.
        ACC: Dtype of sums.
        LOW: Dtype of weights in products.
        PRECISION: How float32 products are computed, see `nystrom.gpu.arithmetic`.
        LOW_PRECISION: The same for products of weights.
        BLOCK_N: Tokens of a tile.
        BLOCK_M: Landmarks, or clusters, of a tile.
        BLOCK_D: At least D.
        BLOCK_E: At least E.
        GAUSSIAN: Whether the Gaussian kernel replaces softmax.
        WHOLE: Whether one tile holds all landmarks.
        TAPS: Size of the skip's kernel; 0 without one.
        BLOCK_T: Tokens beyond a tile that it reaches, at a time.
        BLOCK_W: Tokens of a tile of a window.
        NEAR: Whether queries have a window.
    """

    D: Any
    E: Any
    SCALE: Any
    ACC: Any
    LOW: Any
    PRECISION: Any
    LOW_PRECISION: Any
    BLOCK_N: Any
    BLOCK_M: Any
    BLOCK_D: Any
    BLOCK_E: Any
    GAUSSIAN: Any = False
    WHOLE: Any = False
    TAPS: Any = 0
    BLOCK_T: Any = 16
    BLOCK_W: Any = 16
    NEAR: Any = False


@dataclass(frozen=True)
class ChoiceConstants(_Compiled):
    """The same for the choice of heavy keys and clusters; what a kernel does not need keeps its default.

    Attributes:
        D: Width of queries and keys.
        BLOCK_D: At least D.
        ACC: Dtype of sums.
        REACH: Largest coordinate of a centre, see `nystrom.landmarks.reach`.
        MEANS: Mean queries.
        SCALE: Factor on the scores.
        BLOCK_N: Tokens of a tile.
        BLOCK_M: Clusters of a tile, or at least MEANS.
        GROUP: Keys of a group, of which the largest order is known.
    """

    D: Any
    BLOCK_D: Any
    ACC: Any
    REACH: Any
    MEANS: Any
    SCALE: Any = 1.0
    BLOCK_N: Any = 16
    BLOCK_M: Any = 16
    GROUP: Any = 1
