"""Command-line options from a function's signature and docstring.

Errors that tyro finds in a command line are printed in one line, like all others: see `one_line`.
"""

import inspect
import re
import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import redirect_stderr
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Annotated, Any

# What tyro says of a word that is none of the choices, which it takes from a set.
_CHOICE = re.compile(r"invalid choice '([^']*)' for argument '([^']*)'\. Expected one of \(([^)]*)\)")
# What it says of a value of another kind, by what it expected; and of several values, of which it says nothing more.
_KINDS = (
    (
        re.compile(
            r"Error parsing (\S+): no type matching (\S+) could be instantiated from \['([^']*)'\]\. Got errors:.*"
        ),
        "",
    ),
    (re.compile(r"Error parsing (\S+): invalid literal for int\(\) with base 10: ()'([^']*)'"), "INT"),
    (re.compile(r"Error parsing (\S+): could not convert string to float: ()'([^']*)'"), "FLOAT"),
)
_SEVERAL = re.compile(r"Error parsing (\S+): Could not find valid parse for arguments: \[([^]]*)\]")
_IN_WORDS = {"INT": "a whole number", "FLOAT": "a number"}
# Where tyro begins the name of an option in its box, and the help on it.
_ITEM, _HELP = 5, 9


class UsageError(ValueError):
    """A command line that cannot be parsed."""


def arguments_of(
    function: Callable[..., Any], words: list[str], name: str, /, **replaced: inspect.Parameter
) -> dict[str, Any]:
    """Parse a command line by a function's signature and docstring, without calling the function.

    Args:
        function: The function whose arguments are parsed.
        words: The words after the command's name.
        name: The command's name.
        **replaced: Parameters that take another form on the command line.

    Raises:
        UsageError: An option or value that is missing, unknown or wrong.
        SystemExit: Help was requested and printed.
    """
    import tyro

    parameters = [replaced.get(key, value) for key, value in inspect.signature(function).parameters.items()]
    signature = inspect.Signature(parameters)

    def collect(*values: Any, **named: Any) -> dict[str, Any]:
        # The shell leaves ~ as it is in --to=~/runs.
        return {key: _at_home(value) for key, value in signature.bind(*values, **named).arguments.items()}

    collect.__signature__ = signature  # type: ignore[attr-defined]
    collect.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    collect.__doc__ = function.__doc__
    said = StringIO()
    try:
        with redirect_stderr(said):
            found = tyro.cli(collect, args=words, prog=f"nystrom {name}")
        _check_named(found, words, name, needed={each.name for each in parameters if each.default is each.empty})
        return found
    except SystemExit as stop:
        if stop.code:
            raise UsageError(one_line(said.getvalue(), name)) from None
        raise
    finally:
        # Warnings, which are no errors, keep their form.
        if not isinstance(sys.exception(), UsageError):
            sys.stderr.write(said.getvalue())


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


def positional(function: Callable[..., Any], name: str) -> inspect.Parameter:
    """The parameter as a positional argument under its own name."""
    import tyro

    parameter = inspect.signature(function).parameters[name]
    kind = parameter.annotation
    if kind in (str, Path, str | None, Path | None):
        kind = Annotated[kind, tyro.conf.arg(metavar=name.upper())]
    return parameter.replace(annotation=tyro.conf.Positional[kind])


def fixed(function: Callable[..., Any], name: str) -> inspect.Parameter:
    """The parameter fixed at its default and hidden from the command line."""
    import tyro

    parameter = inspect.signature(function).parameters[name]
    kind = tyro.conf.Suppress[tyro.conf.Fixed[parameter.annotation]]
    return parameter.replace(annotation=kind)


def from_option(function: Callable[..., Any]) -> inspect.Parameter:
    """The parameter `source` as the option --from, a name that no parameter in Python can have."""
    import tyro

    parameter = inspect.signature(function).parameters["source"]
    return parameter.replace(annotation=Annotated[parameter.annotation, tyro.conf.arg(name="from")])


def one_line(boxed: str, name: str) -> str:
    """Condense tyro's boxed error to one line: what is wrong, and with which options.

    Args:
        boxed: The output of tyro.
        name: The command's name.
    """
    sections: list[tuple[list[str], list[list[str]]]] = [([], [])]
    # The first line is the title; where the terminal has no lines to draw, the borders are blanks.
    for line in re.sub(r"\x1b\[[0-9;]*m", "", boxed).splitlines()[1:]:
        inside = line[1:].strip("│")
        text, indent = inside.strip("╰╯ "), len(inside) - len(inside.lstrip())
        headings, items = sections[-1]
        if not text:
            continue
        if set(text) <= {"─", "-"}:
            sections.append(([], []))
        elif indent < _ITEM:
            headings.append(text)
        elif indent < _HELP or not items:
            items.append([text])
        else:
            items[-1].append(text)
    said = [
        f"{' '.join(headings)} {', '.join(_item(*item) for item in items)}".strip(" .")
        for headings, items in sections
        if headings and not headings[0].startswith(("For full helptext", "Argument helptext"))
    ]
    if not said:
        return boxed.strip()
    line = _SEVERAL.sub(r"\1 is \2; expected values of another kind", _CHOICE.sub(_choice, "; ".join(said)))
    for pattern, kind in _KINDS:
        line = pattern.sub(partial(_kind, kind), line)
    return f"{line}. See nystrom {name} --help."


def _choice(said: re.Match[str]) -> str:
    """The error for an invalid choice, worded as in `check_choice`, with the choices sorted."""
    value, argument, choices = said.groups()
    words = sorted(word for word in re.findall(r"'([^']*)'", choices) if word != "None")
    return f"{argument} is {value!r}; expected one of {', '.join(map(repr, words))}"


def _kind(kind: str, said: re.Match[str]) -> str:
    """A value of another kind in the same words: "--seed is 'x'; expected a whole number"."""
    option, metavars, value = said.groups()
    kinds: list[str] = []
    for metavar in (kind or metavars).split("|"):
        words = [repr(word) for word in re.findall(r"[^{},]+", metavar) if word != "None"]
        kinds += words if metavar.startswith("{") else [_IN_WORDS.get(metavar, metavar.lower())]
    return f"{option} is {value!r}; expected {' or '.join(kinds)}"


def _item(name: str, *lines: str) -> str:
    """An option with its help in brackets."""
    text = " ".join(lines).removesuffix("(required)").strip(" .")
    return f"{name} ({text})" if text else name
