"""Labels of users' files: the classes, or the numbers, that they are. All commands read a label alike.

White space around a label does not count. `-`, `nan` and `None` mean that there is none, and so do an empty label and a
-1 beside the classes 0, 1, ...: they are refused by name and never become a class, except that `-` beside `+`, and -1
without a 0, are classes. (In the column gold_label of SNLI and MultiNLI, rows with `-` are left out and counted.)

If all labels are numbers and one of them is not whole, they are numbers to predict. Otherwise each is a class; a number
is written in one way only. Classes are in numerical order if all are numbers, and otherwise in alphabetical order. A
number is written as 12, -0.5 or 1e2.
"""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Literal

LabelKind = Literal["auto", "classes", "numbers"]
# A label that is a number: Python would read 1_1 and digits of other scripts, too.
NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
MOST_CLASSES = 1000
# Labels of a test split that has none.
HIDDEN = frozenset({"", "-", "-1", "hidden", "nan", "NaN", "None"})
_NONE = ("-", "nan", "NaN", "None")
_SHOWN = 8


def own_classes(places: Mapping[str, str], *, rows: int, kind: LabelKind = "auto") -> tuple[str, ...] | None:
    """The classes of a user's own texts, in their order; None if the labels are numbers to predict.

    Args:
        places: The place of the first row of each label, such as "my.csv, line 7", in their order.
        rows: Rows with these labels.
        kind: Kind of the labels; "auto" means numbers if any number is not whole, and otherwise classes.

    Raises:
        ValueError: A label means that there is none, two are equal numbers, or there are too few or too many.
    """
    if not places:
        raise ValueError("there are no texts with labels: add some.")
    numbers = {label: number for label in places if (number := _number(label)) is not None}
    words = [label for label in places if label not in numbers]
    broken = [label for label, number in numbers.items() if number != number.to_integral_value()]
    if kind != "classes":
        _check_given(places, numbers, may_be_minus_one=kind == "numbers" or bool(words or broken))
    if kind == "numbers" or (kind == "auto" and broken and not words):
        return None
    if kind == "auto" and broken:
        raise ValueError(
            f"{places[words[0]]}: the label is {words[0]!r}, and others are numbers such as {broken[0]!r}: leave the "
            "row out, or use --labels classes in a fine-tuning, if each is the name of a class."
        )
    alike: dict[Decimal, list[str]] = {}
    for label, number in numbers.items():
        alike.setdefault(number, []).append(label)
    equal = next((same for same in alike.values() if len(same) > 1), None)
    if equal and not (kind == "classes" and words):
        raise ValueError(
            f"{places[equal[1]]}: the labels {', '.join(map(repr, sorted(equal)[:4]))} are equal numbers: write one."
        )
    place = next(iter(places.values()))
    if len(places) == 1:
        raise ValueError(
            f"{place}: the only label is {next(iter(places))!r} (rows: {rows}): add rows of another, or name another "
            "column with --label-field."
        )
    if len(places) > MOST_CLASSES:
        way = "name the column with --label-field" + ("" if words else ", or use --labels numbers in a fine-tuning")
        raise ValueError(f"{place}: the labels have {len(places)} values, more than {MOST_CLASSES}: {way}.")
    return tuple(sorted(places) if words else sorted(places, key=numbers.__getitem__))


def check_known(places: Mapping[str, str], classes: Collection[str]) -> None:
    """Raise ValueError if a label, given with the place of its first row, is not one of the classes."""
    if (wrong := next((label for label in places if label not in classes), None)) is not None:
        raise ValueError(
            f"{places[wrong]}: the label is {wrong[:40]!r}, which is not one of the classes: expected one of "
            f"{', '.join(map(repr, [*classes][:20]))}."
        )


def to_float(label: str) -> float | None:
    """A label as a number to predict; None if it is none."""
    number = float(label) if NUMBER.fullmatch(label) else math.inf
    return number if math.isfinite(number) else None


def counted(classes: Sequence[str], counts: Sequence[int]) -> str:
    """The classes and how many rows each has, in words; the first of many."""
    shown = ", ".join(f"{name[:20]!r} {count:,}" for name, count in zip(classes[:_SHOWN], counts, strict=False))
    more = f", and {len(classes) - _SHOWN} more" if classes[_SHOWN:] else ""
    return f"{len(classes)} classes: {shown}{more}"


def _check_given(places: Mapping[str, str], numbers: Mapping[str, Decimal], *, may_be_minus_one: bool) -> None:
    """Raise ValueError if a label means that there is none."""
    none = [label for label in _NONE if label in places and not (label == "-" and "+" in places)]
    if not may_be_minus_one and Decimal(0) in numbers.values():
        none += [label for label, number in numbers.items() if number == -1]
    if none:
        raise ValueError(
            f"{places[none[0]]}: the label is {none[0]!r}, which means that there is none: add one, leave such rows "
            "out, or write it in another way, if it is a class."
        )


def _number(label: str) -> Decimal | None:
    """A label as a number; 1_1 and digits of other scripts, which Python would also read, count as words."""
    try:
        value = Decimal(label if NUMBER.fullmatch(label) else "nan")
    except InvalidOperation:
        return None
    return value if value.is_finite() else None
