"""Draws in chunks: chunk i from the i-th child of a seed, whichever thread or process draws it, and in their order."""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Executor, Future
from typing import TypeVar

import numpy as np

Chunk = TypeVar("Chunk")


def child_generator(seed: int, number: int) -> np.random.Generator:
    """The generator of the number-th child of SeedSequence(seed).spawn, no matter what was drawn before it."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(number,))))


def in_order(
    pool: Executor, draw: Callable[[int], Chunk], numbers: Iterable[int], *, ahead: int
) -> Generator[Chunk, None, None]:
    """Yield the chunks in the order of their numbers, some of them drawn ahead; the pool ends with the generator."""
    waiting: deque[Future[Chunk]] = deque()
    try:
        for number in numbers:
            waiting.append(pool.submit(draw, number))
            if len(waiting) > ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
