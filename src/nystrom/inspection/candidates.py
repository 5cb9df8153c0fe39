"""Methods that can take the place of a trained model's attention, by names such as "nystrom-64"."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from nystrom.attention.method_names import read_method, sized_name
from nystrom.integrations.attention_interface import REGISTERED
from nystrom.integrations.modules import default_options

EXACT = "softmax"


class Candidate(NamedTuple):
    """A method with its options.

    Attributes:
        name: Its name with its size, such as "nystrom-64".
        method: The method.
        options: Options that differ from the method's defaults.
        size: Its landmarks, features or the like; None where it has no such number.
    """

    name: str
    method: str
    options: dict[str, Any]
    size: int | None


SOFTMAX = Candidate(EXACT, EXACT, {}, None)


def read_candidates(names: Sequence[str], longest: int | None = None) -> tuple[Candidate, ...]:
    """Read names of methods, with their sizes or without.

    Args:
        names: Such as "nystrom-64", or "nystrom" for the method's default, of "near_far" as a trained model has it,
            with sizes for its longest input and exact attention where that is short; "softmax" is exact attention.
        longest: Tokens of the model's longest input; None where it does not say it.

    Raises:
        ValueError: No name, an unknown one, one that comes twice, or a method with weights that would have to be
            learned.
    """
    if not names:
        raise ValueError("methods is empty; expected at least one, such as nystrom-64.")
    found: dict[str, Candidate] = {}
    for name in names:
        method, options = read_method(name)
        if method not in (*REGISTERED, EXACT):
            raise ValueError(
                f"method {name!r} has weights that would have to be learned, so it cannot serve a trained model; "
                f"expected some of {', '.join(REGISTERED)}."
            )
        if name == method:
            options = default_options(method, longest)
        said, size = sized_name(method, options)
        if said in found:
            raise ValueError(f"method {name!r} is {said!r}, which is named twice: leave one out.")
        found[said] = Candidate(said, method, options, size)
    return tuple(found.values())
