import math

import pytest

from nystrom_lab.measure.rows import Row
from nystrom_papers.studies.reproduce.known import (
    Known,
    holds_for_share,
    is_competitive,
    mean_of,
    quartiles_of,
    roughly,
    share_of,
    unanimous,
)


def row_of(value, low=None, high=None, repeats=1):
    return Row(
        study="", quantity="", method="", value=value, unit="", device="cpu", low=low, high=high, repeats=repeats
    )


@pytest.mark.parametrize(
    ("known", "expected"),
    [((1, 2), True), ((2, 3.1), None), ((3.5, 4), False), ((0, 0.5), False), ((0, 1), None), ((math.nan,) * 2, None)],
)
def test_a_limit_inside_of_what_is_known_cannot_be_told(known, expected):
    assert Known(*known).within(least=1, most=3) is expected


def test_an_equal_number_is_neither_above_nor_below():
    assert Known(1.1, 1.2).above() is True
    assert Known(0.8, 0.9).above() is False
    assert Known(1.0, 1.0).above() is Known(0.9, 1.1).above() is Known(math.nan, math.nan).above() is None


def test_a_ratio_is_as_wide_as_its_ends_allow():
    assert Known(1, 2).over(Known(4, 5)) == (0.2, 0.5)
    # An error as wide as the number leaves that end open.
    assert Known(-1, 2).over(Known(-1, 4)) == (0, math.inf)
    unmeasured = Known(1, 2).over(Known(math.nan, math.nan))
    assert unmeasured.above() is unmeasured.within(least=1) is None


def test_a_mean_is_known_to_two_standard_errors_of_the_farther_quartile():
    low, high = mean_of(row_of(1.0, 0.9, 1.6745, 100))
    assert (low, high) == pytest.approx((0.8, 1.2))
    assert mean_of(row_of(1.0)) == quartiles_of(row_of(1.0)) == (1.0, 1.0)
    assert quartiles_of(row_of(1.0, 0.5, 2.0, 4)) == (0.5, 2.0)
    assert roughly(2.0, 0.05) == pytest.approx((1.9, 2.1))


def test_a_share_is_known_to_wilsons_interval():
    # Wilson's interval holds the shares p whose two standard errors sqrt(p (1 - p) / n) reach the one that was seen.
    for seen, n in ((0.3, 20), (0.0, 5), (1.0, 144)):
        for end in share_of(seen, n):
            assert abs(end - seen) == pytest.approx(2 * math.sqrt(end * (1 - end) / n), abs=1e-12)
    assert share_of(math.nan, 0) == (0, 1)


@pytest.mark.parametrize(
    ("answers", "share", "expected"),
    [
        ([True, True], 1, True),
        ([True, None], 1, None),
        ([None, False], 1, False),
        ([True, True, None, False], 0.5, True),
        ([True, None, False, False], 0.5, None),
        ([True, None, False, False, False], 0.5, False),
        ([], 1, None),
    ],
)
def test_answers_that_cannot_be_told_count_both_ways(answers, share, expected):
    assert holds_for_share(answers, share) is expected


def test_measures_that_contradict_each_other_decide_nothing():
    assert unanimous([True, True]) is True
    assert unanimous([False, False]) is False
    assert unanimous([True, False]) is unanimous([True, None]) is unanimous([]) is None


@pytest.mark.parametrize(
    ("gap", "error", "expected"),
    [
        (0.0, 0.009, True),
        (0.0, 0.011, None),
        (0.01, 0.1, None),
        (0.3, 0.1, True),
        # At the margin, and beside it.
        (-0.019, 0.0, True),
        (-0.02, 0.0, True),
        (-0.021, 0.0, False),
        # Below the other beyond doubt, and inside the margin.
        (-0.012, 0.005, None),
        (-0.012, 0.0039, True),
        # Below the margin, and not beyond doubt.
        (-0.022, 0.003, None),
        (-0.03, 0.004, False),
        (-0.03, 0.006, None),
    ],
)
def test_competitive_includes_what_is_inside_of_the_margin(gap, error, expected):
    assert is_competitive(gap, error) is expected
    assert is_competitive(100 * gap, 100 * error, margin=2.0) is expected
