"""Turns, their quartiles, and what they leave open."""

import math

import pytest

from nystrom.interleaved_timing import Quartiles, in_turns, is_open, quartiles, ratios, too_busy


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


def test_what_slows_a_whole_turn_down_leaves_its_ratios_alone():
    assert ratios([1.0, 30.0, 2.0], [2.0, 60.0, 4.0]) == (0.5, 0.5, 0.5)


@pytest.mark.parametrize(
    ("ratio", "answer"),
    [
        (Quartiles(0.4, 0.5, 0.9), False),
        # The slower by the median may be faster, but by less than a tenth.
        (Quartiles(0.6, 0.95, 1.09), False),
        (Quartiles(0.92, 1.05, 3.0), False),
        (Quartiles(0.99, 1.0, 1.01), False),
        (Quartiles(0.4, 0.9, 1.2), True),
        (Quartiles(0.8, 1.5, 2.0), True),
        (Quartiles(0.8, 1.0, 1.2), True),
    ],
)
def test_an_order_is_open_where_its_opposite_by_a_tenth_is_within_the_quartiles(ratio, answer):
    assert is_open(ratio) is answer
    # Whichever of the two stands above the line.
    assert is_open(Quartiles(1 / ratio.high, 1 / ratio.middle, 1 / ratio.low)) is answer


def test_one_sentence_names_all_pairs_and_their_spread():
    said = too_busy({("a", "b"): Quartiles(0.5, 1.0, 2.0), ("a", "c"): Quartiles(0.75, 1.0, 1.25)}, 7)
    assert said == (
        "The machine was too busy to tell which is faster: a or b (0.50 to 2.00 times its time), a or c (0.75 to 1.25 "
        "times its time); quartiles of 7 turns. Measure again while it does nothing else."
    )
