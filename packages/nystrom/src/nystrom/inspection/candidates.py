"""Methods that can replace a trained model's attention, by names such as "nystrom-64"."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from nystrom.attention.method_names import read_method, sized_name
from nystrom.integrations.attention_interface import REGISTERED
from nystrom.integrations.modules import default_options

EXACT = "softmax"


class Candidate(NamedTuple):
    """A method with its options."""

    name: str  # Method and size, such as "nystrom-64"
    method: str  # The method
    options: dict[str, Any]  # Options that differ from the method's defaults
    size: int | None  # Number of landmarks, features or the like; None if it has no such number

    @property
    def exact_heads(self) -> tuple[int, ...]:
        """The heads that attend exactly."""
        return tuple(self.options.get("exact_heads", ()))

    def with_exact_heads(self, heads: Sequence[int]) -> "Candidate":
        """The method with these heads exact; without any, the method itself."""
        plain = {name: value for name, value in self.options.items() if name != "exact_heads"}
        return self._replace(options=plain | ({"exact_heads": sorted(heads)} if heads else {}))


SOFTMAX = Candidate(EXACT, EXACT, {}, None)


def read_candidates(names: Sequence[str], longest: int | None = None) -> tuple[Candidate, ...]:
    """Read names of methods, such as "nystrom-64", or "nystrom" for the method's default; "softmax" is exact
    attention.

    The default of "near_far" is that of a trained model: sizes for its longest input (`longest` tokens, None if
    unknown), and exact attention for short sequences.

    Raises:
        ValueError: No name, an unknown or repeated name, or a method with weights that would have to be learned.
    """
    if not names:
        raise ValueError("methods is empty; expected at least one, such as nystrom-64.")
    by_name: dict[str, Candidate] = {}
    for name in names:
        method, options = read_method(name)
        if method not in (*REGISTERED, EXACT):
            raise ValueError(
                f"method {name!r} has weights that would have to be learned, so it cannot be used in a trained model; "
                f"expected any of {', '.join(REGISTERED)}."
            )
        if name == method:
            options = default_options(method, longest)
        full_name, size = sized_name(method, options)
        if full_name in by_name:
            raise ValueError(f"method {name!r} is {full_name!r}, which is named twice: leave one out.")
        by_name[full_name] = Candidate(full_name, method, options, size)
    return tuple(by_name.values())
