"""Inputs that all stages share: tensors, sizes, and the constants that kernels are specialised to."""

from dataclasses import dataclass
from functools import cached_property

import torch

from nystrom.gpu.arguments import Constants, NearFarSizes
from nystrom.gpu.inputs import ProgramInputs
from nystrom.gpu.launch import Tiles, power, tiles
from nystrom.gpu.program import Slot

# Tokens of a window that a program processes at a time: windows are only a little longer than blocks.
_LARGEST_W = 32
# Keys that all queries see, of which a program with queries of its own processes so many at a time.
_WALK_M = 32


@dataclass(frozen=True)
class NearFarInputs(ProgramInputs):
    """Tensors and sizes that all stages share; keys and values are zeros where they are not real."""

    heavy: Slot  # (b, h, g) Positions of the heavy keys
    exists: Slot  # (b, h, g) Whether each of them exists, as bytes
    cluster: Slot  # (b, h, s) The cluster of each key as int32; m for heavy keys and keys that are not real
    first: Slot | None  # (b,) Position of the first real token as int32; None if it is always 0
    block: int  # Queries of a block; 0 if no tokens are near
    reach: int  # Tokens on either side of its block that a query sees
    strip: Slot | None = None  # (h, 2 w + 1) The bias of keys w tokens or more before a query, ..., after it; or None

    def tiles(self) -> Tiles:
        """Blocks of the kernels; float32 operands, split into tf32 parts, take as many registers as a wider dtype."""
        wide = torch.float64 if self.q.dtype == torch.float32 else self.low
        return tiles(self.m, self.q.shape[-1], self.v.shape[-1], wide, self.device)

    @property
    def size(self) -> int:
        """Queries of a block: they see the same keys, and are processed together."""
        return self.block or self.tiles().block_n

    @property
    def blocks(self) -> int:
        """Number of blocks of queries in a sequence."""
        return -(-self.q.shape[2] // self.size)

    @property
    def parts(self) -> int:
        """Number of tiles of queries in a block."""
        return -(-self.size // self.block_n)

    @cached_property
    def sizes(self) -> NearFarSizes:
        """Numbers that kernels are given."""
        (b, h, n, _), s, g = self.q.shape, self.k.shape[2], self.heavy.shape[2]
        furthest = 0 if self.strip is None else self.strip.shape[1] // 2
        return NearFarSizes(h, b * h, n, s, g, self.m, self.size, self.reach, self.blocks, furthest)

    def constants(self, *, walk: bool = False, near: bool = True) -> Constants:
        """The constants that kernels are compiled for; with `walk`, if a program has queries of its own."""
        blocks = self.tiles()
        return self._constants(
            BLOCK_N=self.block_n,
            BLOCK_W=min(blocks.block_n, _LARGEST_W, power(self.block + 2 * self.reach)),
            BLOCK_M=min(blocks.block_m, _WALK_M) if walk else blocks.block_m,
            NEAR=near and self.block > 0,
        )

    @property
    def block_n(self) -> int:
        """Tokens of a tile."""
        return min(self.tiles().block_n, power(self.block or self.tiles().block_n))

    def options(self, *, walk: bool = False) -> dict[str, int]:
        """Warps and stages; with `walk`, where a program has queries of its own."""
        blocks = self.tiles()
        return {"num_warps": blocks.warps, "num_stages": blocks.walk_stages if walk else min(blocks.stages, 2)}
