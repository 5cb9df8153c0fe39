"""The order of samples, their batches, and samples that are varied anew in each pass over the data.

The order of a whole run depends only on the seed, the batch size and the lengths: not on the number of processes, on
accumulation, or on interruptions. Each pass over the data is a random permutation, cut into pools of 50 batches; within
a pool samples are sorted by length and dealt into batches, so that a batch holds little padding, and the batches of the
pass are then put in random order. Samples that do not fill a batch at the end of a pass are dropped from that pass, so
every step averages over the same number of samples. Evaluation goes through all samples in order of length.

A batch is padded to its longest sample, or to a given length, so that all batches have one shape; in training the
longest is rounded up by at most a sixteenth, see `rounded`.

Sample i of pass e is augmented, or masked, by draws from (seed, e, i) alone: the same in one process or several, with
any number of workers, and after an interruption. max(1, round(share n)) of n tokens are masked, all to be predicted. A
masked token x is encoded as x + (size of the vocabulary), so that masked samples make batches like any others.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Sampler

from nystrom_lab.data.store.split import Split

POOL = 50


class TrainingOrder(Sampler[int]):
    """The samples of a whole run, one batch after another.

    Args:
        batch_size: Global batch size: samples per step, over all processes and accumulation steps.
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
    """Pad samples at their end, and mark the real tokens.

    Args:
        length: Tokens to pad to; None for the length of the longest sample.
        most: If length is None, pad further, to `rounded(longest, most)`.
    """
    tokens, real = _padded([sample["input_ids"] for sample in samples], length, most)
    return {"input_ids": tokens, "attention_mask": real, "labels": _labels(samples)}


def collate_pairs(
    samples: Sequence[Mapping[str, Any]], *, length: int | None = None, most: int | None = None
) -> dict[str, Tensor]:
    """Pad pairs of documents at their end, all to one length, and mark the real tokens; (b, 2, n). See `collate`."""
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
    return fill_up(documents, width), torch.arange(width) < lengths[:, None]


def fill_up(rows: Sequence[NDArray[Any]], width: int, fill: int = 0) -> Tensor:
    """Rows of numbers, each filled up at its end."""
    filled = np.full((len(rows), width), fill, dtype=np.int64)
    for place, row in zip(filled, rows, strict=True):
        place[: len(row)] = row
    return torch.from_numpy(filled)


def _labels(samples: Sequence[Mapping[str, Any]]) -> Tensor:
    return torch.tensor([sample["labels"] for sample in samples])


Vary = Callable[[Any, np.random.Generator], Any]


class PassOrder(TrainingOrder):
    """`TrainingOrder` with another number for a sample in each pass: i + e * (number of samples)."""

    def _one_pass(self, number: int) -> NDArray[np.int64]:
        return super()._one_pass(number) + number * len(self.lengths)


class AugmentedSplit:
    """Samples by the numbers of `PassOrder`.

    Args:
        vary: Function that returns a random variation of an input.
    """

    def __init__(self, split: Split, vary: Vary, *, seed: int):
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
