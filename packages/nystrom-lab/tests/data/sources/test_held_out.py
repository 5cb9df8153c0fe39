import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nystrom_lab.data.lra.texts.labelled_texts import HeldOut
from nystrom_lab.data.sources.held_out import hold_out


def draw(hashes, *, val=0.1, test=0.1):
    return hold_out(np.array(hashes, dtype=np.uint64), {"test": test, "val": val})


def test_the_shares_are_kept_where_all_samples_differ():
    drawn = draw(np.random.default_rng(0).permutation(1000), val=0.2, test=0.05)
    assert {split: numbers.size for split, numbers in drawn.items()} == {"train": 750, "val": 200, "test": 50}
    assert sorted(np.concatenate([*drawn.values()])) == list(range(1000))
    for numbers in drawn.values():
        assert (np.diff(numbers) > 0).all()


def test_more_samples_move_few_others():
    hashes = np.random.default_rng(0).integers(0, 2**63, 1100)
    before, after = draw(hashes[:1000]), draw(hashes)
    # The threshold of a tenth is near the same hash in both, up to the chance of 1000 draws.
    assert len({*before["test"]} - {*after["test"]}) < 30


@settings(deadline=None)
@given(st.lists(st.integers(0, 20)), st.floats(0.01, 0.49), st.floats(0.01, 0.49))
def test_equal_samples_stay_together_and_none_is_lost(hashes, val, test):
    try:
        drawn = draw(hashes, val=val, test=test)
    except ValueError:
        # Many equal ones can fill the shares.
        assert len({*hashes}) < max(3, len(hashes))
        return
    assert sorted(np.concatenate([*drawn.values()]).tolist()) == list(range(len(hashes)))
    seen = [{hashes[number] for number in numbers} for numbers in drawn.values()]
    assert all(seen)
    assert sum(map(len, seen)) == len({*hashes})


def test_the_lowest_hashes_make_the_test_and_the_next_val():
    drawn = draw([9, 8, 7, 6, 5, 4, 3, 2, 1, 0])
    assert drawn["test"].tolist() == [9]
    assert drawn["val"].tolist() == [8]


def test_a_share_for_a_split_that_exists_raises():
    with pytest.raises(ValueError, match=r"--val-share is 0.3, but the source has a val split of its own"):
        HeldOut(val_share=0.3).shares(("train", "val"))
