"""Errors of the shared checks: the argument, its value and the expected one. Callers are tested for the argument."""

import math

import pytest

from nystrom.checks import check_at_least, check_choice, check_flag, check_names, check_positive, check_seed, ranges


@pytest.mark.parametrize("value", [0, True, 2.0, "3", None])
def test_a_number_below_the_least_or_of_another_kind_raises(value):
    with pytest.raises(ValueError, match=f"^steps is {value!r}; expected a whole number of at least 1\\.$"):
        check_at_least("steps", value, 1)
    check_at_least("steps", 1, 1)


@pytest.mark.parametrize("value", [-1, 2**32, 0.0, False, "1", None])
def test_a_seed_has_32_bits(value):
    with pytest.raises(ValueError, match=f"^seed is {value!r}; expected a whole number from 0 to 4294967295\\.$"):
        check_seed("seed", value)
    for seed in (0, 2**32 - 1):
        check_seed("seed", seed)


@pytest.mark.parametrize("value", [0.0, -1, math.inf, math.nan, True, "1"])
def test_a_number_that_is_not_positive_and_finite_raises(value):
    with pytest.raises(ValueError, match=f"^scale is {value!r}; expected a positive, finite number\\.$"):
        check_positive("scale", value)
    check_positive("scale", 1)


def test_words_and_flags_are_those_that_there_are():
    with pytest.raises(ValueError, match=r"^pinv is 'svd'; expected one of 'ridge', 'exact'\.$"):
        check_choice("pinv", "svd", ("ridge", "exact"))
    with pytest.raises(ValueError, match=r"^residual is 1; expected True or False\.$"):
        check_flag("residual", 1)
    check_choice("pinv", "exact", ("ridge", "exact"))
    check_flag("residual", False)


def test_the_nearest_name_is_suggested():
    with pytest.raises(
        ValueError, match=r"^task 'lisops' is unknown; expected one of listops, text\. Perhaps you meant 'listops'\.$"
    ):
        check_names("task", ["text", "lisops"], ["text", "listops"])
    with pytest.raises(ValueError, match=r"^task 'x' is unknown; expected one of listops, text\.$"):
        check_names("task", ["x"], ["text", "listops"])
    check_names("task", [], [])
    with pytest.raises(ValueError, match=r"^part 'x' is unknown; expected none\.$"):
        check_names("part", ["x"], [])


METHODS = [
    "nystrom",
    "nystrom_plan",
    "nystrom-compiled",
    "near_far",
    "linear",
    "kernelized",
    "informer",
    "performer",
    "skyformer",
    "bigbird",
    "sdpa",
]


@pytest.mark.parametrize(
    ("guess", "meant"),
    [
        ("nystromformer", "nystrom"),
        ("nystrom-compile", "nystrom-compiled"),
        ("Nyströmformer", "nystrom"),
        ("nystrom_attention", "nystrom"),
        ("nystrom-attention", "nystrom"),
        ("near-far", "near_far"),
        ("Near Far", "near_far"),
        ("NEAR_FAR", "near_far"),
        ("nearfar_attention", "near_far"),
        ("linear_attention", "linear"),
        ("kernelized attention", "kernelized"),
        ("BigBird", "bigbird"),
    ],
)
def test_case_accents_and_what_joins_words_do_not_hide_the_nearest_name(guess, meant):
    with pytest.raises(ValueError, match=f"Perhaps you meant '{meant}'"):
        check_names("attention", [guess], METHODS)


@pytest.mark.parametrize("guess", ["eager", "", "x", 3, None, ["nystrom"]])
def test_what_is_near_no_name_gets_no_suggestion(guess):
    with pytest.raises(ValueError, match=r"is unknown; expected one of bigbird, .*, skyformer\.$"):
        check_names("attention", [guess], METHODS)


def test_numbers_are_written_as_ranges():
    assert ranges([5, 0, 1, 2]) == "0-2 5"
    assert ranges([]) == "none"
