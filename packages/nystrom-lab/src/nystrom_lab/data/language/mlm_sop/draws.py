r"""Random numbers that are functions of a key and a place, for whole arrays at once.

SplitMix64: the numbers of a key s are $\mathrm{mix}(s + \gamma), \mathrm{mix}(s + 2 \gamma), \dots$, with the odd
constant $\gamma$ and a bijection mix of 64 bits. A key is made of whole numbers, such as seed, epoch and instance, by
mixing one after the other. So what is drawn depends neither on the order of the draws nor on the process, nor on the
version of a library; numpy's generators would need an object for each key.

Source: Steele, Lea and Flood (2014), Fast splittable pseudorandom number generators, OOPSLA.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

GAMMA = np.uint64(0x9E3779B97F4A7C15)

Keys = NDArray[np.uint64]


def keys(*numbers: int | NDArray[np.int64]) -> Keys:
    """Make keys of whole numbers, at least one of which is an array."""
    key = np.zeros(1, dtype=np.uint64)
    for number in numbers:
        key = _mix(key ^ (np.atleast_1d(np.asarray(number)).astype(np.uint64) * GAMMA + GAMMA))
    return key


def bits(key: Keys, place: int | NDArray[np.int64]) -> NDArray[np.uint64]:
    """Draw 64 bits for each key at a place, or for one key at each of many places."""
    return _mix(key + GAMMA * (np.atleast_1d(np.asarray(place)).astype(np.uint64) + np.uint64(1)))


def uniform(key: Keys, place: int | NDArray[np.int64]) -> NDArray[np.float64]:
    """Draw numbers from 0, inclusive, to 1, exclusive."""
    return (bits(key, place) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def below(key: Keys, place: int | NDArray[np.int64], limit: Any) -> NDArray[np.int64]:
    """Draw whole numbers from 0, inclusive, to a limit, exclusive, which is at least 1 and may be an array."""
    return (uniform(key, place) * limit).astype(np.int64)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
