"""Training samples that are augmented anew in each pass over the data.

Sample i of pass e is drawn from (seed, e, i) alone: the same in one process or several, with any number of workers, and
after an interruption.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nystrom_lab.training.data.batches import TrainingOrder
from nystrom_lab.training.data.tasks import LabelledSplit

Vary = Callable[[Any, np.random.Generator], Any]


class PassOrder(TrainingOrder):
    """`TrainingOrder` with another number for a sample in each pass: i + e * (number of samples)."""

    def _one_pass(self, number: int) -> NDArray[np.int64]:
        return super()._one_pass(number) + number * len(self.lengths)


class AugmentedSplit:
    """Samples by the numbers of `PassOrder`.

    Args:
        split: The samples.
        vary: Function that returns a random variation of an input.
        seed: Seed.
    """

    def __init__(self, split: LabelledSplit, vary: Vary, *, seed: int):
        self.split, self.vary, self.seed = split, vary, seed

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, number: int) -> dict[str, Any]:
        number_of_pass, index = divmod(int(number), len(self.split))
        sample = self.split[index]
        rng = np.random.default_rng([self.seed, number_of_pass, index])
        return {**sample, "input_ids": self.vary(sample["input_ids"], rng)}

    def __getitems__(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        return [self[number] for number in numbers]
