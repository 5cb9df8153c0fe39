"""Options of commands as documented classes, and functions that take the fields of such a class.

Needs no torch, so a command line knows its options before anything heavy is imported.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, fields
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

P = ParamSpec("P")
OptionsClass = TypeVar("OptionsClass")
R = TypeVar("R")


def option_docs(options: type) -> dict[str, str]:
    """The description of each field of an options class, from its docstring."""
    text = inspect.getdoc(options) or ""
    _, _, attributes = text.partition("Attributes:\n")
    names, docs, name = {field.name for field in fields(options)}, {}, ""
    for line in attributes.splitlines():
        head, colon, rest = line.strip().partition(": ")
        if colon and head in names and len(line) - len(line.lstrip()) == 4:
            name, docs[head] = head, rest
        elif name and line.strip():
            docs[name] += "\n" + line.strip()
    return docs


def signature_of(options: Callable[..., Any]) -> inspect.Signature:
    """The signature of an options class: its own fields come before those of its base classes."""
    own = inspect.get_annotations(options)
    parameters = inspect.signature(options).parameters.values()
    return inspect.Signature(sorted(parameters, key=lambda each: (each.kind, each.name not in own)))


def arguments_doc(options: type) -> str:
    """The fields of an options class and its base classes, as the "Args" section of a docstring."""
    if sys.flags.optimize > 1:
        # Python was told to strip docstrings (-OO).
        return ""
    docs: dict[str, str] = {}
    for kind in options.__mro__[:-1]:
        docs = option_docs(kind) | docs
    lines = [f"    {name}: " + docs[name].replace("\n", "\n        ") for name in signature_of(options).parameters]
    return "\n".join(["Args:", *lines])


def taking(options: Callable[P, OptionsClass]) -> Callable[[Callable[[OptionsClass], R]], Callable[P, R]]:
    """Show the fields of an options class as a function's arguments to callers, command lines and readers.

    The function takes an instance. Its docstring has no "Args": they are inserted before "Returns" or "Raises".
    """

    def give(function: Callable[[OptionsClass], R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **named: P.kwargs) -> R:
            return function(options(*args, **named))

        assert isinstance(options, type)
        signature, text = signature_of(options), inspect.getdoc(function) or ""
        head, *rest = text.split("\n\n")
        places = [place for place, part in enumerate(rest) if part.startswith(("Returns:", "Yields:", "Raises:"))]
        rest.insert(min(places, default=len(rest)), arguments_doc(options))
        call.__doc__ = "\n\n".join([head, *rest])
        call.__signature__ = signature  # pyright: ignore[reportAttributeAccessIssue]
        return call

    return give


@dataclass(frozen=True)
class ConvertOptions:
    """Convert a BERT or RoBERTa to a Nyströmformer, or give a Nyströmformer another number of positions.

    Attributes:
        source: Folder of a BERT, RoBERTa, XLM-RoBERTa, CamemBERT or Nyströmformer: config.json, safetensors and, if
            there is one, its tokenizer.
        to: Folder for the new model; it must be new or empty.
        attention: Attention method, such as "near_far". Default: Nyström attention, or the present method of a model of
            this library.
        options: Options of the method. near_far gets the sizes of `near_far_sizes` for the model's longest input unless
            they are given; a model that already has near_far keeps its sizes.
        num_landmarks: Landmarks m, for methods that have them; "auto" means 64, or the present number of a
            Nyströmformer.
        plan: Plan from `nystrom inspect --budget`, with a method for each layer, in place of one method for all.
        conv_kernel_size: Odd kernel size of the skip convolution, None for none. "auto" means 33 with Nyström attention
            or a plan, and none with other methods; a Nyströmformer keeps its own, which cannot be changed.
        max_position_embeddings: The longest input in tokens, padding included. Default: that of the source.
        stretch: How new positions are made from the trained table: "interpolate" stretches it, "repeat" repeats it.
    """

    source: Path
    to: Path
    _: KW_ONLY
    attention: str | None = None
    options: Mapping[str, object] | None = None
    num_landmarks: int | Literal["auto"] = "auto"
    plan: Path | None = None
    conv_kernel_size: int | Literal["auto"] | None = "auto"
    max_position_embeddings: int | None = None
    stretch: Literal["repeat", "interpolate"] = "interpolate"

    def __post_init__(self):
        if self.plan is not None and self.num_landmarks != "auto":
            raise ValueError(
                f"num_landmarks is {self.num_landmarks} but plan sets the method of each layer: leave one out."
            )
        if self.plan is not None and (self.attention is not None or self.options):
            raise ValueError(
                "plan sets the method of each layer, and attention or its options are also given: leave one out."
            )
