"""The order of a run, and its batches."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nystrom_lab.training.batches import TrainingOrder, collate, collate_pairs, collate_whole, rounded, shortest_first
from nystrom_lab.training.finetune.encoding import collator

LENGTHS = np.random.default_rng(0).integers(5, 500, size=1003)


def order(**changes):
    return list(TrainingOrder(LENGTHS, **({"batch_size": 8, "steps": 300, "seed": 0} | changes)))


def test_a_pass_holds_no_sample_twice_and_each_has_another_order():
    assert len(order()) == len(TrainingOrder(LENGTHS, batch_size=8, steps=300, seed=0)) == 2400
    per_pass = 1003 // 8 * 8
    first, second = order()[:per_pass], order()[per_pass : 2 * per_pass]
    assert len(set(first)) == len(set(second)) == per_pass
    assert first != second


def test_the_order_is_that_of_the_seed():
    assert order() == order()
    assert order() != order(seed=1)
    # A longer run begins like a shorter one.
    assert order(steps=400)[:2400] == order()


def test_a_batch_holds_like_lengths_and_batches_come_in_random_order():
    batches = LENGTHS[order(steps=125)].reshape(-1, 8)
    shuffled = LENGTHS[np.random.default_rng(1).permutation(1000)].reshape(-1, 8)
    assert np.ptp(batches, axis=1).mean() < 0.1 * np.ptp(shuffled, axis=1).mean()
    assert abs(np.corrcoef(np.arange(125), batches.mean(axis=1))[0, 1]) < 0.3


def test_evaluation_sees_every_sample_once():
    assert sorted(shortest_first(LENGTHS)) == list(range(1003))
    assert (np.diff(LENGTHS[shortest_first(LENGTHS)]) >= 0).all()


def test_a_batch_is_padded_at_its_end_and_says_what_is_real():
    samples = [
        {"input_ids": np.array([3, 4, 5], dtype=np.uint8), "labels": 7},
        {"input_ids": np.array([9], dtype=np.uint8), "labels": 0},
    ]
    batch = collate(samples)
    assert batch["input_ids"].tolist() == [[3, 4, 5], [9, 0, 0]]
    assert batch["attention_mask"].tolist() == [[True, True, True], [True, False, False]]
    assert batch["labels"].tolist() == [7, 0]
    assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
    longer = collate(samples, length=5)
    assert longer["input_ids"].tolist() == [[3, 4, 5, 0, 0], [9, 0, 0, 0, 0]]
    assert longer["attention_mask"].sum(-1).tolist() == [3, 1]


@given(length=st.integers(1, 20_000), more=st.integers(0, 20_000))
def test_a_length_is_rounded_up_by_at_most_a_sixteenth_and_few_are_left(length, more):
    assert length <= rounded(length, length + more) <= min(length + length / 16, length + more)
    octave = range(length, 2 * length)
    assert len({rounded(each, 40_000) for each in octave}) <= 17


def test_a_batch_is_rounded_up_in_trainings_alone():
    samples = [{"input_ids": np.ones(size, dtype=np.uint8), "labels": 0} for size in (5, 65)]
    pairs = [{"input_ids": [sample["input_ids"]] * 2, "labels": 0} for sample in samples]
    for make, some, tokens in ((collate, samples, 70), (collate_pairs, pairs, 140)):
        widths = [make(some, most=most)["attention_mask"].shape[-1] for most in (None, 65, 66, 1000)]
        assert widths == [65, 65, 66, 68]
        assert make(some, most=1000)["attention_mask"].sum() == tokens
    fine_tuned = collator(7, most=1000)(samples)
    assert fine_tuned["input_ids"].shape == fine_tuned["attention_mask"].shape == (2, 68)
    assert fine_tuned["attention_mask"].sum() == 70
    assert fine_tuned["input_ids"][1, 65:].tolist() == [7, 7, 7]
    assert collator(7)(samples)["input_ids"].shape == (2, 65)


def test_pairs_are_padded_to_the_longest_document_of_all():
    samples = [
        {"input_ids": (np.array([3, 4], dtype=np.int16), np.array([9], dtype=np.int16)), "labels": 1},
        {"input_ids": (np.array([5], dtype=np.int16), np.array([6, 7, 8], dtype=np.int16)), "labels": 0},
    ]
    batch = collate_pairs(samples)
    assert batch["input_ids"].tolist() == [[[3, 4, 0], [9, 0, 0]], [[5, 0, 0], [6, 7, 8]]]
    assert batch["attention_mask"].sum(-1).tolist() == [[2, 1], [1, 3]]
    assert collate_pairs(samples, length=4)["input_ids"].tolist() == [
        [[3, 4, 0, 0], [9, 0, 0, 0]],
        [[5, 0, 0, 0], [6, 7, 8, 0]],
    ]
    assert batch["labels"].tolist() == [1, 0]


def test_black_pixels_are_tokens():
    pixels = [{"input_ids": np.array([0, 0, 255], dtype=np.uint8), "labels": 4}] * 2
    batch = collate_whole(pixels)
    assert batch.keys() == {"input_ids", "labels"}
    assert batch["input_ids"].tolist() == [[0, 0, 255]] * 2
    assert batch["input_ids"].dtype == torch.int64


def test_samples_without_a_mask_have_one_length():
    samples = [{"input_ids": np.zeros(n, dtype=np.uint8), "labels": 0} for n in (2, 3)]
    with pytest.raises(ValueError, match="samples have 2 to 3 tokens; expected one length"):
        collate_whole(samples)
    with pytest.raises(ValueError, match="samples have 2 to 2 tokens; expected 3"):
        collate_whole(samples[:1], length=3)
