import numpy as np
import pytest

from nystrom_lab.data.language.mlm_sop.draws import GAMMA, below, bits, keys, uniform


def split_mix(state):
    """SplitMix64 as published, in whole numbers of any size."""
    while True:
        state = (state + int(GAMMA)) % 2**64
        z = state
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        yield z ^ (z >> 31)


@pytest.mark.parametrize("state", [0, 1234567, 2**64 - 1])
def test_the_numbers_of_a_key_are_those_of_splitmix(state):
    drawn = bits(np.array([state], dtype=np.uint64), np.arange(50))
    assert drawn.tolist() == [number for number, _ in zip(split_mix(state), range(50), strict=False)]


def test_the_published_first_numbers():
    # Numbers of the reference program by Vigna, state 1234567.
    drawn = bits(np.array([1234567], dtype=np.uint64), np.arange(3))
    assert drawn.tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_keys_of_different_numbers_differ_and_do_not_depend_on_their_company():
    numbers = np.arange(1000)
    every = np.concatenate([keys(seed, epoch, numbers) for seed in range(3) for epoch in range(3)])
    assert np.unique(every).size == every.size
    assert keys(1, 2, np.array([7, 500])).tolist() == keys(1, 2, numbers)[[7, 500]].tolist()
    assert keys(0, 1, numbers)[2] != keys(1, 0, numbers)[2]


def test_draws_are_uniform():
    drawn = uniform(keys(0, np.arange(20_000)), 3)
    assert drawn.min() >= 0
    assert drawn.max() < 1
    counts = np.bincount(below(keys(1, np.arange(20_000)), 0, 10), minlength=10)
    # 2,000 each, with a deviation of 42.
    assert counts.size == 10
    assert abs(counts - 2000).max() < 5 * 42
    assert abs(drawn.mean() - 0.5) < 5 * 0.29 / 20_000**0.5
