"""Options of commands as documented classes; a function of this library takes an instance of one.

Needs no torch, so a command line knows its options before anything heavy is imported.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Literal


def parameters_of(options: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters of a function, or of an options class: its own fields come before those of its base classes."""
    parameters = inspect.signature(options).parameters
    own = inspect.get_annotations(options) if isinstance(options, type) else parameters
    return dict(sorted(parameters.items(), key=lambda each: (each[1].kind, each[0] not in own)))


def option_docs(options: Callable[..., Any]) -> dict[str, str]:
    """The description of each field of an options class, or parameter of a function, from its own docstring."""
    text = inspect.getdoc(options) or ""
    _, _, section = text.partition("Attributes:\n" if isinstance(options, type) else "Args:\n")
    names, docs, name = inspect.signature(options).parameters, {}, ""
    for line in section.partition("\n\n")[0].splitlines():
        head, colon, rest = line.strip().partition(": ")
        if colon and head in names and len(line) - len(line.lstrip()) == 4:
            name, docs[head] = head, rest
        elif name:
            docs[name] += "\n" + line.strip()
    return docs


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
