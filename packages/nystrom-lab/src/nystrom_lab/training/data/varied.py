"""Training samples that are varied anew in each pass over the data: augmented, or masked.

Sample i of pass e is drawn from (seed, e, i) alone: the same in one process or several, with any number of workers, and
after an interruption.

Of n tokens max(1, round(share n)) are masked, all to be predicted. A masked token x is encoded as x + (size of the
vocabulary), so that batches of masked samples are made like any others.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Int
from numpy.typing import NDArray
from torch import Tensor

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


def masking(share: float, vocab_size: int, *, after: Vary | None = None) -> Vary:
    """A function that masks tokens of a sample, or of both its documents.

    Args:
        share: Share of the tokens to mask.
        vocab_size: Tokens of the vocabulary.
        after: Augmentation to apply first; None for none.
    """

    def mask(tokens: NDArray[np.unsignedinteger], rng: np.random.Generator) -> NDArray[np.int64]:
        count = min(max(1, round(share * len(tokens))), len(tokens))
        masked = np.array(tokens, dtype=np.int64)
        masked[rng.choice(len(tokens), count, replace=False)] += vocab_size
        return masked

    def vary(sample: Any, rng: np.random.Generator) -> Any:
        sample = sample if after is None else after(sample, rng)
        if isinstance(sample, tuple | list):
            return tuple(mask(document, rng) for document in sample)
        return mask(sample, rng)

    return vary


def unmasked(ids: Int[Tensor, "*b n"], vocab_size: int) -> tuple[Int[Tensor, "*b n"], Bool[Tensor, "*b n"]]:
    """The original tokens of a masked batch, and which of them are masked."""
    masked = ids >= vocab_size
    return ids - vocab_size * masked, masked
