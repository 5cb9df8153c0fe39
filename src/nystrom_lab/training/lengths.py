"""How many positions a model has: those of its preset, as many as larger pictures have pixels, or as was asked.

All samples of a data set of pictures have one size. Where the task comes in sizes (`TaskFacts.any_size`) and they are
larger than the preset's, the model has a position for each of their pixels, and the option of a method that sets its
longest sequence follows. Longer samples of other tasks raise an error when they are opened.
"""

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from nystrom.attention.method_names import NO_ATTENTION
from nystrom.attention.registry import METHODS
from nystrom.checks import check_at_least, check_names
from nystrom_lab.data.lra.facts import LRA
from nystrom_lab.training.presets.published import Preset

# The option by which a method sets the longest sequence that it takes, if it has one.
_LONGEST = "max_length"


def data_positions(preset: Preset, data: Path | None) -> int | None:
    """The positions that a model needs for data of a larger size than its preset's; None for the preset's.

    Args:
        preset: The preset.
        data: A prepared folder; None for the preset's. One that does not exist needs nothing.

    Raises:
        ValueError: The folder holds no data of the task.
    """
    from nystrom_lab.training.data.tasks import default_folder, find_task

    folder = default_folder(preset.data) if data is None else data
    if not LRA[preset.task].any_size or not folder.is_dir():
        return None
    longest = int(find_task(preset.task).open(folder, "train").lengths.max(initial=0))
    return longest if longest > preset.data.max_length else None


def lengthened(preset: Preset, max_length: int) -> Preset:
    """A preset for sequences of another length, with data of their own.

    Raises:
        ValueError: The task has pictures, or no sequence would be so short.
    """
    facts, data = LRA[preset.task], preset.data
    if facts.pad_token_id is None:
        raise ValueError(
            f"max_length is {max_length}, but {preset.task} has pictures: leave it out, and name data of another size "
            "with --data, which the model follows."
        )
    check_at_least("max_length", max_length, data.min_length + 2)
    return replace(preset, data=replace(data, folder=f"{preset.task}-{max_length}", max_length=max_length))


def has_longest(attention: str) -> bool:
    """Whether a method is built for a longest sequence, which its option `max_length` sets.

    Raises:
        ValueError: An unknown method.
    """
    check_names("attention", [attention], (*METHODS, NO_ATTENTION))
    return attention != NO_ATTENTION and _LONGEST in {option.name for option in fields(METHODS[attention].options)}


def attended(preset: Preset, positions: int | None, pooling: str) -> int | None:
    """Tokens that attention sees at most, that of the class included; None for the preset's.

    Args:
        preset: The preset.
        positions: Positions of the model, if not the preset's.
        pooling: The model's; "cls" adds a token.
    """
    if pooling != "cls":
        return positions
    return (preset.data.max_length if positions is None else positions) + 1


def fit_options(
    attention: str, options: Mapping[str, object], given: Mapping[str, object], positions: int | None
) -> dict[str, Any]:
    """Options of a method for sequences of so many tokens.

    Args:
        attention: The method.
        options: Those of the preset.
        given: Chosen options, which override the preset's.
        positions: Tokens that attention sees at most, if not the preset's; see `attended`.

    Raises:
        ValueError: An unknown method, or a chosen longest sequence that is shorter than that.
    """
    if not has_longest(attention) or positions is None:
        return {**options, **given}
    chosen = given.get(_LONGEST)
    if isinstance(chosen, int) and chosen < positions:
        raise ValueError(
            f"option {_LONGEST} of {attention} is {chosen} but the model sees sequences of {positions} tokens: leave "
            f"it out, or take {positions} or more."
        )
    return {**options, _LONGEST: positions, **given}
