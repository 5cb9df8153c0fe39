"""Logits of a model, for each text, in the order in which the texts came."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from nystrom.train.data.batches import shortest_first
from nystrom.train.finetune.encoding import EncodedSplit
from nystrom.train.scoring import DTYPES

BatchMaker = Callable[[Sequence[Mapping[str, Any]]], dict[str, Tensor]]


@torch.no_grad()
def logits_of(
    model: nn.Module, split: EncodedSplit, collate: BatchMaker, *, batch_size: int, device: str, precision: str
) -> NDArray[Any]:
    """The logits of each text of a split.

    Args:
        model: The model; it is moved to the device, and left in evaluation mode.
        split: The texts.
        collate: Makes a batch.
        batch_size: Texts at a time; affects only speed and memory.
        device: "cpu" or "cuda".
        precision: "float32", "bfloat16" or "float16".
    """
    model.to(device).eval()
    order = shortest_first(split.lengths)
    parts = []
    for start in range(0, len(order), batch_size):
        batch = collate([split[i] for i in order[start : start + batch_size]])
        batch.pop("labels", None)
        with torch.autocast(device, DTYPES[precision], enabled=precision != "float32"):
            logits = model(**{name: value.to(device) for name, value in batch.items()}).logits
        parts.append(logits.float().cpu().numpy())
    found = np.concatenate(parts)
    out = np.empty_like(found)
    out[order] = found
    return out
