"""Time the Triton kernels with every combination of tile sizes, at one shape on one GPU: `python tools/tune_tiles.py`.

All kernels of a pass get the same tiles, and are timed together and each for itself; combinations that do not compile
or do not fit are listed with the reason. Nothing is changed automatically: write the fastest combination into
`nystrom.gpu.launch`.

Tiles are chosen this way, and not by `triton.autotune` when a kernel is first launched, because they determine the
order of sums: a choice by timing could differ from one process to the next, and results with it.
"""

import importlib
import itertools
import pkgutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch.profiler import ProfilerActivity, profile

try:
    from triton import KernelInterface
    from triton.errors import TritonError
    from triton.testing import do_bench
except ModuleNotFoundError:
    sys.exit("tune_tiles.py times Triton's kernels, and triton is not installed: pip install 'nystrom[gpu]'.")

import nystrom.gpu
from nystrom.attention.functions import FUNCTIONS
from nystrom.attention.method_names import size_options
from nystrom.gpu.launch import Tiles, trying
from nystrom_lab.measure.rows import Row, check_rows, write_rows

# Tokens and landmarks of a block, warps, and loads in flight at a time: few, since the compiler takes seconds for each.
COMBINATIONS = [
    Tiles(n, m, 16, 16, warps, stages, stages)
    for n, m, warps, stages in itertools.product((128, 64), (64, 32), (4, 8), (2, 1))
]


@dataclass(frozen=True)
class Timing:
    """The times of one combination.

    Attributes:
        tiles: The combination; its widths are replaced by those of the inputs.
        forward: Median time of a forward pass in ms, infinite where it failed.
        both: The same of a forward and a backward pass.
        reason: Why it failed, or "".
        kernels: Time of each kernel in a forward and a backward pass, in us; a kernel that is launched more than once
            has the sum.
    """

    tiles: Tiles
    forward: float
    both: float
    reason: str = ""
    kernels: Mapping[str, float] = field(default_factory=dict)

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes that were tried, by name."""
        return {name: getattr(self.tiles, name) for name in ("block_n", "block_m", "warps", "stages")}

    def __str__(self) -> str:
        sizes = " ".join(f"{name}={size}" for name, size in self.sizes.items())
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
    attend = FUNCTIONS[method]

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return attend(q, k, v, **options)

    def both() -> None:
        torch.autograd.grad(attend(q, k, v, **options), leaves, grad)

    # Errors that no combination can avoid are raised here.
    forward()
    return time_combinations(COMBINATIONS, forward, both, clock=_median, profiled=kernel_times)


def time_combinations(
    combinations: Sequence[Tiles],
    forward: Callable[[], object],
    both: Callable[[], object],
    clock: Callable[[Callable[[], object]], float],
    profiled: Callable[[Callable[[], object]], Mapping[str, float]] = lambda call: {},
) -> list[Timing]:
    """Time both passes with each combination, and print each when it is done.

    Args:
        combinations: The combinations to try.
        forward: Runs a forward pass.
        both: Runs a forward and a backward pass.
        clock: Measures the time of a call in ms.
        profiled: Measures the time of each kernel of a call in us.
    """
    timings = []
    for place, tiles in enumerate(combinations, 1):
        with trying(tiles):
            try:
                timing = Timing(tiles, clock(forward), clock(both), kernels=profiled(both))
            except (RuntimeError, TritonError) as error:
                # Too much shared memory, for example.
                reason = str(error).partition("\n")[0] or type(error).__name__
                timing = Timing(tiles, float("inf"), float("inf"), reason)
        timings.append(timing)
        print(f"{place} of {len(combinations)}: {timing}", file=sys.stderr)
    return timings


def kernel_times(call: Callable[[], object], times: int = 4) -> dict[str, float]:
    """The mean time in us that each kernel of `nystrom.gpu` takes in a call, on the device's own clock.

    Args:
        call: The call; it was made before, so that nothing is compiled.
        times: Calls.
    """
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        for _ in range(times):
            call()
        torch.cuda.synchronize()
    ours = kernel_names()
    return {each.key: each.device_time_total / times for each in profiler.key_averages() if each.key in ours}


def kernel_names() -> set[str]:
    """The names of all functions of `nystrom.gpu` that Triton compiles."""
    modules = [
        importlib.import_module(each.name) for each in pkgutil.walk_packages(nystrom.gpu.__path__, "nystrom.gpu.")
    ]
    found = (each for module in modules for each in vars(module).values() if isinstance(each, KernelInterface))
    return {each.__name__ for each in found}  # pyright: ignore[reportAttributeAccessIssue]


def fastest_lines(timings: Sequence[Timing], best: int = 3) -> list[str]:
    """The fastest combination of each pass, and the fastest few of each kernel.

    Args:
        timings: Times of all combinations.
        best: Combinations of a kernel.
    """
    lines = [f"fastest {name}: {min(timings, key=time)}" for name, time in (
        ("forward", lambda timing: timing.forward), ("forward+backward", lambda timing: timing.both)
    )]  # fmt: skip
    for kernel in dict.fromkeys(name for timing in timings for name in timing.kernels):
        having = sorted((each for each in timings if kernel in each.kernels), key=lambda each: each.kernels[kernel])
        of = (f"{each.kernels[kernel]:.1f} us with {tuple(each.sizes.values())}" for each in having[:best])
        lines.append(f"{kernel}: {', '.join(of)}, slowest {having[-1].kernels[kernel]:.1f}")
    return lines


def print_fastest(*, to: Path, **asked: Any) -> None:
    """Tune, print the fastest combinations, and write a row for each kernel and combination.

    Args:
        to: Folder of tiles.csv.
        asked: Arguments of `tune_tiles`.
    """
    check_rows(to / "tiles.csv")
    timings = tune_tiles(**asked)
    print("Sizes are (block_n, block_m, warps, stages).", *fastest_lines(timings), sep="\n", flush=True)
    rows = [
        Row(
            study="tiles", quantity="kernel time", method=kernel, value=time, unit="us",
            device=torch.cuda.get_device_name(), dtype=asked.get("dtype", "bfloat16"), n=asked.get("tokens", 16384),
            m=asked.get("landmarks", 64), facts={"of": asked.get("method", "nystrom"), **timing.sizes},
        )
        for timing in timings for kernel, time in timing.kernels.items()
    ]  # fmt: skip
    write_rows(to / "tiles.csv", rows)


def _median(call: Callable[[], object]) -> float:
    time = do_bench(call, return_mode="median")
    assert isinstance(time, float)
    return time


def main() -> None:
    """Print the fastest combinations of each pass and each kernel."""
    import tyro

    try:
        timings = tyro.cli(tune_tiles)
    except ValueError as error:
        sys.exit(f"tune_tiles.py: {error}")
    print("Sizes are (block_n, block_m, warps, stages).", *fastest_lines(timings), sep="\n")


if __name__ == "__main__":
    main()
