"""The instances of a run: all of the training documents, and a fixed set of the held-out ones."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nystrom.checks import check_at_least
from nystrom_lab.data.language.mlm_sop.dataset import MlmSop
from nystrom_lab.data.store.prepared_folder import verify
from nystrom_lab.training.batches import TrainingOrder


class InstanceOrder(TrainingOrder):
    """The instances of a whole run, one batch after another; each pass draws new ones.

    Instance i of pass e has the number e * len(data) + i.
    """

    def __init__(self, data: MlmSop, *, batch_size: int, steps: int, seed: int):
        super().__init__(data.lengths(), batch_size=batch_size, steps=steps, seed=seed)
        self.data = data

    def _one_pass(self, number: int) -> NDArray[np.int64]:
        self.lengths = self.data.lengths(number)
        return super()._one_pass(number) + number * len(self.data)


class HeldOutInstances:
    """A fixed set of held-out instances: the same for all runs on the data, regardless of their seed.

    Args:
        instances: How many; all of an epoch if there are fewer.
    """

    def __init__(self, data: MlmSop, instances: int):
        check_at_least("instances", instances, 1)
        self.data = data
        self.numbers = np.sort(np.random.default_rng(0).permutation(len(data))[:instances])
        self.lengths = data.lengths()[self.numbers]

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        return self.data.__getitems__(self.numbers[indices].tolist())


def open_instances(
    folder: Path, *, length: int, seed: int, instances: int, batch_size: int
) -> tuple[MlmSop, HeldOutInstances]:
    """Open prepared documents for a run.

    Raises:
        ValueError: The folder holds no prepared documents, modified ones, or too few for a batch.
    """
    verify(folder, task=MlmSop.task)
    train = MlmSop(folder, "train", length=length, seed=seed)
    if len(train) < batch_size:
        raise ValueError(
            f"batch_size is {batch_size} but the documents of data {folder} make {len(train)} instances of {length} "
            "tokens: use a smaller batch, shorter instances or more texts."
        )
    return train, HeldOutInstances(MlmSop(folder, "val", length=length), instances)
