"""Logits of a model for each text, in the order of the texts.

While a split is scored, what is done is kept in a file: safetensors, with checksums of the model's weights and of the
numbers. A file that is damaged or of another model is not used: its texts are scored again, which only takes time.
"""

import hashlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from nystrom.progress import Progress
from nystrom.whole_files import remove_leftovers, whole_file
from nystrom_lab.training.data.batches import shortest_first
from nystrom_lab.training.finetune.encoding import EncodedSplit
from nystrom_lab.training.finite import check_outputs
from nystrom_lab.training.run.folder import written
from nystrom_lab.training.scoring import DTYPES

# Seconds between two writings of what is scored, each with a line.
_BETWEEN = 60.0

BatchMaker = Callable[[Sequence[Mapping[str, Any]]], dict[str, Tensor]]


@torch.no_grad()
def logits_of(
    model: nn.Module,
    split: EncodedSplit,
    collate: BatchMaker,
    *,
    batch_size: int,
    device: str,
    precision: str,
    kept: Path | None = None,
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
        kept: File of the logits so far, written every minute and gone on with; None for none.
        progress: Counts the texts, where these are some of more; None for one of these alone.

    Raises:
        NotFinite: A logit is not a finite number.
        NotWritten: The file cannot be written.
    """
    model.to(device).eval()
    order, since = shortest_first(split.lengths), time.monotonic()
    weights = "" if kept is None else _sum(*model.state_dict().values())
    parts = [] if kept is None or not kept.exists() else _read(kept, weights, len(order))
    before = sum(map(len, parts))
    counted = Progress("texts", len(order), initial=before) if progress is None else progress
    for start in range(before, len(order), batch_size):
        batch = collate([split[i] for i in order[start : start + batch_size]])
        batch.pop("labels", None)
        with torch.autocast(device, DTYPES[precision], enabled=precision != "float32"):
            logits = check_outputs(model(**{name: value.to(device) for name, value in batch.items()}).logits)
        parts.append(logits.float().cpu())
        if kept is not None and time.monotonic() - since >= _BETWEEN:
            _write(kept, parts, weights)
            since = time.monotonic()
        counted.update(min(batch_size, len(order) - start))
    if progress is None:
        counted.close()
    found = torch.cat(parts).numpy()
    out = np.empty_like(found)
    out[order] = found
    return out


def _sum(*tensors: Tensor) -> str:
    """The SHA-256 sum of the numbers of tensors."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def _read(kept: Path, weights: str, count: int) -> list[Tensor]:
    """The logits that an interrupted scoring of `count` texts kept, as one part; none if they cannot be used."""
    try:
        with safe_open(kept, framework="pt") as file:
            logits, said = file.get_tensor("logits"), file.metadata() or {}
        if said.get("weights") != weights:
            fault = "it is of another model"
        elif said.get("logits") != _sum(logits) or logits.ndim != 2 or not 0 < len(logits) <= count:
            fault = "it is damaged"
        else:
            return [logits]
    except (SafetensorError, OSError) as error:
        fault = f"it cannot be read, {error}"
    print(f"warning: {kept} is skipped: {fault}; its texts are scored again.", file=sys.stderr)
    return []


def forget_kept(kept: Path) -> None:
    """Remove the saved logits of a split, and leftovers of an interrupted write."""
    kept.unlink(missing_ok=True)
    remove_leftovers(kept)


def _write(kept: Path, parts: Sequence[Tensor], weights: str) -> None:
    """Write all parts."""
    logits = torch.cat(list(parts))
    with written(kept, "start the same command again, nystrom finetune with --resume"):
        kept.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(kept) as partial:
            save_file({"logits": logits}, partial, metadata={"weights": weights, "logits": _sum(logits)})
