"""Work on a CPU in stretches of tokens that fit into its cache, and whole heads or stretches on threads of their own.

An operator that torch spreads over threads ends where the last of them does. A chain of a thousand small ones waits as
often, and beside other work on the same cores each wait lasts until the scheduler comes back to a thread. Here a thread
takes a whole chain, each of whose operators runs on it alone, so that a call waits once.
"""

import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from nystrom.native import is_plain

# Numbers in a stretch, over all heads: 2 MB of float32, about the L2 cache of a core.
_NUMBERS = 2**19
_SHORTEST = 32
# Numbers in a tensor from which these threads gain more than they lose to torch's own, which spin for a while.
_WORTH = 2**21
_jobs: "queue.SimpleQueue[Callable[[], None]]" = queue.SimpleQueue()
_lock = threading.Lock()
_started = 0

Piece = tuple[slice, slice, slice]
P = TypeVar("P")
R = TypeVar("R")


def pieces(batch: int, tokens: int, numbers: int, least: int = 1) -> Iterator[Piece]:
    """Cut (batch, heads, tokens, ...) into indices of pieces that fit into the cache.

    Several short sequences form a piece; a long one is cut into stretches of a multiple of 32 tokens. A piece needs
    `numbers` numbers per token, over all heads. There are about `least` pieces or more, of at least 32 tokens.
    """
    length = max(1, min(_NUMBERS // max(1, numbers), -(-batch * tokens // least)) // _SHORTEST) * _SHORTEST
    group = max(1, length // max(1, tokens))
    for first in range(0, batch, group):
        for start in range(0, tokens, length):
            yield slice(first, first + group), slice(None), slice(start, min(tokens, start + length))


def num_parts(*inputs: Tensor) -> int:
    """Into how many parts to cut the work on tensors for `in_threads`: one for each of torch's threads, or one in all.

    It is one for small tensors, where they are not plain (what watches operators belongs to the calling thread), and
    where the number of threads cannot be set for a thread.
    """
    if not is_plain(*inputs) or max(x.numel() for x in inputs) < _WORTH or not torch.backends.openmp.is_available():
        return 1
    return torch.get_num_threads()


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
