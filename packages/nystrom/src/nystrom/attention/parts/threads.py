"""Whole heads or stretches on threads of their own, each of which runs torch's operators alone, on a CPU.

An operator that torch spreads over threads ends where the last of them does. A chain of a thousand small ones waits as
often, and beside other work on the same cores each wait lasts until the scheduler comes back to a thread. Here a thread
takes a whole chain, so that a call waits once.
"""

import os
import queue
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from nystrom.attention.parts.stretches import Piece, pieces, runs_in_stretches
from nystrom.autograd_modes import is_transformed

# Numbers in a tensor from which the threads gain more than handing over the work costs.
_WORTH = 2**17
_jobs: "queue.SimpleQueue[Callable[[], None]]" = queue.SimpleQueue()
_lock = threading.Lock()
_started = 0
P = TypeVar("P")
R = TypeVar("R")


def num_parts(*inputs: Tensor) -> int:
    """Into how many parts to cut the work on tensors for `in_threads`: one for each of torch's threads, or one in all.

    It is one for small tensors, where something that belongs to the calling thread watches its operators, and where the
    number of threads cannot be set for a thread.
    """
    # First what a compiler traces.
    if not runs_in_stretches(*inputs) or any(type(x) not in (Tensor, nn.Parameter) for x in inputs):
        return 1
    if is_transformed() or torch._C._len_torch_dispatch_stack() or not torch.backends.openmp.is_available():
        return 1
    return torch.get_num_threads() if max(x.numel() for x in inputs) >= _WORTH else 1


def cut(total: int, parts: int) -> list[slice]:
    """Cut a range into at most so many near-equal slices, at least one."""
    parts = max(1, min(total, parts))
    return [slice(total * i // parts, total * (i + 1) // parts) for i in range(parts)]


def groups_of_pieces(x: Tensor, numbers: int, *more: Tensor) -> list[list[Piece]]:
    """`pieces` of tokens (b, h, n, d) as a list for each thread, at least one; what is summed in each differs.

    Args:
        x: Tokens.
        numbers: How many numbers a piece needs per token, over all heads.
        *more: Other tensors that the work is on.
    """
    count = num_parts(x, *more)
    all_pieces = list(pieces(x.shape[0], x.shape[2], numbers, count))
    return [all_pieces[some] for some in cut(len(all_pieces), count)]


def in_threads(work: Callable[[P], R], parts: Sequence[P]) -> list[R]:
    """`[work(part) for part in parts]`, without gradients; several parts are computed at once.

    A result does not depend on which thread computes it, nor on when.
    """
    count = min(len(parts), torch.get_num_threads())
    if count < 2:
        with torch.no_grad():
            return [work(part) for part in parts]
    results: dict[int, R] = {}
    errors: list[BaseException] = []
    left, done = iter(list(enumerate(parts))), threading.Semaphore(0)
    inference = torch.is_inference_mode_enabled()

    def job() -> None:
        try:
            with torch.inference_mode(inference), torch.no_grad():
                for number, part in left:
                    results[number] = work(part)
        except BaseException as error:  # noqa: BLE001 # raised again by the caller
            errors.append(error)
        finally:
            done.release()

    _start(count)
    for _ in range(count):
        _jobs.put(job)
    try:
        for _ in range(count):
            done.acquire()
    finally:
        # None, unless the wait was interrupted.
        for _ in left:
            pass
    if errors:
        raise errors[0]
    return [results[number] for number in range(len(parts))]


def _start(count: int) -> None:
    """Start threads until there are `count`; they wait for jobs, and end with the process."""
    global _started
    with _lock:
        for _ in range(_started, count):
            ready = threading.Event()
            threading.Thread(target=_run, args=(_jobs, ready), daemon=True, name="nystrom").start()
            ready.wait()
        _started = max(_started, count)


def _run(jobs: "queue.SimpleQueue[Callable[[], None]]", ready: threading.Event) -> None:
    # The first call in a thread takes the number of the process; the second sets both its own and that of the process,
    # which another thread then puts back.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    back = threading.Thread(target=torch.set_num_threads, args=(threads,))
    back.start()
    back.join()
    ready.set()
    while True:
        jobs.get()()


def _forget() -> None:
    """A forked process has none of the threads."""
    global _jobs, _lock, _started
    _jobs, _lock, _started = queue.SimpleQueue(), threading.Lock(), 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
