import pytest

from nystrom_lab.studies.reproduce.margin import is_competitive


@pytest.mark.parametrize(
    ("gap", "error", "expected"),
    [
        (0.0, 0.009, True),
        (0.01, 0.1, None),
        (0.3, 0.1, True),
        (-0.019, 0.0, True),
        (-0.021, 0.0, False),
        (-0.012, 0.005, False),
        (-0.012, 0.007, None),
    ],
)
def test_a_wide_error_tells_nothing(gap, error, expected):
    assert is_competitive(gap, error) is expected
    assert is_competitive(100 * gap, 100 * error, margin=2.0) is expected
