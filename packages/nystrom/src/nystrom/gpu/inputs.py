"""Inputs that all stages share: tensors, sizes, and the constants that kernels are specialised to."""

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch
import triton.language as tl

from nystrom.gpu import middle_blocks as block_kernels
from nystrom.gpu.arguments import Constants, LandmarkSizes
from nystrom.gpu.landmark_plan import LandmarkPlan
from nystrom.gpu.launch import FLOAT32_PRECISION, Tiles, power, tiles
from nystrom.gpu.program import Program, Slot
from nystrom.precision import accumulator

# Numbers that a program adds up.
_ADDED = 512
_TRITON = {torch.float64: tl.float64, torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True)
class ProgramInputs:
    """The program that launches are added to, and the tokens."""

    program: Program
    q: Slot
    k: Slot
    v: Slot
    m: int  # Clusters, or landmarks that queries, or keys, are compared with
    scale: float  # Factor on the scores

    @property
    def acc(self) -> torch.dtype:
        """Dtype of sums."""
        return accumulator(self.q.dtype)

    @property
    def device(self) -> torch.device:
        """The device of the kernels."""
        return self.program.device

    def scratch(self, *shape: int) -> Slot:
        """A small tensor in the workspace."""
        return self.program.scratch(shape, self.acc)

    @property
    def low(self) -> torch.dtype:
        """Dtype of weights in products: that of the tokens, unless it is float16, which cannot hold small weights."""
        return torch.float32 if self.q.dtype == torch.float16 else self.q.dtype

    def tiles(self) -> Tiles:
        """Blocks of the kernels over tokens."""
        return tiles(self.m, self.q.shape[-1], self.v.shape[-1], self.low, self.device)

    def _constants(self, **changes: Any) -> Constants:
        blocks, dtypes = self.tiles(), {"ACC": triton_dtype(self.acc), "LOW": triton_dtype(self.low)}
        widths = {"D": self.q.shape[-1], "E": self.v.shape[-1], "BLOCK_D": blocks.block_d, "BLOCK_E": blocks.block_e}
        low_precision = FLOAT32_PRECISION if self.low == self.q.dtype else "tf32"
        how = {"SCALE": self.scale, "PRECISION": FLOAT32_PRECISION, "LOW_PRECISION": low_precision}
        return Constants(**{**widths, **dtypes, **how, "BLOCK_N": blocks.block_n, "BLOCK_M": blocks.block_m, **changes})


@dataclass(frozen=True)
class StageInputs(ProgramInputs):
    """Tensors, plan and sizes, which all stages share."""

    conv: Slot | None  # (h, taps) Kernel of the skip, or None
    keep: Slot | None  # (b, s) Real keys as bytes, or None
    query_keep: Slot | None  # (b, n) Real queries as bytes, or None
    plan: LandmarkPlan | None  # The source of landmarks; None means equal segments of all tokens
    masked: bool  # Whether sequences may be short, or hold padding tokens
    gaussian: bool  # Whether the Gaussian kernel replaces softmax
    # (b, h, d) Subtracted from all tokens before distances are computed, or None. This changes no distance, and saves
    # digits if all tokens are far from 0. It is already subtracted from the table of landmarks.
    centre: Slot | None = None

    @property
    def rows(self) -> int:
        """Total number of landmarks."""
        return self.m if self.gaussian else 2 * self.m

    def summed(self, parts: Slot) -> Slot:
        """The sum over the first dimension."""
        if parts.shape[0] == 1:
            return parts._replace(shape=parts.shape[1:], strides=parts.strides[1:])
        total = self.program.scratch(parts.shape[1:], parts.dtype)
        add_up(self.program, parts, total)
        return total

    @property
    def few(self) -> Slot | None:
        """See `LandmarkPlan.few`."""
        return self.plan.few if self.plan is not None and self.masked else None

    @property
    def low(self) -> torch.dtype:
        """Dtype of weights in products; 8 bits of fraction cannot hold weights of the Gaussian kernel."""
        return torch.float32 if self.gaussian and self.q.dtype == torch.bfloat16 else super().low

    @cached_property
    def sizes(self) -> LandmarkSizes:
        """Numbers that kernels are given."""
        b, h, n, _ = self.q.shape
        return LandmarkSizes(h, b * h, n, self.k.shape[2], self.m, self.rows)

    def constants(self, **changes: Any) -> Constants:
        """The constants that kernels are compiled for, with these changes."""
        return self._constants(**{"GAUSSIAN": self.gaussian, **changes})

    def walked(self, *, skip: bool = False) -> dict[str, Any]:
        """Constants of kernels in which a program walks over tokens, with those of the `skip` if they apply it."""
        blocks = self.tiles()
        taps = self.conv.shape[1] if skip and self.conv is not None else 0
        reached = min(blocks.block_n, power(max(taps - 1, 1)))
        return {"WHOLE": self.m <= blocks.block_m, "TAPS": taps, "BLOCK_T": reached}


def add_up(program: Program, parts: Slot, total: Slot) -> None:
    """Add a sum over the first dimension to a program."""
    size = prod(total.shape)
    program.launch(block_kernels.add_up, -(-size // _ADDED), parts, total, parts.shape[0], size, BLOCK=_ADDED)


def plain(*, ACC: torch.dtype, **few: Any) -> Constants:
    """The constants of a kernel that needs few of them: the others must not compile it again."""
    others = dict.fromkeys(("D", "E", "BLOCK_N", "BLOCK_M", "BLOCK_D", "BLOCK_E"), 16)
    acc, precision = triton_dtype(ACC), FLOAT32_PRECISION
    return Constants(
        **{**others, "SCALE": 1.0, "LOW": acc, "PRECISION": precision, "LOW_PRECISION": precision, **few}, ACC=acc
    )


def triton_dtype(dtype: torch.dtype) -> Any:
    """Triton's counterpart of a dtype."""
    return _TRITON[dtype]
