"""A batch of instances, as `EncoderForPreTraining` takes it."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nystrom_lab.data.language.mlm_sop.dataset import IGNORED


def collate_instances(
    samples: Sequence[Mapping[str, Any]], *, pad_token_id: int, length: int | None = None
) -> dict[str, Tensor]:
    """Pad instances at their end, and mark the real tokens.

    Args:
        samples: Samples of `MlmSop`.
        pad_token_id: Padding token.
        length: Length to pad to. Default: the longest instance.

    Returns:
        `input_ids`, `token_type_ids` and `labels` (b, n), int64, the labels padded with -100; `attention_mask` (b, n),
        true where a token is real; `sentence_order_label` (b,).

    Raises:
        ValueError: An instance is longer than `length`.
    """
    sizes = torch.tensor([len(sample["input_ids"]) for sample in samples])
    longest = int(sizes.max())
    if length is not None and length < longest:
        raise ValueError(
            f"length is {length}, and an instance has {longest} tokens: draw shorter ones, or pad to more."
        )
    width = longest if length is None else length
    fillers = {"input_ids": pad_token_id, "token_type_ids": 0, "labels": IGNORED}
    batch = {
        name: torch.from_numpy(_padded([sample[name] for sample in samples], width, filler))
        for name, filler in fillers.items()
    }
    batch["attention_mask"] = torch.arange(width) < sizes[:, None]
    batch["sentence_order_label"] = torch.tensor([sample["sentence_order_label"] for sample in samples])
    return batch


def _padded(rows: Sequence[NDArray[np.int64]], width: int, filler: int) -> NDArray[np.int64]:
    padded = np.full((len(rows), width), filler, dtype=np.int64)
    for row, values in zip(padded, rows, strict=True):
        row[: len(values)] = values
    return padded
