"""A method for each layer of a model, as a value and as a JSON file. Needs no torch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from nystrom.attention.method_names import sized_name
from nystrom.attention.registry import METHODS
from nystrom.checks import check_names, ranges
from nystrom.json_files import read_json
from nystrom.whole_files import write_whole

# Used in configurations in place of a method name; the layers are its only option.
PLAN, LAYERS = "nystrom_plan", "layers"
_FORMAT = "nystrom attention plan"


class LayerChoice(NamedTuple):
    """The attention of one layer."""

    method: str  # Name of the method; "softmax" is exact attention
    options: dict[str, Any]  # Options that differ from the method's defaults


@dataclass(frozen=True)
class AttentionPlan:
    """A method for each layer.

    Raises:
        ValueError: No layers, or an unknown or invalid method or option.
    """

    layers: tuple[LayerChoice, ...]  # In the order of the layers
    # The measurements behind the plan, such as its error and time; plain values by name
    measurements: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        if not self.layers:
            raise ValueError("layers is empty; expected a method for each layer of a model.")
        for number, (method, options) in enumerate(self.layers):
            check_names(f"method of layer {number}", [method], METHODS)
            kind = METHODS[method].options
            check_names(f"option of {method}", options, {entry.name for entry in fields(kind)})
            kind(**options)

    def __str__(self) -> str:
        """The layers grouped by method, such as "nystrom-64 in layers 0-2; softmax in layer 3"."""
        names = [_said(*choice) for choice in self.layers]
        parts = []
        for name in dict.fromkeys(names):
            numbers = [number for number, other in enumerate(names) if other == name]
            parts.append(f"{name} in {'layer' if len(numbers) == 1 else 'layers'} {ranges(numbers)}")
        return "; ".join(parts)

    @property
    def exact_heads(self) -> dict[int, tuple[int, ...]]:
        """The heads that attend exactly, by layer, in layers whose others use a method."""
        heads = ((number, tuple(options.get("exact_heads", ()))) for number, (_, options) in enumerate(self.layers))
        return {number: some for number, some in heads if some}

    @property
    def options(self) -> dict[str, Any]:
        """The plan as a configuration stores it: the options of `PLAN`."""
        return {LAYERS: [{"method": method, "options": dict(options)} for method, options in self.layers]}

    def check_layers(self, count: int, model: str) -> None:
        """Raise ValueError for a model that has another number of layers than the plan."""
        if len(self.layers) != count:
            raise ValueError(
                f"the plan has {len(self.layers)} layers but {model} has {count}: make one for this model with "
                "nystrom inspect --budget."
            )

    def write(self, path: Path, *, new: bool = False) -> None:
        """Write the plan as JSON; with `new` an existing file raises ValueError."""
        content = {"format": _FORMAT, **self.options, "measurements": dict(self.measurements)}
        write_whole(Path(path), json.dumps(content, indent=1) + "\n", new=new)


def _said(method: str, options: Mapping[str, Any]) -> str:
    heads = sorted(options.get("exact_heads", ()))
    exact = f" with exact {'head' if len(heads) == 1 else 'heads'} {ranges(heads)}" if heads else ""
    return sized_name(method, options)[0] + exact


def read_plan(path: Path) -> AttentionPlan:
    """Read a plan from a JSON file; ValueError if it is missing or is not a plan."""
    path = Path(path)
    content = read_json(path, remedy="nystrom inspect --budget writes a plan")
    # Version 0.3 wrote them as "found".
    measurements = content.get("measurements", content.get("found"))
    if content.get("format") != _FORMAT or not isinstance(measurements, dict):
        raise ValueError(f"plan {path} is not an attention plan; nystrom inspect --budget writes one.")
    layers = plan_of_options({LAYERS: content.get(LAYERS)}).layers
    return AttentionPlan(layers, measurements)


def plan_of_options(options: Mapping[str, Any]) -> AttentionPlan:
    """The plan stored in a configuration, as the options of `PLAN`; ValueError if they hold no valid one."""
    layers = options.get(LAYERS)
    right = set(options) == {LAYERS} and isinstance(layers, list) and all(map(_is_choice, layers))
    if not right:
        raise ValueError(
            f"a plan has layers = {layers!r}; expected a list of {{'method': NAME, 'options': {{...}}}}, one per "
            "layer, and nothing else: nystrom inspect --budget writes one."
        )
    assert isinstance(layers, list)
    return AttentionPlan(tuple(LayerChoice(layer["method"], dict(layer["options"])) for layer in layers))


def _is_choice(layer: object) -> bool:
    return (
        isinstance(layer, dict)
        and set(layer) == {"method", "options"}
        and isinstance(layer["method"], str)
        and isinstance(layer["options"], dict)
    )
