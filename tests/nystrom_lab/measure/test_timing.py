import math

import pytest

from nystrom_lab.measure.timing import in_turns, quartiles, timed_rows


def test_quartiles_include_the_values_at_the_ends():
    assert quartiles([4.0, 1.0, 3.0, 2.0, 5.0]) == (2.0, 3.0, 4.0)
    assert quartiles([1.0, 2.0]) == (1.25, 1.5, 1.75)


def test_one_value_is_all_of_its_quartiles():
    assert quartiles([2.5]) == (2.5, 2.5, 2.5)
    assert all(map(math.isnan, quartiles([math.nan])))


@pytest.mark.parametrize("warm_up", [True, False])
def test_each_is_taken_once_a_turn_and_the_first_turn_warms_up(warm_up):
    calls, ticks = [], []

    def clock(name):
        calls.append(name)
        return float(len(calls))

    taken = in_turns(
        {name: lambda name=name: clock(name) for name in "ab"}, 2, warm_up=warm_up, tick=lambda: ticks.append(1)
    )
    assert "".join(calls) == "ab" * (2 + warm_up)
    assert len(ticks) == len(calls)
    first = 2.0 * warm_up
    assert taken == {"a": [first + 1, first + 3], "b": [first + 2, first + 4]}


def test_ratios_are_taken_within_a_turn():
    time, ratio = timed_rows("ours", [0.002, 0.006], [0.001, 0.012], ("time", "time / exact"), device="cpu", n=8)
    assert (time.value, time.unit, time.repeats, time.n) == (pytest.approx(4.0), "ms", 2, 8)
    # 2 and 0.5: the ratio of the medians would be 0.62.
    assert (ratio.quantity, ratio.value, ratio.unit) == ("time / exact", pytest.approx(1.25), "")
