"""Which texts are held out: those with the lowest hashes of the text and a seed.

The order of the rows plays no part, equal texts stay together, and more texts move few others to another split.
"""

import hashlib
from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

SHARE = 0.1


def check_share(name: str, share: float) -> None:
    """Raise if a number is not a share of some texts that leaves others."""
    if not 0 < share < 1:
        raise ValueError(f"{name} is {share}; expected a share between 0 and 1.")


def check_any_seed(seed: int) -> None:
    """Raise if a number is no seed of the hashes that hold texts out."""
    if not 0 <= seed < 2**63:
        raise ValueError(f"--seed is {seed}; expected a whole number from 0 to {2**63 - 1}.")


def digest_of(text: bytes, seed: int) -> bytes:
    """The digest of a text."""
    return hashlib.blake2b(text, digest_size=16, key=str(seed).encode()).digest()


def hash_of(digests: Iterable[bytes]) -> int:
    """The hash of a row: a number from the digests of its texts."""
    return int.from_bytes(hashlib.blake2b(b"".join(digests), digest_size=8).digest(), "little")


def hold_out(hashes: NDArray[np.uint64], shares: Mapping[str, float]) -> dict[str, NDArray[np.int64]]:
    """The rows that are held out for each share, in turn, and the rest as "train"; each in ascending order.

    Args:
        hashes: The hash of each row.
        shares: The share of all rows for each split; each gets one row at least, and all of equal hash.

    Raises:
        ValueError: There are too few rows.
    """
    order = np.argsort(hashes, kind="stable")
    ranked, parts = hashes[order], {}
    start, end = 0, 0.0
    for number, (split, share) in enumerate(shares.items(), start=1):
        end += share * order.size
        # One row at least is left for each split after this one, and for "train".
        most = order.size - (len(shares) + 1 - number)
        stop = min(max(round(end), start + 1), max(most, start))
        while 0 < stop < order.size and ranked[stop] == ranked[stop - 1]:
            stop += 1
        parts[split] = np.sort(order[start:stop])
        start = stop
    parts["train"] = np.sort(order[start:])
    if not all(part.size for part in parts.values()):
        different = np.unique(hashes).size
        kinds = "" if different == order.size else f", {different} of them different (equal ones stay together)"
        raise ValueError(f"{order.size} texts{kinds}: too few to draw {' and '.join(shares)} from them.")
    return parts
