"""Commands that also take the options of a method."""

import inspect
from collections.abc import Callable, Collection
from dataclasses import field, fields, make_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

from nystrom_lab.cli.arguments import arguments_of


def arguments_with_method(
    function: Callable[..., Any],
    words: list[str],
    name: str,
    /,
    *,
    default: str,
    also: Collection[str] = (),
    flat: bool = False,
    **replaced: inspect.Parameter,
) -> dict[str, Any]:
    """Parse a command line as `arguments_of` does, with the options of the method that --attention names.

    The function's argument `options` becomes --options.num-landmarks and the like, and receives those that were given.

    Args:
        function: The function whose arguments are parsed; it takes `options`.
        words: The words after the command's name.
        name: The command's name.
        default: The method if none is given.
        also: Words accepted in place of a method, which have no options.
        flat: Whether the options have no prefix, as in --num-landmarks; on a conflict the function's own arguments win.
        **replaced: Parameters that take another form on the command line.

    Raises:
        UsageError: An option or value that is missing, unknown or wrong.
        ValueError: An unknown method.
    """
    import tyro

    from nystrom.attention.method_names import SIZES, split_name
    from nystrom.attention.registry import METHODS
    from nystrom.checks import check_names

    # The method decides which options there are, so its name is read before the rest.
    attention = word_after("--attention", words, default)
    family, number = split_name(attention)
    if number is not None and family in SIZES:
        prefix = "--" if flat else "--options."
        sizes = " ".join(f"{prefix}{option.replace('_', '-')} {number}" for option in SIZES[family][0])
        raise ValueError(f"attention is {attention!r}, but here a size is an option: --attention {family} {sizes}.")
    check_names("attention method", [attention], (*METHODS, *also))
    method, taken = METHODS[attention].options if attention in METHODS else None, inspect.signature(function).parameters
    optional: list[tuple[str, Any, Any]] = []
    for option in () if method is None else fields(method):
        if flat and option.name in taken:
            continue
        kind: Any = option.type
        optional.append((option.name, kind | None, field(default=None)))
    chosen: Any = make_dataclass("Options", optional)
    chosen.__doc__ = None if method is None else method.__doc__
    parameter = taken["options"]
    shown = Annotated[chosen, tyro.conf.arg(name="")] if flat else chosen
    arguments = arguments_of(
        function, words, name, options=parameter.replace(annotation=shown, default=chosen()), **replaced
    )
    given = vars(arguments["options"])
    return arguments | {"options": {key: value for key, value in given.items() if value is not None}}


def word_after(flag: str, words: list[str], default: str) -> str:
    """The value of an option on an unparsed command line."""
    for word, following in pairwise([*words, ""]):
        if word == flag and following:
            return following
        if word.startswith(f"{flag}="):
            return word.removeprefix(f"{flag}=")
    return default


def attention_of(model: str) -> str:
    """The method of a model of this library that a run starts from; nystrom if there is none."""
    import json

    config = Path(model) / "config.json"
    try:
        named = json.loads(config.read_text(encoding="utf-8")).get("attention", "nystrom")
    except (OSError, ValueError, AttributeError):
        # What is wrong with the model is said when it is read.
        return "nystrom"
    return named if isinstance(named, str) else "nystrom"
