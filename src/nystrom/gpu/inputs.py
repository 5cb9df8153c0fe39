"""What all stages share: tensors, sizes, and the constants that kernels are specialised to."""

from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from nystrom.gpu.launch import FLOAT32_PRECISION, Tiles, power, tiles
from nystrom.gpu.plan import LandmarkPlan
from nystrom.precision import accumulator

_TRITON = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


@dataclass(frozen=True)
class StageInputs:
    """What all stages share.

    Attributes:
        q: Queries.
        k: Keys.
        v: Values.
        conv: (h, taps) Kernel of the skip, or None.
        keep: (b, s) Real keys as bytes, or None.
        query_keep: (b, n) Real queries as bytes, or None.
        plan: Where landmarks come from; None means equal segments of all tokens.
        masked: Whether sequences may be short, or hold padding tokens.
        m: Number of landmarks that queries, or keys, are compared with.
        scale: Factor on the scores.
        gaussian: Whether the Gaussian kernel replaces softmax.
        centre: (b, h, d) Subtracted from all tokens before distances are computed, or None. This changes no distance,
            and saves digits if all tokens are far from 0. It is already subtracted from the table of landmarks.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    conv: Tensor | None
    keep: Tensor | None
    query_keep: Tensor | None
    plan: LandmarkPlan | None
    masked: bool
    m: int
    scale: float
    gaussian: bool
    centre: Tensor | None = None

    @property
    def rows(self) -> int:
        """Total number of landmarks."""
        return self.m if self.gaussian else 2 * self.m

    @property
    def acc(self) -> torch.dtype:
        """Dtype of sums."""
        return accumulator(self.q.dtype)

    @property
    def small(self) -> dict[str, Any]:
        """Dtype and device of small tensors."""
        return {"dtype": self.acc, "device": self.q.device}

    @property
    def few(self) -> Tensor | None:
        """See `LandmarkPlan.few`."""
        return self.plan.few if self.plan is not None and self.masked else None

    @property
    def low(self) -> torch.dtype:
        """Dtype of weights in products: that of the tokens, unless float16 or 8 bits of fraction cannot hold them."""
        widened = self.q.dtype == torch.float16 or (self.gaussian and self.q.dtype == torch.bfloat16)
        return torch.float32 if widened else self.q.dtype

    def tiles(self) -> Tiles:
        """Blocks of the kernels over tokens."""
        return tiles(self.m, self.q.shape[-1], self.v.shape[-1], self.low, self.q.device)

    def options(self, *, walk: bool = False) -> dict[str, Any]:
        """The constants that all kernels over tokens are specialised to; with `walk`, where each token has a result."""
        blocks = self.tiles()
        return {
            "D": self.q.shape[-1],
            "E": self.v.shape[-1],
            "SCALE": self.scale,
            "ACC": triton_dtype(self.acc),
            "LOW": triton_dtype(self.low),
            "PRECISION": FLOAT32_PRECISION,
            "LOW_PRECISION": FLOAT32_PRECISION if self.low == self.q.dtype else "tf32",
            "BLOCK_N": blocks.block_n,
            "BLOCK_M": blocks.block_m,
            "BLOCK_D": blocks.block_d,
            "BLOCK_E": blocks.block_e,
            "num_warps": blocks.warps,
            "num_stages": blocks.walk_stages if walk else blocks.stages,
        }

    def skip_options(self) -> dict[str, int]:
        """The size of the skip's kernel, 0 without one, and the tokens of a block beyond a tile that it reaches."""
        taps = 0 if self.conv is None else self.conv.shape[1]
        return {"TAPS": taps, "BLOCK_T": min(self.tiles().block_n, power(max(taps - 1, 1)))}


def empty_like(x: Tensor, width: int | None = None) -> Tensor:
    """An uninitialised tensor with the layout of x, token by token or head by head."""
    b, h, n, d = x.shape
    width = d if width is None else width
    if h > 1 and x.stride(1) < x.stride(2):
        return x.new_empty(b, n, h, width).transpose(1, 2)
    return x.new_empty(b, h, n, width)


def triton_dtype(dtype: torch.dtype) -> Any:
    """Triton's counterpart of a dtype."""
    return _TRITON[dtype]
