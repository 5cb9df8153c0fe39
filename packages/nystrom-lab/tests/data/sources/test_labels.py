"""The classes, or the numbers, that labels are."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nystrom_lab.data.sources.labels import NUMBER, own_classes

# Without a dot, the digits can be shared between the two parts of the expression in as many ways as there are digits.
QUADRATIC = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)


@given(st.text(alphabet="+-.eE01_x"))
def test_a_number_is_what_it_was_and_each_has_one_reading(text):
    assert bool(NUMBER.fullmatch(text)) == bool(QUADRATIC.fullmatch(text))
    # The second part begins with a dot or is empty.
    if found := NUMBER.match(text):
        assert (found[2] or ".")[0] == "."


LABELS = {
    ("b", "a"): ("a", "b"),
    ("10", "9", "-1"): ("-1", "9", "10"),
    ("10", "9", "x"): ("10", "9", "x"),
    ("1", "2.0"): ("1", "2.0"),
    # More digits than a floating-point number has.
    ("9007199254740993", "9007199254740992"): ("9007199254740992", "9007199254740993"),
    # Only Python reads these as numbers.
    ("1_1", "11", "1_2"): ("11", "1_1", "1_2"),
    ("1", "١"): ("1", "١"),
    # Numbers to predict.
    ("2.5", "10"): None,
    ("-1", "0", "0.5"): None,
    # One number, written in two ways.
    ("1", "1.0", "0"): "of 1.0: the labels '1', '1.0' are equal numbers: write one",
    ("10", "1e1", "-1"): "the labels '10', '1e1' are equal numbers",
    ("1", "1.0", "x"): "the labels '1', '1.0' are equal numbers",
    ("0.5", "x"): "of x: the label is 'x', and others are numbers such as '0.5': leave the row out",
    # Labels that mean that there is none.
    ("0", "1", "-"): "of -: the label is '-', which means that there is none",
    ("+", "-"): ("+", "-"),
    ("0", "1", "-1"): "of -1: the label is '-1', which means",
    ("-1", "1"): ("-1", "1"),
    ("0", "1", "nan"): "of nan: the label is 'nan', which means",
    ("pos", "neg", "None"): "the label is 'None', which means",
    # Classes of hateful texts and others.
    ("sexism", "none"): ("none", "sexism"),
    (): "there are no texts with labels: add some",
    ("x",): r"of x: the only label is 'x' \(rows: 7\)",
    tuple(map(str, range(1001))): "the labels have 1001 values, more than 1000: name the column .* --labels numbers",
}


@pytest.mark.parametrize("labels", LABELS, ids=lambda labels: " ".join(labels[:4]))
def test_labels_are_classes_or_numbers_or_refused(labels):
    wanted, places = LABELS[labels], {label: f"of {label}" for label in labels}
    if not isinstance(wanted, str):
        assert own_classes(places, rows=7) == wanted
        return
    with pytest.raises(ValueError, match=wanted):
        own_classes(places, rows=7)


def test_a_user_may_say_what_labels_are():
    places = {label: label for label in ("0.5", "1.5", "nan")}
    assert own_classes(places, rows=3, kind="classes") == ("0.5", "1.5", "nan")
    assert own_classes({"0": "", "1": "", "-1": ""}, rows=3, kind="classes") == ("-1", "0", "1")
    assert own_classes({"0": "", "1": "", "-1": ""}, rows=3, kind="numbers") is None
    with pytest.raises(ValueError, match="the label is 'nan', which means that there is none"):
        own_classes(places, rows=3, kind="numbers")
