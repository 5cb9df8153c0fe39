"""Command-line options from the signature and docstring of a class or function, and from the method that it names.

Errors that tyro finds in a command line are printed in one line, like all others.
"""

import difflib
import inspect
import os
import re
import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, redirect_stdout, suppress
from dataclasses import field, make_dataclass
from functools import partial
from io import StringIO
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, TypeVar, get_type_hints

from nystrom.command_options import option_docs, parameters_of
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


T = TypeVar("T")
NOTHING: Mapping[str, Any] = MappingProxyType({})


class UsageError(ValueError):
    """A command line that cannot be parsed."""


def call(kind: Callable[..., T], words: list[str], name: str, /, **how: Any) -> T:
    """Call a function, or a class of options, with the arguments of a command line; see `arguments_of`."""
    return kind(**arguments_of(kind, words, name, **how))


def arguments_of(
    kind: Callable[..., Any],
    words: list[str],
    name: str,
    /,
    *,
    positional: str = "",
    names: Mapping[str, str] = NOTHING,
    note: str = "",
    defaults: Mapping[str, Any] = NOTHING,
    types: Mapping[str, Any] = NOTHING,
    without: Collection[str] = (),
) -> dict[str, Any]:
    """The arguments of a command line, by the signature and docstring of a function or a class of options.

    tyro reads the words. Required options come first, and a class's own fields before those of its bases.

    Args:
        kind: The function or class, which is not called.
        words: The words after the command's name.
        name: The command's name.
        positional: The parameter that is a positional argument.
        names: Options that are called otherwise than their parameter.
        note: A paragraph of the help, after what the command does.
        defaults: Other defaults than those of the signature.
        types: Other types than those of the signature.
        without: Parameters that the command line does not have.

    Raises:
        UsageError: An option or value that is missing, unknown or wrong.
        SystemExit: Help was requested and printed.
    """
    import tyro
    from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructFieldSpec

    names = {**_NAMES, **names}
    parameters = {key: each for key, each in parameters_of(kind).items() if key not in without}
    own = {key: each.default for key, each in parameters.items() if each.default is not each.empty}
    defaults = {**own, **defaults}
    # Required options come first.
    shown = sorted(parameters, key=defaults.__contains__)
    types, docs = {**get_type_hints(kind, include_extras=True), **types}, _docs(kind)

    def field_of(key: str) -> StructFieldSpec:
        option = _option(types[key], key, positional=key == positional, name=names.get(key))
        return StructFieldSpec(key, option, defaults.get(key, tyro.MISSING), docs.get(key))

    registry = ConstructorRegistry()
    registry.struct_rule(
        lambda info: StructConstructorSpec(dict, (*map(field_of, shown),)) if info.type is kind else None
    )
    about = re.split(r"\n\n(?=Args:|Attributes:|Returns:|Yields:|Raises:)", inspect.getdoc(kind) or "")[0]
    head, _, rest = about.partition("\n\n")
    parse = partial(
        tyro.cli,
        kind,
        prog=f"nystrom {name}",
        description="\n\n".join(filter(None, (head, note, rest))),
        registry=registry,
    )

    def refuse(event: Any) -> None:
        if line := _wrong(event):
            for token in getattr(event, "tokens", ()):
                with redirect_stdout(StringIO()) as printed, suppress(SystemExit):
                    parse(args=["--help"])
                flags = re.findall(r"--[a-z][\w.-]*", printed.getvalue())
                near = difflib.get_close_matches(token.partition("=")[0], flags, 1, 0.8)
                line += f"; perhaps you meant {near[0]}" if near else ""
            raise UsageError(f"{line}. See nystrom {name} --help.")

    with ExitStack() as stack:
        # This hook is not part of tyro's public interface: without it tyro prints its own box, and exits.
        if (told := getattr(getattr(tyro, "_errors", None), "on_parse_error", None)) is not None:
            stack.enter_context(told(refuse))
        # Help has styles on a terminal.
        stack.enter_context(redirect_stdout(getattr(sys.stdout, "styled", sys.stdout)))
        # The shell leaves ~ as it is in --to=~/runs.
        arguments = {key: _at_home(value) for key, value in parse(args=words).items()}
    _check_named(arguments, words, name, needed=parameters.keys() - defaults.keys())
    given = {key: value for key, value in arguments.items() if key not in defaults or value != defaults[key]}
    model = next((given.pop(key) for key in ("model", _MODELS.get(name)) if key in given), None)
    if model is not None:
        (check_model_folder if isinstance(model, Path) else check_model)(model)
    _check_paths(given, names)
    return arguments


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
                # An output that exists may be of the same command, which reports it.
                if not os.path.lexists(path):
                    check_place(path)
                continue
            check_regular(path)
            if not path.exists():
                raise ValueError(f"{names.get(key, key)} is {path}, which does not exist: check the name.")


