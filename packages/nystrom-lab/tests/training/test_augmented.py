"""A varied sample depends on the seed, the pass and its number alone."""

import numpy as np
import torch
from torch.utils.data import DataLoader

from nystrom_lab.data.lra.listops.task import ListOps
from nystrom_lab.training.batches import AugmentedSplit, PassOrder, TrainingOrder, collate
from nystrom_lab.training.tasks import find_task


def varied(data, workers, seed=3):
    split = ListOps(data, "train")
    order = PassOrder(split.lengths, batch_size=8, steps=14, seed=3)
    samples = AugmentedSplit(split, find_task("listops").vary, seed=seed)
    return list(DataLoader(samples, batch_size=8, sampler=order, collate_fn=collate, num_workers=workers))


def test_workers_change_nothing_and_passes_and_seeds_do(data):
    alone, helped, other = varied(data, 0), varied(data, 2), varied(data, 0, seed=4)
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(alone, helped, strict=True))
    assert any(not torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(alone, other, strict=True))
    split = ListOps(data, "train")
    samples = AugmentedSplit(split, find_task("listops").vary, seed=3)
    longest = int(split.lengths.argmax())
    first, second = samples[longest], samples[longest + len(split)]
    assert first["labels"] == second["labels"] == split[longest]["labels"]
    assert not np.array_equal(first["input_ids"], second["input_ids"])


def test_the_order_is_that_of_a_run_without_variation(data):
    lengths = ListOps(data, "train").lengths
    plain = TrainingOrder(lengths, batch_size=8, steps=14, seed=1)
    numbered = list(PassOrder(lengths, batch_size=8, steps=14, seed=1))
    assert [number % len(lengths) for number in numbered] == list(plain)
    # 48 samples are six batches, so 14 batches are three passes.
    assert {number // len(lengths) for number in numbered} == {0, 1, 2}
