"""The curves of `--track-error`: how near the layers' attention was to exact attention since the last point.

Points are those of the training loss, and of the same steps: the estimate of `nystrom.attention.tracked_error` begins
anew after each, so that a resumed run has the same curves. With several processes they are the first one's.
"""

import math

from torch import nn

from nystrom.attention.tracked_error import TrackedError

MEAN = "attention_error"


def error_quantities(model: nn.Module) -> dict[str, str]:
    """What is logged, and its name in the curves: the mean over heads and layers first, then each layer."""
    layers = {f"{MEAN}_{number}": f"attention error of layer {number}" for number in range(len(_layers(model)))}
    return {MEAN: "attention error"} | layers


def take_errors(model: nn.Module) -> dict[str, float]:
    """The errors since the last call, of what was looked at."""
    errors = [each.value().nanmean().item() for each in _layers(model)]
    seen = {f"{MEAN}_{number}": error for number, error in enumerate(errors) if not math.isnan(error)}
    for each in _layers(model):
        each.forget()
    return {MEAN: sum(seen.values()) / len(seen), **seen} if seen else {}


def restart_errors(model: nn.Module, calls: int) -> None:
    """Begin as after so many calls of the model in training."""
    for each in _layers(model):
        each.restart(calls)


def _layers(model: nn.Module) -> list[TrackedError]:
    return [module for module in model.modules() if isinstance(module, TrackedError)]
