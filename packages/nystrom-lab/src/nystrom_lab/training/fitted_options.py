"""Options of a method for the longest sequence that attention sees: those that have a size of their own follow it."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from nystrom.attention.method_names import NO_ATTENTION
from nystrom.attention.registry import METHODS
from nystrom.checks import check_names
from nystrom_lab.training.presets import Preset

# The option by which a method sets the longest sequence that it takes, if it has one.
_LONGEST = "max_length"


def has_longest(attention: str) -> bool:
    """Whether a method has a fixed maximum length, set by its option `max_length`.

    Raises:
        ValueError: An unknown method.
    """
    check_names("attention", [attention], (*METHODS, NO_ATTENTION))
    return attention != NO_ATTENTION and _LONGEST in {option.name for option in fields(METHODS[attention].options)}


def attended(preset: Preset, num_positions: int | None, pooling: str) -> int | None:
    """Maximum number of tokens that attention sees, including the class token; None for the preset's.

    Args:
        num_positions: Positions of the model, if not the preset's.
        pooling: The model's; "cls" adds a token.
    """
    if pooling != "cls":
        return num_positions
    return (preset.data.max_length if num_positions is None else num_positions) + 1


def fit_options(
    attention: str, options: Mapping[str, object], given: Mapping[str, object], num_positions: int | None
) -> dict[str, Any]:
    """Options of a method for sequences of a given length.

    Args:
        given: Chosen options, which override the preset's.
        num_positions: Maximum number of tokens that attention sees, if not the preset's; see `attended`.

    Raises:
        ValueError: An unknown method, or a chosen maximum length that is shorter than that.
    """
    if not has_longest(attention) or num_positions is None:
        return {**options, **given}
    chosen = given.get(_LONGEST)
    if isinstance(chosen, int) and chosen < num_positions:
        raise ValueError(
            f"option {_LONGEST} of {attention} is {chosen} but the model sees sequences of {num_positions} tokens: "
            f"leave it out, or use {num_positions} or more."
        )
    return {**options, _LONGEST: num_positions, **given}
