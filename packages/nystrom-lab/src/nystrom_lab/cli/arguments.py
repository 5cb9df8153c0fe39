"""Command-line options from a function's signature and docstring, with the options of the method that it names.

Errors that tyro finds in a command line are printed in one line, like all others.
"""

import difflib
import inspect
import os
import re
import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, redirect_stdout, suppress
from dataclasses import field, fields, make_dataclass
from io import StringIO
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

from nystrom.command_options import arguments_doc, signature_of
from nystrom.input_files import check_model, check_model_folder, check_regular
from nystrom.json_files import read_json
from nystrom.whole_files import check_place
from nystrom_lab.config import FLAGS

_IN_WORDS = {"INT": "a whole number", "FLOAT": "a number", "FLOAT FLOAT": "two numbers"}
# Parameters that name places to write to; all other paths are read.
OUTPUTS = ("to", "figure", "gather")
# Commands whose first word is a model.
_MODELS = {"convert": "source", "heal": "source", "export": "folder"}
# `from` is a keyword, so the parameter is `source` and only the flag is `--from`.
_NAMES = MappingProxyType({"source": "from", **FLAGS})


class UsageError(ValueError):
    """A command line that cannot be parsed."""


def arguments_of(
    function: Callable[..., Any],
    words: list[str],
    name: str,
    /,
    *,
    positional: str = "",
    names: Mapping[str, str] = MappingProxyType({}),
    note: str = "",
    **replaced: inspect.Parameter,
) -> dict[str, Any]:
    """Parse a command line by a function's signature and docstring, without calling the function.

    Args:
        function: The function whose arguments are parsed, or the class of its options.
        words: The words after the command's name.
        name: The command's name.
        positional: The parameter that is a positional argument.
        names: Options that are called otherwise than their parameter.
        note: A paragraph of the help, after what the command does.
        **replaced: Parameters that take another form on the command line.

    Raises:
        UsageError: An option or value that is missing, unknown or wrong.
        SystemExit: Help was requested and printed.
    """
    import tyro

    names = {**_NAMES, **names}
    shown, doc = inspect.signature(function), inspect.getdoc(function) or ""
    if isinstance(function, type):
        shown, doc = signature_of(function), doc.partition("\n\n")[0] + "\n\n" + arguments_doc(function)
    if note:
        head, _, rest = doc.partition("\n\n")
        doc = f"{head}\n\n{note}\n\n{rest}"
    parameters = [replaced.get(key, value) for key, value in shown.parameters.items()]
    parameters = [_shown(each, each.name == positional, names.get(each.name)) for each in parameters]
    signature = inspect.Signature(parameters)

    def collect(*values: Any, **named: Any) -> dict[str, Any]:
        # The shell leaves ~ as it is in --to=~/runs.
        return {key: _at_home(value) for key, value in signature.bind(*values, **named).arguments.items()}

    collect.__signature__ = signature  # type: ignore[attr-defined]
    collect.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    collect.__doc__ = doc

    def refuse(event: Any) -> None:
        if line := _wrong(event):
            for token in getattr(event, "tokens", ()):
                with redirect_stdout(StringIO()) as shown, suppress(SystemExit):
                    tyro.cli(collect, args=["--help"])
                flags = re.findall(r"--[a-z][\w.-]*", shown.getvalue())
                near = difflib.get_close_matches(token.partition("=")[0], flags, 1, 0.8)
                line += f"; perhaps you meant {near[0]}" if near else ""
            raise UsageError(f"{line}. See nystrom {name} --help.")

    with ExitStack() as stack:
        # Not of tyro's public interface: without it tyro prints its own box, and exits.
        if (told := getattr(getattr(tyro, "_errors", None), "on_parse_error", None)) is not None:
            stack.enter_context(told(refuse))
        # Help has styles on a terminal.
        stack.enter_context(redirect_stdout(getattr(sys.stdout, "styled", sys.stdout)))
        found = tyro.cli(collect, args=words, prog=f"nystrom {name}")
    _check_named(found, words, name, needed={each.name for each in parameters if each.default is each.empty})
    defaults = {each.name: each.default for each in parameters}
    given = {key: value for key, value in found.items() if value != defaults[key]}
    model = next((given.pop(key) for key in ("model", _MODELS.get(name)) if key in given), None)
    if model is not None:
        (check_model_folder if isinstance(model, Path) else check_model)(model)
    _check_paths(given, names)
    return found


def _check_paths(given: Mapping[str, Any], names: Mapping[str, str]) -> None:
    """Check, before torch is imported, that what a command reads is there, and that what it writes can be written.

    Raises:
        ValueError: The first path that is not there, or is a pipe or a device; or at which nothing can be written.
    """
    for key, value in given.items():
        for path in value if isinstance(value, tuple | list) else (value,):
            if not isinstance(path, Path):
                continue
            if key in OUTPUTS:
                # What is there already may be of the same command, which says so.
                if not os.path.lexists(path):
                    check_place(path)
                continue
            check_regular(path)
            if not path.exists():
                raise ValueError(f"{names.get(key, key)} is {path}, which does not exist: check the name.")


