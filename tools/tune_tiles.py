"""Time the Triton kernels with every combination of tile sizes, at one shape on one GPU: `python tools/tune_tiles.py`.

All kernels of a pass get the same tiles; combinations that do not compile or do not fit are listed with the reason.
Nothing is changed automatically: write the fastest combination into `nystrom.gpu.launch`.

Tiles are chosen this way, and not by `triton.autotune` when a kernel is first launched, because they determine the
order of sums: a choice by timing could differ from one process to the next, and results with it.
"""

import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

try:
    from triton.errors import TritonError
    from triton.testing import do_bench
except ModuleNotFoundError:
    sys.exit("tune_tiles.py times Triton's kernels, and triton is not installed: pip install 'nystrom[gpu]'.")

from nystrom.attention.method_names import size_options
from nystrom.attention.registry import find_function
from nystrom.gpu.launch import Tiles, trying

# Tokens and landmarks of a block, warps, and loads in flight at a time: few, since the compiler takes seconds for each.
COMBINATIONS = [
    Tiles(n, m, 16, 16, warps, stages) for n, m, warps, stages in itertools.product((128, 64), (64, 32), (4, 8), (2, 1))
]


@dataclass(frozen=True)
class Timing:
    """The times of one combination.

    Attributes:
        tiles: The combination; its widths are replaced by those of the inputs.
        forward: Median time of a forward pass in ms, infinite where it failed.
        both: The same of a forward and a backward pass.
        reason: Why it failed, or "".
    """

    tiles: Tiles
    forward: float
    both: float
    reason: str = ""

    def __str__(self) -> str:
        tiles = self.tiles
        sizes = f"block_n={tiles.block_n} block_m={tiles.block_m} warps={tiles.warps} stages={tiles.stages}"
        return f"{sizes}: " + (self.reason or f"forward {self.forward:.4f} ms, forward+backward {self.both:.4f} ms")


def tune_tiles(
    *,
    method: Literal["nystrom", "skyformer", "near_far"] = "nystrom",
    landmarks: int = 64,
    tokens: int = 16384,
    width: int = 64,
    batch: int = 4,
    heads: int = 16,
    kernel_size: int = 0,
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16",
    device: str = "cuda",
    seed: int = 0,
) -> list[Timing]:
    """Time the Triton kernels with every combination of tile sizes, at one shape.

    Args:
        method: nystrom, skyformer or near_far, whose times include the choice of keys by torch.
        landmarks: Landmarks m; heavy keys and clusters of near_far.
        tokens: Tokens n.
        width: Width d of one head.
        batch: Sequences b.
        heads: Heads h.
        kernel_size: Odd size of the skip convolution of nystrom; 0 for none.
        dtype: Of the inputs.
        device: cuda or cuda:1.
        seed: Of the random inputs.

    Raises:
        ValueError: The kernels do not take these sizes or this device.
    """
    if kernel_size and (method != "nystrom" or kernel_size % 2 == 0):
        raise ValueError(f"kernel_size is {kernel_size}; expected an odd number, and 0 for skyformer and near_far.")
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {device!r}, but torch finds none here: run it on a machine with a GPU.")
    generator = torch.Generator().manual_seed(seed)
    options = size_options(method, landmarks) | {"backend": "triton"}
    # The layout of projections: the heads of a token are adjacent.
    q, k, v, grad = (
        torch.randn(batch, tokens, heads, width, generator=generator).to(device, getattr(torch, dtype)).transpose(1, 2)
        for _ in range(4)
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]
    if kernel_size:
        skip = torch.randn(heads, 1, kernel_size, 1, generator=generator).to(device, getattr(torch, dtype))
        leaves.append(skip.requires_grad_())
        options["skip"] = skip
    attend = find_function(method)

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return attend(q, k, v, **options)

    def both() -> None:
        torch.autograd.grad(attend(q, k, v, **options), leaves, grad)

    # Errors that no combination can avoid are raised here.
    forward()
    return time_combinations(COMBINATIONS, forward, both, clock=_median)


def time_combinations(
    combinations: Sequence[Tiles],
    forward: Callable[[], object],
    both: Callable[[], object],
    clock: Callable[[Callable[[], object]], float],
) -> list[Timing]:
    """Time both passes with each combination, and print each when it is done.

    Args:
        combinations: The combinations to try.
        forward: Runs a forward pass.
        both: Runs a forward and a backward pass.
        clock: Measures the time of a call in ms.
    """
    timings = []
    for place, tiles in enumerate(combinations, 1):
        with trying(tiles):
            try:
                timing = Timing(tiles, clock(forward), clock(both))
            except (RuntimeError, TritonError) as error:
                # Too much shared memory, for example.
                reason = str(error).partition("\n")[0] or type(error).__name__
                timing = Timing(tiles, float("inf"), float("inf"), reason)
        timings.append(timing)
        print(f"{place} of {len(combinations)}: {timing}", file=sys.stderr)
    return timings


def _median(call: Callable[[], object]) -> float:
    time = do_bench(call, return_mode="median")
    assert isinstance(time, float)
    return time


def main() -> None:
    """Print the fastest combination of each pass."""
    import tyro

    try:
        timings = tyro.cli(tune_tiles)
    except ValueError as error:
        sys.exit(f"tune_tiles.py: {error}")
    print(f"fastest forward: {min(timings, key=lambda timing: timing.forward)}")
    print(f"fastest forward+backward: {min(timings, key=lambda timing: timing.both)}")


if __name__ == "__main__":
    main()
