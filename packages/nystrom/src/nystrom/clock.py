"""Time of one call.

On a CPU it is wall-clock time around the call. On a CUDA device, it is measured by the device's own clock, from
the moment it could start the call until all of the call is done. Before that, the device clears its caches by writing
more than they hold, so inputs come from memory. Meanwhile the CPU starts to launch, as it does in a model that keeps
the device busy. If the CPU launches more slowly than the device works, the wait is part of the time. A first call may
compile: make one before measuring.
"""

import time
from collections.abc import Callable

import torch

# Bytes written between calls, as a multiple of the last-level cache.
_TIMES_CACHE = 4


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Time of one call, whose result is dropped after the clock has stopped."""
    if device.type == "cuda":
        return _device_seconds(call, device)
    start = time.perf_counter()
    result = call()
    end = time.perf_counter()
    del result
    return end - start


def _device_seconds(call: Callable[[], object], device: torch.device) -> float:
    with torch.cuda.device(device):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        caches = torch.cuda.get_device_properties(device).L2_cache_size
        torch.cuda.synchronize(device)
        torch.empty(_TIMES_CACHE * caches, dtype=torch.uint8, device=device).zero_()
        begin.record()
        result = call()
        end.record()
        torch.cuda.synchronize(device)
    del result
    return begin.elapsed_time(end) / 1e3
