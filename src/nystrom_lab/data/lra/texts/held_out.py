"""Validation and test texts out of the training texts, for sources that have none of their own.

A missing split takes a tenth of the training texts, or the given share. Samples are ranked by a hash of the
seed and their bytes; the first are test, the next val. The order of a file plays no part, and equal samples are in one
split.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nystrom_lab.data.store.header import SPLITS

SHARE = 0.1


@dataclass(frozen=True)
class HeldOut:
    """How missing splits are made.

    Args:
        val_share: Share of the training texts that becomes val; a tenth if not given.
        test_share: Share of the training texts that becomes test; a tenth if not given.
        seed: Decides which.

    Raises:
        ValueError: A share or the seed is impossible.
    """

    val_share: float | None
    test_share: float | None
    seed: int

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"--seed is {self.seed}; expected a whole number from 0 to {2**63 - 1}.")
        for flag, share in (("--val-share", self.val_share), ("--test-share", self.test_share)):
            if share is not None and not 0 < share < 1:
                raise ValueError(f"{flag} is {share}; expected a number between 0 and 1, or none for a tenth.")
        if (self.val_share or 0.0) + (self.test_share or 0.0) >= 1:
            raise ValueError(
                f"--val-share {self.val_share} and --test-share {self.test_share} leave nothing to train on: take less."
            )

    def shares(self, there: Collection[str]) -> dict[str, float]:
        """Give the share of the training texts that each missing split takes.

        Args:
            there: The splits that the source has.

        Raises:
            ValueError: It has no train, or a split for which a share was given.
        """
        if "train" not in there:
            raise ValueError(f"there are texts for {' and '.join(there)} and none for training: add those.")
        shares = {}
        for split, share in (("test", self.test_share), ("val", self.val_share)):
            if split not in there:
                shares[split] = SHARE if share is None else share
            elif share is not None:
                raise ValueError(
                    f"--{split}-share is {share}, but the source has a {split} split of its own: leave it out."
                )
        return shares

    def draw(
        self, splits: NDArray[np.uint8], hashes: NDArray[np.uint64], there: Collection[str]
    ) -> Mapping[str, NDArray[np.int64]]:
        """Give the numbers of the samples of each split, in rising order.

        Args:
            splits: For each sample its split in the source, as a place in `SPLITS`.
            hashes: For each sample a number that is random, and equal where samples are.
            there: The splits that the source has.
        """
        splits = splits.copy()
        train = np.flatnonzero(splits == SPLITS.index("train"))
        ranked = train[np.argsort(hashes[train], kind="stable")]
        sorted_hashes = hashes[ranked]
        start, end = 0, 0.0
        for split, share in self.shares(there).items():
            end += share * ranked.size
            stop = max(round(end), start)
            # Equal samples stay together.
            while 0 < stop < ranked.size and sorted_hashes[stop] == sorted_hashes[stop - 1]:
                stop += 1
            splits[ranked[start:stop]] = SPLITS.index(split)
            start = stop
        return {split: np.flatnonzero(splits == place) for place, split in enumerate(SPLITS)}
