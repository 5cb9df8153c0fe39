"""Options of commands on models, as documented classes; and how a function takes the fields of such a class.

Nothing here needs torch, so that a command line knows what it can ask for before anything is imported.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, fields
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

P = ParamSpec("P")
OptionsClass = TypeVar("OptionsClass")
R = TypeVar("R")


def option_docs(options: type) -> dict[str, str]:
    """What each field of an options class means, as its docstring says."""
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
    """The signature of a class of options: its own fields before those of the classes that it extends."""
    own = inspect.get_annotations(options)
    parameters = inspect.signature(options).parameters.values()
    return inspect.Signature(sorted(parameters, key=lambda each: (each.kind, each.name not in own)))


def arguments_doc(options: type) -> str:
    """The fields of a class of options, and of those that it extends, as the arguments of a docstring."""
    docs: dict[str, str] = {}
    for kind in options.__mro__[:-1]:
        docs = option_docs(kind) | docs
    lines = [f"    {name}: " + docs[name].replace("\n", "\n        ") for name in signature_of(options).parameters]
    return "\n".join(["Args:", *lines])


def taking(options: Callable[P, OptionsClass]) -> Callable[[Callable[[OptionsClass], R]], Callable[P, R]]:
    """Let callers, command lines and readers see the fields of a class of options as a function's arguments.

    The function takes an instance. Its docstring has no "Args": they are put before what it returns or raises.
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
    """Make a Nyströmformer from a BERT or RoBERTa, or give a Nyströmformer another number of positions.

    Attributes:
        source: Folder of a BERT, RoBERTa, XLM-RoBERTa, CamemBERT or Nyströmformer: config.json, safetensors and, if
            there is one, its tokenizer.
        to: Folder for the new model; it is made, or must be empty.
        attention: Method, such as "near_far"; Nyström attention, or what a model of this library has, if not given.
        options: Options of the method. A model that gets near_far has the sizes of `near_far_sizes` for its longest
            input where they do not say others; a model that has it already keeps its own.
        num_landmarks: Landmarks m, of methods that have them; "auto" is 64, or what a Nyströmformer has.
        plan: Plan of `nystrom inspect --budget`, with a method for each layer, in place of one method for all.
        conv_kernel_size: Odd size of the skip convolution, None for none; "auto" is 33 with Nyström attention or a plan
            and none with another method, or what a Nyströmformer has, which cannot be changed.
        max_position_embeddings: The longest input, padding included; that of the source if not given.
        positions: How new positions are made from the trained table: "interpolate" stretches it, "repeat" repeats it.
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
    positions: Literal["repeat", "interpolate"] = "interpolate"

    def __post_init__(self):
        if self.plan is not None and self.num_landmarks != "auto":
            raise ValueError(
                f"num_landmarks is {self.num_landmarks} but plan says what each layer does: leave one out."
            )
        if self.plan is not None and (self.attention is not None or self.options):
            raise ValueError(
                "plan says what each layer does, and attention or its options are also given: leave one out."
            )


@dataclass(frozen=True)
class ExportOptions:
    """Write the model of a folder as ONNX, for any batch and length.

    Attributes:
        folder: Where the model was saved, with config.json and model.safetensors.
        to: The file, such as model.onnx, which must not exist yet.
        opset: Version of ONNX, 18 to 22; None is what torch writes by default.
        token_type_ids: Also take segments; otherwise all tokens belong to the first.
        check: Run the file by onnxruntime, and compare it with the model.
    """

    folder: Path
    to: Path
    _: KW_ONLY
    opset: int | None = None
    token_type_ids: bool = False
    check: bool = True
