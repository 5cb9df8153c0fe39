"""Hold out validation and test texts from the training texts, for sources without their own.

A missing split takes a tenth of the training texts, or the given share. Samples are ranked by a hash of the
seed and their bytes; the first are test, the next val. The order of the file does not matter, and equal samples are in
the same split.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nystrom_lab.data.store.header import SPLITS

SHARE = 0.1


@dataclass(frozen=True)
class HeldOut:
    """How missing splits are created.

    Args:
        val_share: Share of the training texts to hold out for validation. Default: a tenth.
        test_share: Share of the training texts to hold out for the test. Default: a tenth.
        seed: Determines which.

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
                f"--val-share {self.val_share} and --test-share {self.test_share} leave nothing to train on: reduce "
                "them."
            )

    def shares(self, there: Collection[str]) -> dict[str, float]:
        """The share of the training texts for each missing split.

        Args:
            there: The splits that the source has.

        Raises:
            ValueError: It has no train, or a split for which a share was given.
        """
        if "train" not in there:
            raise ValueError(f"there are texts for {' and '.join(there)} but none for training: add some.")
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
        """The indices of the samples of each split, in ascending order.

        Args:
            splits: For each sample its split in the source, as an index into `SPLITS`.
            hashes: A random number for each sample, equal for equal samples.
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
