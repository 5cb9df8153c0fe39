"""A user's files as a source of samples."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

# A label that is a number: Python would read 1_1 and digits of other scripts, too.
NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)


def check_share(name: str, share: float) -> None:
    """Raise if a number is not a share of some texts that leaves others."""
    if not 0 < share < 1:
        raise ValueError(f"{name} is {share}; expected a share between 0 and 1.")


def check_any_seed(seed: int) -> None:
    """Raise if a number is no seed of the hashes that hold texts out."""
    if not 0 <= seed < 2**63:
        raise ValueError(f"--seed is {seed}; expected a whole number from 0 to {2**63 - 1}.")


class LabelledSample(NamedTuple):
    """One sample of a source.

    Attributes:
        place: Its location, such as "my.csv, line 7".
        split: The split of the source that it belongs to.
        label: Its label.
        texts: Its text, or texts.
        rank: Samples are written in order of rank, and those of equal rank in their original order.
    """

    place: str
    split: str
    label: bytes
    texts: tuple[bytes, ...]
    rank: int = 0


@dataclass(frozen=True)
class Source:
    """Labelled texts of any kind.

    Attributes:
        kind: What it is, in words.
        settings: What decides its samples: the SHA-256 of its files, and the fields that are read.
        splits: The splits it has of its own.
        rows: Reads it, and says how far it is if the argument is true.
        published: Samples of each split where the data set is a published one.
        equal_classes: Each class has the same number of samples in each split, as published.
        val_is_test: Whether val is the test split by definition.
        remarks: Notices for the user about how it is read; a clause each.
    """

    kind: str
    settings: Mapping[str, str]
    splits: tuple[str, ...]
    rows: Callable[[], Iterator[LabelledSample]]
    published: Mapping[str, int] | None = None
    equal_classes: bool = False
    val_is_test: bool = False
    remarks: tuple[str, ...] = ()


# The fields that are wanted, in order: the option that names one, and the names that are looked for.
Wanted = Mapping[str, Sequence[str]]


def chosen_fields(usual: Wanted, **chosen: str | None) -> Wanted:
    """The accepted names of each field: the chosen one, or the usual ones."""
    return {option: usual[option] if name is None else (name,) for option, name in chosen.items()}


def has_field(fields: Sequence[str], names: Sequence[str]) -> bool:
    """Whether one of the fields has one of these names, ignoring case."""
    return bool(_alike(fields, names))


def find_names(columns: Sequence[str], wanted: Wanted) -> list[str]:
    """Find the one name of each wanted field, or raise ValueError: none of its names is there, or several are."""
    found = []
    for option, names in wanted.items():
        flag, there = f"--{option.replace('_', '-')}", _alike(columns, names)
        if twice := [name for name in there if columns.count(name) > 1]:
            raise ValueError(f"the header names {twice[0]} twice: give each column a name of its own.")
        if len(there) != 1:
            came = f"both {there[0]!r} and {there[1]!r}" if there else f"no {' or '.join(map(repr, names))}"
            shown = ", ".join(repr(column[:40]) for column in columns[:12]) or "(none)"
            raise ValueError(f"there is {came} among the fields {shown}: name the right one with {flag}.")
        found += there
    if len({*found}) < len(found):
        flags = ", ".join(f"--{option.replace('_', '-')}" for option in wanted)
        raise ValueError(f"{flags} name one field twice ({', '.join(found)}): name one for each.")
    return found


def _alike(columns: Sequence[str], names: Sequence[str]) -> list[str]:
    """Find the columns of these names, ignoring case; a name that matches exactly takes precedence."""
    if len(names) == 1 and names[0] in columns:
        return [*names]
    folded = {name.casefold() for name in names}
    return [column for column in columns if column.casefold() in folded]


def all_as_bytes(
    values: Sequence[object], names: Sequence[str], wanted: Wanted, may_be_null: str | None
) -> list[bytes]:
    """Convert the values of a row to the form that they would have in a tsv file; the numbers 1 and 1.0 are both 1.

    The null of the field `may_be_null` of the wanted ones becomes empty.

    Raises:
        ValueError: A value is neither a text nor a number.
    """
    return [
        b"" if value is None and option == may_be_null else _as_bytes(value, name)
        for value, name, option in zip(values, names, wanted, strict=True)
    ]


def _as_bytes(value: object, name: str) -> bytes:
    if isinstance(value, str):
        try:
            return value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(f"{name} holds half a character ({error.reason}): correct the text.") from error
    if isinstance(value, bool):
        return b"true" if value else b"false"
    if isinstance(value, float) and value.is_integer():
        return str(int(value)).encode()
    if isinstance(value, (int, float)) and value == value:
        return str(value).encode()
    raise ValueError(f"{name} is {str(value)[:60]}; expected a text or a number.")
