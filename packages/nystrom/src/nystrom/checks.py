"""The choices that options have, and checks of words and numbers for all packages. Needs no torch."""

import difflib
import math
import unicodedata
from collections.abc import Collection, Iterable
from typing import Literal

# A known name with more letters than this is suggested if an unknown name begins with it.
_WORD = 3

Backend = Literal["auto", "torch", "triton"]
Design = Literal["transformers", "authors", "official"]
FeatureMap = Literal["elu"]
FeedForward = Literal["plain", "gated", "glu"]
Form = Literal["fused", "materialised"]
Inverse = Literal["iterative", "ridge", "exact"]
Kernel = Literal["gaussian", "laplace", "matern32", "matern52"]
Landmarks = Literal["segment_means", "uniform", "kmeans"]
Norm = Literal["post", "pre"]
PooledNormKind = Literal["none", "batch"]
Pooling = Literal["mean", "first", "max", "cls"]
PositionKind = Literal["learned", "rotary", "none"]
StartValue = Literal["paper", "authors", "sequence"]


def check_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """Raise if a value is not one of the choices."""
    choices = tuple(choices)
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; expected one of {', '.join(map(repr, choices))}.")


def check_at_least(name: str, value: object, least: int) -> None:
    """Raise if a value is not a whole number, or is below the least."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} is {value!r}; expected a whole number of at least {least}.")


def check_seed(name: str, value: object) -> None:
    """Raise if a value is not a seed that both torch and numpy accept: an unsigned 32-bit integer."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**32:
        raise ValueError(f"{name} is {value!r}; expected a whole number from 0 to {2**32 - 1}.")


def check_flag(name: str, value: object) -> None:
    """Raise if a value is neither True nor False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}; expected True or False.")


def check_positive(name: str, value: object) -> None:
    """Raise if a value is not a positive, finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{name} is {value!r}; expected a positive, finite number.")


def check_names(what: str, names: Iterable[str], known: Collection[str]) -> None:
    """Raise if a name is unknown, and suggest the nearest one."""
    for name in names:
        if not isinstance(name, str) or name not in known:
            near = nearest_name(name, known)
            hint = "" if near is None else f" Perhaps you meant {near!r}."
            wanted = f"one of {', '.join(sorted(known))}" if known else "none"
            raise ValueError(f"{what} {name!r} is unknown; expected {wanted}.{hint}")


def nearest_name(name: object, known: Iterable[str]) -> str | None:
    """The known name that was most likely meant, such as "nystrom" for "Nyström-Attention"; None if none is similar."""
    if not isinstance(name, str):
        return None
    plain, came = {_plain(each): each for each in known}, _plain(name)
    starts = sorted((each for each in plain if len(each) > _WORD and came.startswith(each)), key=len, reverse=True)
    near = difflib.get_close_matches(came.removesuffix("attention"), plain, n=1, cutoff=0.85)
    near += starts or difflib.get_close_matches(came, plain, n=1)
    return plain[near[0]] if near else None


def _plain(name: str) -> str:
    """A name without case, accents and separators, which may be written in several ways."""
    letters = unicodedata.normalize("NFKD", name.lower())
    return "".join(letter for letter in letters if letter.isalnum())


def ranges(numbers: Iterable[int]) -> str:
    """Sorted numbers as text, such as "0-2 5"; "none" if there are none."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return " ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs) or "none"
