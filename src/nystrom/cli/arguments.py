"""From a function's signature and docstring to the options of a command."""

import inspect
from collections.abc import Callable
from typing import Annotated, Any


def arguments_of(
    function: Callable[..., Any], words: list[str], name: str, **replaced: inspect.Parameter
) -> dict[str, Any]:
    """Parse a command line by a function's signature and docstring, without calling the function.

    Args:
        function: Whose arguments are wanted.
        words: What stands behind the command's name.
        name: The command's name.
        **replaced: Parameters that the command line shows in another form.
    """
    import tyro

    parameters = [replaced.get(key, value) for key, value in inspect.signature(function).parameters.items()]
    signature = inspect.Signature(parameters)

    def collect(*values: Any, **named: Any) -> dict[str, Any]:
        return dict(signature.bind(*values, **named).arguments)

    collect.__signature__ = signature  # type: ignore[attr-defined]
    collect.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    collect.__doc__ = function.__doc__
    return tyro.cli(collect, args=words, prog=f"nystrom {name}")


def positional(function: Callable[..., Any], name: str) -> inspect.Parameter:
    """The parameter as one that stands on the command line without a flag."""
    import tyro

    parameter = inspect.signature(function).parameters[name]
    return parameter.replace(annotation=tyro.conf.Positional[parameter.annotation])


def from_option(function: Callable[..., Any]) -> inspect.Parameter:
    """The parameter `source` as the option --from, which no parameter of Python can be called."""
    import tyro

    parameter = inspect.signature(function).parameters["source"]
    return parameter.replace(annotation=Annotated[parameter.annotation, tyro.conf.arg(name="from")])
