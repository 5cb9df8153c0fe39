"""The number of positions of a model: the preset's, one per pixel of larger images, or as requested.

All samples of an image data set have the same size. If the task allows several sizes (`TaskFacts.any_size`) and they
are larger than the preset's, the model has a position for each of their pixels, and the option of a method that sets
its longest sequence follows. Longer samples of other tasks raise an error when they are opened.
"""

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from nystrom.attention.method_names import NO_ATTENTION
from nystrom.attention.registry import METHODS
from nystrom.checks import check_at_least, check_names
from nystrom_lab.data.lra.facts import LRA
from nystrom_lab.training.presets import Preset

# The option by which a method sets the longest sequence that it takes, if it has one.
_LONGEST = "max_length"


def data_positions(preset: Preset, data: Path | None) -> int | None:
    """The positions that a model needs for larger data than its preset's; None for the preset's.

    Args:
        preset: The preset.
        data: A prepared folder; None for the preset's. A missing folder counts as the preset's.

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
    """The preset for sequences of another length, with its own data folder.

    Raises:
        ValueError: The task has images, or the length is too short for any sequence.
    """
    facts, data = LRA[preset.task], preset.data
    if facts.pad_token_id is None:
        raise ValueError(
            f"max_length is {max_length}, but {preset.task} has images: leave it out, and name data of another size "
            "with --data, which the model follows."
        )
    check_at_least("max_length", max_length, data.min_length + 2)
    return replace(preset, data=replace(data, folder=f"{preset.task}-{max_length}", max_length=max_length))


def has_longest(attention: str) -> bool:
    """Whether a method has a fixed maximum length, set by its option `max_length`.

    Raises:
        ValueError: An unknown method.
    """
    check_names("attention", [attention], (*METHODS, NO_ATTENTION))
    return attention != NO_ATTENTION and _LONGEST in {option.name for option in fields(METHODS[attention].options)}


def attended(preset: Preset, positions: int | None, pooling: str) -> int | None:
    """Maximum number of tokens that attention sees, including the class token; None for the preset's.

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
    """Options of a method for sequences of a given length.

    Args:
        attention: The method.
        options: Those of the preset.
        given: Chosen options, which override the preset's.
        positions: Maximum number of tokens that attention sees, if not the preset's; see `attended`.

    Raises:
        ValueError: An unknown method, or a chosen maximum length that is shorter than that.
    """
    if not has_longest(attention) or positions is None:
        return {**options, **given}
    chosen = given.get(_LONGEST)
    if isinstance(chosen, int) and chosen < positions:
        raise ValueError(
            f"option {_LONGEST} of {attention} is {chosen} but the model sees sequences of {positions} tokens: leave "
            f"it out, or use {positions} or more."
        )
    return {**options, _LONGEST: positions, **given}
