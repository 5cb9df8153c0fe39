import pytest

from nystrom_lab.measure.timing import timed_rows


def test_ratios_are_taken_within_a_turn():
    time, ratio = timed_rows("ours", [0.002, 0.006], [0.001, 0.012], ("time", "time / exact"), device="cpu", n=8)
    assert (time.value, time.unit, time.repeats, time.n) == (pytest.approx(4.0), "ms", 2, 8)
    # 2 and 0.5: the ratio of the medians would be 0.62.
    assert (ratio.quantity, ratio.value, ratio.unit) == ("time / exact", pytest.approx(1.25), "")
