"""The memory floor: the time that it takes to move the bytes that landmark attention must move.

The forward pass moves n x d numbers six times: queries and keys are read twice, since a landmark is known only after
all of its tokens have been read; values are read once and the output is written once.

The backward pass moves them eleven times: queries, keys, values and the gradient of the output are read twice, as the
gradients of a token depend on those of the landmarks, which are sums over all tokens; three gradients are written.
Forward+backward is the sum, 17. Masks, landmarks, the skip's second reading of values and gradients, and everything
small compared with n x d are left out. If landmarks are drawn tokens, as in Skyformer, nothing is read twice: four
times forward, seven backward.

The bandwidth is measured by a copy from device memory to device memory: the bytes read and written, divided by the
median time. A method that is bound by memory cannot be faster than the floor, except for what it finds in caches.
"""

from collections.abc import Callable, Collection
from dataclasses import replace

import torch

from nystrom.clock import seconds
from nystrom.interleaved_timing import in_turns, quartiles
from nystrom_lab.measure.memory import free_bytes
from nystrom_lab.measure.rows import Row
from nystrom_papers.bench.inputs import Sizes

FLOOR = "floor"
# Forward and backward.
OF_MEANS, OF_DRAWN = (6, 11), (4, 7)
PASSES: dict[str, int] = {"forward": OF_MEANS[0], "forward+backward": sum(OF_MEANS)}
BANDWIDTH = "copy bandwidth"
_COPIES = 9


def copy_bandwidth(
    device: torch.device,
    size: int | None = None,
    clock: Callable[[Callable[[], object], torch.device], float] = seconds,
) -> tuple[float, float, float]:
    """Bytes per second that copies of `size` bytes read and write together: the median, and both quartiles."""
    size = copy_size(free_bytes(device)) if size is None else size
    source, target = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    # Zeros may move faster than other numbers.
    source.random_()
    times = in_turns({"copy": lambda: clock(lambda: target.copy_(source), device)}, _COPIES)["copy"]
    low, middle, high = (2 * size / time for time in reversed(quartiles(times)))
    return middle, low, high


def copy_size(free: int) -> int:
    """Bytes to copy when `free` bytes are free: many more than any cache holds, and at most an eighth of `free`."""
    return min(2**32, free // 8)


def floor_quantities(passes: Collection[str]) -> set[tuple[str, str]]:
    """Methods and quantities of the rows that `floor_rows` returns."""
    return {(FLOOR, BANDWIDTH), *((FLOOR, f"{name} time") for name in passes)}


def floor_rows(
    n: int,
    blank: Row,
    sizes: Sizes,
    passes: Collection[str],
    bandwidth: Callable[[torch.device], tuple[float, float, float]] = copy_bandwidth,
) -> list[Row]:
    """Measure the bandwidth, and the time of the floor of each pass at n tokens; `blank` is what all rows share."""
    like = replace(blank, method=FLOOR, n=n, repeats=_COPIES)
    middle, low, high = bandwidth(sizes.device)
    size = sizes.batch * sizes.heads * n * sizes.width * sizes.dtype.itemsize
    rows = [replace(like, quantity=BANDWIDTH, unit="GB/s", value=middle / 1e9, low=low / 1e9, high=high / 1e9)]
    for name in dict.fromkeys(passes):
        value, least, most = (1e3 * PASSES[name] * size / x for x in (middle, high, low))
        rows.append(replace(like, quantity=f"{name} time", unit="ms", value=value, low=least, high=most))
    return rows
