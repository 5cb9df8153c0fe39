"""Logits of a model for each text, in the order of the texts."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from nystrom.progress import Progress
from nystrom_lab.training.batches import shortest_first
from nystrom_lab.training.finetune.encoding import EncodedSplit
from nystrom_lab.training.finite import check_outputs
from nystrom_lab.training.scoring import score_batches


def logits_of(
    model: nn.Module,
    split: EncodedSplit,
    collate: Callable[[Sequence[Mapping[str, Any]]], dict[str, Tensor]],
    *,
    batch_size: int,
    device: str,
    precision: str,
    progress: Progress | None = None,
) -> NDArray[Any]:
    """The logits of each text of a split.

    Args:
        model: The model; it is moved to the device, and left in evaluation mode.
        batch_size: Texts per batch; affects only speed and memory.
        progress: Counts the texts, where these are some of more; None for one of these alone.

    Raises:
        NotFinite: A logit is not a finite number.
    """

    def score(batch: dict[str, Tensor]) -> Tensor:
        return check_outputs(model(**{name: x for name, x in batch.items() if name != "labels"}).logits).float()

    by_length = score_batches(
        model, split, collate, score, batch_size=batch_size, device=device, precision=precision, progress=progress
    ).numpy()
    out = np.empty_like(by_length)
    out[shortest_first(split.lengths)] = by_length
    return out
