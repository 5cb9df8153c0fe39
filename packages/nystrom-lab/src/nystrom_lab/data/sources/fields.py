"""Fields of rows: which ones are wanted, found by their names, and their values as bytes."""

from collections.abc import Mapping, Sequence

# The fields that are wanted, in order: the option that names one, and the names that are looked for.
Wanted = Mapping[str, Sequence[str]]


def chosen_fields(usual: Wanted, **chosen: str | None) -> Wanted:
    """The accepted names of each field: the chosen one, or the usual ones."""
    return {option: usual[option] if name is None else (name,) for option, name in chosen.items()}


def has_field(fields: Sequence[str], names: Sequence[str]) -> bool:
    """Whether one of the fields has one of these names, ignoring case."""
    return bool(_alike(fields, names))


def find_names(columns: Sequence[str], wanted: Wanted) -> list[str]:
    """Find the one name of each wanted field.

    Raises:
        ValueError: None of the names of a field is present, or several are.
    """
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

    Args:
        values: The values of the wanted fields.
        names: Their names in the file.
        wanted: The fields.
        may_be_null: The name in `wanted` of the field whose null becomes empty.

    Raises:
        ValueError: One is neither a text nor a number.
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
