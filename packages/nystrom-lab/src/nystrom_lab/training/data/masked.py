"""Samples with masked tokens, for an encoder that learns to predict them.

Of n tokens max(1, round(share n)) are masked, all to be predicted. A masked token x is encoded as x + (size of the
vocabulary), so that batches of masked samples are made like any others.
"""

from typing import Any

import numpy as np
from jaxtyping import Bool, Int
from numpy.typing import NDArray
from torch import Tensor

from nystrom_lab.training.data.augmented import Vary


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
