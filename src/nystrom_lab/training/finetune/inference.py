"""Logits of a model for each text, in the order of the texts."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from nystrom.progress import Progress
from nystrom.whole_files import remove_leftovers, whole_bytes
from nystrom_lab.training.data.batches import shortest_first
from nystrom_lab.training.finetune.encoding import EncodedSplit
from nystrom_lab.training.run.writing import written
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
        kept: File of this model's logits of this split, written every minute and gone on with; None for none.
        progress: Counts the texts, where these are some of more; None for one of these alone.

    Raises:
        ValueError: The file holds something else.
        NotWritten: It cannot be written.
    """
    model.to(device).eval()
    order = shortest_first(split.lengths)
    parts, since = _read(kept, len(order)), time.monotonic()
    before = sum(map(len, parts))
    counted = Progress("texts", len(order), initial=before) if progress is None else progress
    for start in range(before, len(order), batch_size):
        batch = collate([split[i] for i in order[start : start + batch_size]])
        batch.pop("labels", None)
        with torch.autocast(device, DTYPES[precision], enabled=precision != "float32"):
            logits = model(**{name: value.to(device) for name, value in batch.items()}).logits
        parts.append(logits.float().cpu().numpy())
        if kept is not None and time.monotonic() - since >= _BETWEEN:
            _write(kept, parts)
            since = time.monotonic()
        counted.update(min(batch_size, len(order) - start))
    if progress is None:
        counted.close()
    found = np.concatenate(parts)
    out = np.empty_like(found)
    out[order] = found
    return out


def _read(kept: Path | None, count: int) -> list[NDArray[Any]]:
    """The saved results of an interrupted scoring of `count` texts, as one part."""
    if kept is None or not kept.exists():
        return []
    try:
        found = np.load(kept, allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise ValueError(f"{kept} cannot be read ({error}): delete it to score its texts again.") from error
    if found.ndim != 2 or not 0 < len(found) <= count:
        raise ValueError(
            f"{kept} holds numbers of shape {found.shape}; expected those of at most {count} texts: delete it, and "
            "them again."
        )
    return [found]


def forget_kept(kept: Path) -> None:
    """Remove the saved logits of a split, and leftovers of an interrupted write."""
    kept.unlink(missing_ok=True)
    remove_leftovers(kept)


def _write(kept: Path, parts: Sequence[NDArray[Any]]) -> None:
    """Write all parts."""
    with written(kept, "start the same command again, nystrom finetune with --resume"):
        kept.parent.mkdir(parents=True, exist_ok=True)
        with whole_bytes(kept) as file:
            np.save(file, np.concatenate(parts), allow_pickle=False)
