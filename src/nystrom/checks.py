"""Checks of words and numbers that all rooms share; they need no torch."""

import difflib
from collections.abc import Collection, Iterable


def check_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """Refuse a word that is none of the choices."""
    choices = tuple(choices)
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; expected one of {', '.join(map(repr, choices))}.")


def check_at_least(name: str, value: int, least: int) -> None:
    """Refuse a whole number below its least value, and what is no whole number."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} is {value!r}; expected a whole number of at least {least}.")


def check_names(what: str, names: Iterable[str], known: Collection[str]) -> None:
    """Refuse a name that nobody knows, and offer the nearest."""
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" Perhaps you meant {near[0]!r}." if near else ""
            raise ValueError(f"{what} {name!r} is unknown; expected one of {', '.join(sorted(known))}.{hint}")
