"""Peak memory of one call.

It is the largest amount that was allocated at any moment of the call, minus what was allocated when it
began. It includes everything that the call allocates: temporaries, what is saved for the backward pass, the output and
the gradients. The inputs, which existed before, are not included. It counts the requests to torch's allocator:

- CUDA: `max_memory_allocated` after a reset, minus `memory_allocated` before.
- CPU: the maximum of the running sum of the allocator's "[memory]" events in `torch.profiler` (`profile_memory=True`).
  Scratch space that a library (oneDNN, MKL) takes from the system directly is not among these events and is not
  counted. If the call frees memory that was allocated before, this is not subtracted. The call runs on one thread: the
  profiler does not see what other threads of Python allocate.

The profiler slows a call down, so memory is measured in a separate call, never in a timed one.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.profiler import ProfilerActivity, profile


def peak_bytes(call: Callable[[], object], device: torch.device) -> int:
    """Peak memory allocated during one call, beyond what was allocated before.

    Args:
        call: Function to measure; its result is kept until the end, so that the output counts.
        device: Device that it runs on, CPU or CUDA.
    """
    if device.type == "cuda":
        _finish(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = call()
        _finish(device)
        del result
        return torch.cuda.max_memory_allocated(device) - before
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with _quiet(), profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
            result = call()
    finally:
        torch.set_num_threads(threads)
    del result
    # The public lists of events omit allocations inside operators; the raw events include each, with its size and time.
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    total = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        total += event.nbytes()  # pyright: ignore[reportAttributeAccessIssue] (missing in torch's stub)
        peak = max(peak, total)
    return peak


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the profiler from writing a line to the terminal at each start and stop.

    It reads its log level from this environment variable on first use; there is no other way to set it.
    """
    before = os.environ.get("KINETO_LOG_LEVEL")
    os.environ["KINETO_LOG_LEVEL"] = "9" if before is None else before
    try:
        yield
    finally:
        if before is None:
            del os.environ["KINETO_LOG_LEVEL"]
