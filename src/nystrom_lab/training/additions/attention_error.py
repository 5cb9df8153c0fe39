"""The curves of `--track-error`: how close the layers' attention was to exact attention since the last point.

There is one point for each point of the training loss. The estimate of `nystrom.attention.tracked_error` is reset after
each, so a resumed run has the same curves. With several processes the curves are those of the first.
"""

import math

from torch import nn

from nystrom.attention.tracked_error import TrackedError

MEAN = "attention_error"


def error_quantities(model: nn.Module) -> dict[str, str]:
    """Logged values and their names in the curves: first the mean over heads and layers, then each layer."""
    layers = {f"{MEAN}_{number}": f"attention error of layer {number}" for number in range(len(_layers(model)))}
    return {MEAN: "attention error"} | layers


def take_errors(model: nn.Module) -> dict[str, float]:
    """The errors since the last call, of the layers that were sampled."""
    errors = [each.value().nanmean().item() for each in _layers(model)]
    seen = {f"{MEAN}_{number}": error for number, error in enumerate(errors) if not math.isnan(error)}
    for each in _layers(model):
        each.forget()
    return {MEAN: sum(seen.values()) / len(seen), **seen} if seen else {}


def restart_errors(model: nn.Module, calls: int) -> None:
    """Reset to the state after this many training calls of the model."""
    for each in _layers(model):
        each.restart(calls)


def _layers(model: nn.Module) -> list[TrackedError]:
    return [module for module in model.modules() if isinstance(module, TrackedError)]
