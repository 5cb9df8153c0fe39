"""The order of samples, and their batches.

The order of a whole run depends only on the seed, the batch size and the lengths: not on the number of processes, on
accumulation, or on interruptions. Each pass over the data is a random permutation, cut into pools of 50 batches; within
a pool samples are sorted by length and dealt into batches, so that a batch holds little padding, and the batches of the
pass are then put in random order. Samples that do not fill a batch at the end of a pass are dropped from that pass, so
every step averages over the same number of samples.

Evaluation goes through all samples in order of length.

A batch is padded to its longest sample, or to a given length, so that all batches have one shape; in training the
longest is rounded up by at most a sixteenth, see `rounded`.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Sampler

POOL = 50


class Collate(Protocol):
    """A function that makes a batch of samples."""

    def __call__(
        self, samples: Sequence[Mapping[str, Any]], *, length: int | None = None, most: int | None = None
    ) -> dict[str, Tensor]:
        """Collate samples.

        Args:
            samples: The samples.
            length: Tokens to pad to; None for the length of the longest sample.
            most: If length is None, pad further, to `rounded(longest, most)`.
        """
        ...


class TrainingOrder(Sampler[int]):
    """The samples of a whole run, one batch after another.

    Args:
        lengths: Tokens of each sample.
        batch_size: Global batch size: samples per step, over all processes and accumulation steps.
        steps: Steps of the run.
        seed: Determines the order.
    """

    def __init__(self, lengths: NDArray[np.int64], *, batch_size: int, steps: int, seed: int):
        assert len(lengths) >= batch_size, "open_splits raises for data that fill no batch"
        self.lengths, self.batch_size, self.steps, self.seed = lengths, batch_size, steps, seed

    def __len__(self) -> int:
        return self.steps * self.batch_size

    def __iter__(self) -> Iterator[int]:
        left, passes = self.steps, 0
        while left:
            for batch in self._one_pass(passes)[:left]:
                yield from batch.tolist()
                left -= 1
            passes += 1

    def _one_pass(self, number: int) -> NDArray[np.int64]:
        """The batches of one pass, one per row."""
        rng = np.random.default_rng([self.seed, number])
        order = rng.permutation(len(self.lengths))
        order = order[: len(order) // self.batch_size * self.batch_size]
        pool = POOL * self.batch_size
        for start in range(0, len(order), pool):
            part = order[start : start + pool]
            order[start : start + pool] = part[np.argsort(self.lengths[part], kind="stable")]
        return rng.permutation(order.reshape(-1, self.batch_size), axis=0)


def rounded(length: int, most: int) -> int:
    """A length rounded up by at most a sixteenth, to one of 16 in each doubling; not to more than `most`.

    If every batch had its own length, training on a CPU would hold several times the memory that it uses, since a freed
    tensor leaves no room for a slightly larger one. With few lengths, freed memory is reused.
    """
    grain = 1 << max(0, (length // 16).bit_length() - 1)
    return min(-(-length // grain) * grain, most)


def shortest_first(lengths: NDArray[np.int64]) -> list[int]:
    """All samples sorted by length, so that a batch holds little padding."""
    return np.argsort(lengths, kind="stable").tolist()


def collate(
    samples: Sequence[Mapping[str, Any]], *, length: int | None = None, most: int | None = None
) -> dict[str, Tensor]:
    """Pad samples at their end, and mark the real tokens; see `Collate`."""
    tokens, real = _padded([sample["input_ids"] for sample in samples], length, most)
    return {"input_ids": tokens, "attention_mask": real, "labels": _labels(samples)}


def collate_pairs(
    samples: Sequence[Mapping[str, Any]], *, length: int | None = None, most: int | None = None
) -> dict[str, Tensor]:
    """Pad pairs of documents at their end, all to one length, and mark the real tokens; (b, 2, n). See `Collate`."""
    tokens, real = _padded([document for sample in samples for document in sample["input_ids"]], length, most)
    shape = (len(samples), 2, -1)
    return {"input_ids": tokens.view(shape), "attention_mask": real.view(shape), "labels": _labels(samples)}


def collate_whole(
    samples: Sequence[Mapping[str, Any]], *, length: int | None = None, most: int | None = None
) -> dict[str, Tensor]:
    """Stack samples of equal length, with all tokens real and no mask; `most` is not used.

    Raises:
        ValueError: Samples differ in length, or from `length`.
    """
    lengths = {len(sample["input_ids"]) for sample in samples}
    if len(lengths) > 1 or (length is not None and lengths != {length}):
        wanted = "one length" if length is None else length
        raise ValueError(
            f"samples have {min(lengths)} to {max(lengths)} tokens; expected {wanted}: prepare the data again."
        )
    tokens = torch.from_numpy(np.stack([sample["input_ids"] for sample in samples]))
    return {"input_ids": tokens.long(), "labels": _labels(samples)}


def _padded(
    documents: Sequence[NDArray[np.unsignedinteger]], length: int | None, most: int | None
) -> tuple[Tensor, Tensor]:
    lengths = torch.tensor([len(document) for document in documents])
    longest = int(lengths.max())
    width = length or (longest if most is None else rounded(longest, most))
    assert longest <= width, "open_splits raises for samples longer than the model"
    tokens = np.zeros((len(documents), width), dtype=np.int64)
    for row, document in zip(tokens, documents, strict=True):
        row[: len(document)] = document
    return torch.from_numpy(tokens), torch.arange(tokens.shape[1]) < lengths[:, None]


def _labels(samples: Sequence[Mapping[str, Any]]) -> Tensor:
    return torch.tensor([sample["labels"] for sample in samples])