def _check_named(arguments: Mapping[str, Any], words: list[str], name: str, *, needed: Collection[str]) -> None:
    """Raise for an option that takes several values, and stands there with none: tyro reads it as if it were not there.

    Raises:
        UsageError: The first of them.
    """
    for key, value in arguments.items():
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
    kind: Callable[..., Any],
    words: list[str],
    name: str,
    /,
    *,
    default: str,
    also: Collection[str] = (),
    flat: bool = False,
    preset: Mapping[str, object] = NOTHING,
    **how: Any,
) -> dict[str, Any]:
    """Parse a command line as `arguments_of` does, with the options of the method that --attention names.

    The argument `options` becomes --options.num-landmarks and the like, and receives those that were given.

    Args:
        kind: The class of options whose fields are parsed; one is `options`.
        also: Words accepted in place of a method, which have no options.
        flat: Whether the options have no prefix, as in --num-landmarks; on a conflict the class's own fields win.
        preset: Defaults to show, of arguments and of options as "options.NAME"; of these, the arguments returned have
            what was typed.

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
    method, taken = METHODS[attention].options if attention in METHODS else None, parameters_of(kind)
    of_method = {key.removeprefix("options."): value for key, value in preset.items() if key not in taken}
    chosen = optional(method, without=taken if flat else (), shown=of_method)
    group = Annotated[chosen, tyro.conf.arg(name="")] if flat else chosen
    of_preset = {key: value for key, value in preset.items() if key in taken}
    shown = {**how.pop("defaults", {}), **of_preset, "options": chosen()}
    types = {**how.pop("types", {}), "options": group}
    others = f"The options of attention are those of {attention}: --attention NAME --help lists those of another."
    note = "\n\n".join(filter(None, (how.pop("note", ""), others)))
    arguments = arguments_of(kind, words, name, types=types, defaults=shown, note=note, **how)
    typed = {word.partition("=")[0].replace("_", "-") for word in words}
    given = {
        key: value
        for key, value in vars(arguments["options"]).items()
        if value is not None and (key not in of_method or _flag(f"options.{key}") in typed)
    }
    arguments = {key: value for key, value in arguments.items() if key not in of_preset or _flag(key) in typed}
    return arguments | {"options": given}


def optional(
    kind: type | None, *, without: Collection[str] = (), shown: Mapping[str, object] = NOTHING
) -> Callable[[], Any]:
    """A group of options that need not be given: the fields of a class, None where they are not.

    Args:
        kind: The class; None for no options.
        without: Fields that the group does not have.
        shown: Defaults to show instead of None.
    """
    import tyro

    group: list[tuple[str, Any, Any]] = []
    docs = {} if kind is None else _docs(kind)
    for name in parameters_of(kind) if kind is not None else ():
        if name in without:
            continue
        of_field, value = get_type_hints(kind)[name], shown.get(name)
        # tyro shows no empty tuple as the value of an option that may be None.
        of_field = of_field if value == () else of_field | None
        about = tyro.conf.arg(name=_NAMES.get(name), help=docs.get(name))
        group.append((name, Annotated[of_field, about], field(default=value)))
    made = make_dataclass("Options", group)
    made.__doc__ = None if kind is None else f"{inspect.getdoc(kind)}".partition("\n\n")[0]
    return made


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
        # The command that reads the model reports what is wrong with it.
        return "nystrom"
    return named if isinstance(named, str) else "nystrom"


def _option(kind: Any, key: str, *, positional: bool, name: str | None) -> Any:
    """The type of a parameter, marked as a positional argument under its own name, or as an option of another name."""
    import tyro

    if positional:
        of_one = kind in (str, Path, str | None, Path | None)
        return tyro.conf.Positional[Annotated[kind, tyro.conf.arg(metavar=key.upper())] if of_one else kind]
    return kind if name is None else Annotated[kind, tyro.conf.arg(name=name)]


def _docs(kind: Callable[..., Any]) -> dict[str, str]:
    """The help of each parameter of a function, or of a class of options and its base classes."""
    docs: dict[str, str] = {}
    for documented in kind.__mro__[:-1] if isinstance(kind, type) else (kind,):
        docs = option_docs(documented) | docs
    return {name: " ".join(text.split()) for name, text in docs.items()}


def _wrong(event: Any) -> str:
    """The fault of a command line, by tyro's event; "" if tyro's own message says it."""
    if missing := getattr(event, "missing_arguments", ()):
        items = [(each.arg.get_invocation_text()[1], each.arg.field.helptext) for each in missing]
        texts = [f"{name} ({' '.join(text.split()).strip('.')})" if text else name for name, text in items]
        return f"Missing from {event.prog}: {', '.join(texts)}"
    if tokens := getattr(event, "tokens", ()):
        return f"Unrecognized options: {', '.join(tokens)}"
    if (argument := getattr(event, "argument", None)) is None:
        # The class of options refused its values itself.
        return getattr(event, "message", "").strip(" .")
    # A value of another kind stands in tyro's message alone: 'x', or ['x', 'y'].
    message = getattr(event, "message", repr(getattr(event, "value", None)))
    value = re.search(r"""\[['"].*?['"]\]|'.*?'|".*?"|$""", message)[0].strip("[]")  # pyright: ignore[reportOptionalSubscript]
    if not value:
        return f"Missing value for argument '{argument.display_name()}'"
    kinds: dict[str, str] = {}
    for kind in re.findall(r"\{[^}]*\}|[A-Z]+(?: [A-Z]+)*", argument.lowered.metavar):
        choices = sorted({*kind.strip("{}").split(",")} - {"None"})
        kinds |= {word: _IN_WORDS.get(word, repr(word) if kind[0] == "{" else word.lower()) for word in choices}
    options = ", ".join(kinds.values()) if hasattr(event, "choices") else " or ".join(kinds.values())
    one_of = "one of " if hasattr(event, "choices") else ""
    return f"{argument.display_name()} is {value}; expected {one_of}{options}"
