import pytest

from nystrom_lab.studies.reproduce.margin import is_competitive


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
