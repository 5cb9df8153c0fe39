"""Logits of a model for each text, in the order of the texts."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from nystrom.progress import Progress
from nystrom_lab.training.batches import shortest_first
from nystrom_lab.training.finetune.encoding import EncodedSplit
from nystrom_lab.training.finite import check_outputs
from nystrom_lab.training.scoring import DTYPES


@torch.no_grad()
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
        split: The texts.
        collate: Makes a batch.
        batch_size: Texts per batch; affects only speed and memory.
        device: "cpu" or "cuda".
        precision: "float32", "bfloat16" or "float16".
        progress: Counts the texts, where these are some of more; None for one of these alone.

    Raises:
        NotFinite: A logit is not a finite number.
    """
    model.to(device).eval()
    order, parts = shortest_first(split.lengths), []
    counted = Progress("texts", len(order)) if progress is None else progress
    for start in range(0, len(order), batch_size):
        batch = collate([split[i] for i in order[start : start + batch_size]])
        batch.pop("labels", None)
        with torch.autocast(device, DTYPES[precision], enabled=precision != "float32"):
            logits = check_outputs(model(**{name: value.to(device) for name, value in batch.items()}).logits)
        parts.append(logits.float().cpu())
        counted.update(len(logits))
    if progress is None:
        counted.close()
    found = torch.cat(parts).numpy()
    out = np.empty_like(found)
    out[order] = found
    return out