def _check_named(found: Mapping[str, Any], words: list[str], name: str, *, needed: Collection[str]) -> None:
    """Raise for an option that takes several values, and stands there with none: tyro reads it as if it were not there.

    Raises:
        UsageError: The first of them.
    """
    for key, value in found.items():
        option = f"--{key.replace('_', '-')}"
        if value == () and option in words:
            way_out = "" if key in needed else ", or leave it out"
            raise UsageError(
                f"{option} names nothing; expected at least one value{way_out}. See nystrom {name} --help."
            )


def _at_home(value: Any) -> Any:
    """A path, or several, with ~ expanded."""
    if isinstance(value, Path):
        return value.expanduser()
    return tuple(map(_at_home, value)) if type(value) is tuple else value


def arguments_with_method(
    function: Callable[..., Any],
    words: list[str],
    name: str,
    /,
    *,
    default: str,
    also: Collection[str] = (),
    flat: bool = False,
    preset: Mapping[str, object] = MappingProxyType({}),
    **shown: Any,
) -> dict[str, Any]:
    """Parse a command line as `arguments_of` does, with the options of the method that --attention names.

    The function's argument `options` becomes --options.num-landmarks and the like, and receives those that were given.

    Args:
        function: The function whose arguments are parsed; it takes `options`.
        also: Words accepted in place of a method, which have no options.
        flat: Whether the options have no prefix, as in --num-landmarks; on a conflict the function's own arguments win.
        preset: Defaults to show, of arguments and of options as "options.NAME"; none of them counts as given.

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
        value = preset.get(f"options.{option.name}")
        # tyro shows no empty tuple as the value of an option that may be None.
        kind: Any = option.type if value == () else option.type | None  # pyright: ignore[reportOperatorIssue]
        optional.append((option.name, kind, field(default=value)))
    chosen: Any = make_dataclass("Options", optional)
    chosen.__doc__ = (
        None if method is None else f"{inspect.getdoc(method)}".partition("\n\n")[0] + f"\n\n{arguments_doc(method)}"
    )
    parameter = taken["options"]
    group = Annotated[chosen, tyro.conf.arg(name="")] if flat else chosen
    shown["options"] = parameter.replace(annotation=group, default=chosen())
    of_preset = [key for key in preset if key in taken]
    shown |= {key: shown.get(key, taken[key]).replace(default=preset[key]) for key in of_preset}
    arguments = arguments_of(function, words, name, **shown)
    typed = {word.partition("=")[0].replace("_", "-") for word in words}
    arguments |= {key: taken[key].default for key in of_preset if _flag(key) not in typed}
    given = {
        key: value
        for key, value in vars(arguments["options"]).items()
        if value is not None and (f"options.{key}" not in preset or _flag(f"options.{key}") in typed)
    }
    return arguments | {"options": given}


def _flag(name: str) -> str:
    """The option of an argument, or of an option of the method, as "options.NAME"."""
    return f"--{_NAMES.get(name, name).replace('_', '-')}"


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
    config = Path(model) / "config.json"
    try:
        named = read_json(config).get("attention", "nystrom")
    except (OSError, ValueError):
        # What is wrong with the model is said when it is read.
        return "nystrom"
    return named if isinstance(named, str) else "nystrom"


def _shown(parameter: inspect.Parameter, positional: bool, name: str | None) -> inspect.Parameter:
    """The parameter as a positional argument under its own name, or as an option of this name."""
    import tyro

    kind = parameter.annotation
    if positional:
        if kind in (str, Path, str | None, Path | None):
            kind = Annotated[kind, tyro.conf.arg(metavar=parameter.name.upper())]
        return parameter.replace(annotation=tyro.conf.Positional[kind])
    return parameter if name is None else parameter.replace(annotation=Annotated[kind, tyro.conf.arg(name=name)])


def _wrong(event: Any) -> str:
    """What is wrong with a command line, by tyro's event; "" for what tyro says itself."""
    if missing := getattr(event, "missing_arguments", ()):
        items = [(each.arg.get_invocation_text()[1], each.arg.field.helptext) for each in missing]
        texts = [f"{name} ({' '.join(text.split()).strip('.')})" if text else name for name, text in items]
        return f"Missing from {event.prog}: {', '.join(texts)}"
    if tokens := getattr(event, "tokens", ()):
        return f"Unrecognized options: {', '.join(tokens)}"
    if (argument := getattr(event, "argument", None)) is None:
        # What a class of options itself refuses.
        return getattr(event, "message", "").strip(" .")
    # A value of another kind stands in tyro's message alone: 'x', or ['x', 'y'].
    message = getattr(event, "message", repr(getattr(event, "value", None)))
    value = re.search(r"""\[['"].*?['"]\]|'.*?'|".*?"|$""", message)[0].strip("[]")  # pyright: ignore[reportOptionalSubscript]
    if not value:
        return f"Missing value for argument '{argument.display_name()}'"
    kinds: dict[str, str] = {}
    for kind in re.findall(r"\{[^}]*\}|[A-Z]+", argument.lowered.metavar):
        choices = sorted({*kind.strip("{}").split(",")} - {"None"})
        kinds |= {word: _IN_WORDS.get(word, repr(word) if kind[0] == "{" else word.lower()) for word in choices}
    options = ", ".join(kinds.values()) if hasattr(event, "choices") else " or ".join(kinds.values())
    one_of = "one of " if hasattr(event, "choices") else ""
    return f"{argument.display_name()} is {value}; expected {one_of}{options}"
