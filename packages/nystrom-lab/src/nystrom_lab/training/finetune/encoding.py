"""Texts as the tokens of a model: encoded once, stored flat, and padded per batch."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from nystrom_lab.data.language.labelled.splits import TextSplit
from nystrom_lab.training.batches import fill_up, rounded

_AT_ONCE = 1000


class EncodedSplit:
    """The texts of a split, or the pairs, as tokens.

    Args:
        max_length: Truncation length of a text, or of a pair; the longer text of a pair is truncated first.
        segments: Whether the model distinguishes the texts of a pair.

    Attributes:
        lengths: Tokens of each.
        labels: Their labels; None if there are none.
    """

    def __init__(self, split: TextSplit, tokenizer: PreTrainedTokenizerBase, *, max_length: int, segments: bool):
        ids, kinds, lengths = [], [], []
        for start in range(0, len(split.texts), _AT_ONCE):
            part = slice(start, start + _AT_ONCE)
            encoded = encode(
                tokenizer,
                split.texts[part],
                None if split.pairs is None else split.pairs[part],
                max_length=max_length,
                segments=segments,
            )
            lengths += map(len, encoded["input_ids"])
            ids += [np.concatenate([np.array(row, dtype=np.int32) for row in encoded["input_ids"]])]
            if segments:
                kinds += [np.concatenate([np.array(row, dtype=np.int8) for row in encoded["token_type_ids"]])]
        self.lengths = np.array(lengths, dtype=np.int64)
        self._ends = np.cumsum(self.lengths)
        self._ids = np.concatenate(ids)
        self._kinds = np.concatenate(kinds) if kinds else None
        self.labels = None if split.labels is None else np.array(split.labels)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int, /) -> dict[str, Any]:
        part = slice(self._ends[index] - self.lengths[index], self._ends[index])
        sample: dict[str, Any] = {"input_ids": self._ids[part]}
        if self._kinds is not None:
            sample["token_type_ids"] = self._kinds[part]
        if self.labels is not None:
            sample["labels"] = self.labels[index]
        return sample

    def longer_than(self, tokens: int) -> float:
        """The share of texts with more than `tokens` tokens."""
        return float(np.mean(self.lengths > tokens))


def encode(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    pairs: Sequence[str] | None,
    *,
    max_length: int,
    segments: bool,
) -> Mapping[str, list[list[int]]]:
    """Tokens of texts, or of pairs, cut to a length."""
    return tokenizer(  # pyright: ignore[reportReturnType]
        list(texts),
        None if pairs is None else list(pairs),
        truncation=True,
        max_length=max_length,
        return_attention_mask=False,
        return_token_type_ids=segments,
        verbose=False,
    )


def padding_of(tokenizer: PreTrainedTokenizerBase) -> int:
    """The padding token; any token if the tokenizer has none, since it is masked."""
    token = tokenizer.pad_token_id
    return token if isinstance(token, int) else 0


def collator(
    pad_token_id: int, *, most: int | None = None
) -> Callable[[Sequence[Mapping[str, Any]]], dict[str, Tensor]]:
    """A function that makes a batch of samples, padded at their end to the longest of them.

    Args:
        most: The longest input of the model; batches are padded to `rounded(longest, most)`.
    """

    def collate(samples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        lengths = torch.tensor([len(sample["input_ids"]) for sample in samples])
        longest = int(lengths.max())
        width = longest if most is None else rounded(longest, most)
        batch = {"input_ids": fill_up([sample["input_ids"] for sample in samples], width, pad_token_id)}
        batch["attention_mask"] = (torch.arange(width) < lengths[:, None]).long()
        if "token_type_ids" in samples[0]:
            batch["token_type_ids"] = fill_up([sample["token_type_ids"] for sample in samples], width)
        if "labels" in samples[0]:
            labels = torch.tensor(np.array([sample["labels"] for sample in samples]))
            batch["labels"] = labels.float() if labels.is_floating_point() else labels
        return batch

    return collate
