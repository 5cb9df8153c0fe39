"""Time of each method for the attention of one layer on one text."""

from collections.abc import Sequence
from statistics import median

import torch

from nystrom.clock import seconds
from nystrom.inspection.candidates import SOFTMAX, Candidate
from nystrom.integrations.layer_calls import LayerCall, attend_by

# Calls of each method that are timed, one after the other in turns.
_TURNS = 5


def time_methods(call: LayerCall, candidates: Sequence[Candidate]) -> dict[str, float]:
    """Median seconds of each method, and of exact attention, measured in turns."""
    contenders = (*(each for each in candidates if each != SOFTMAX), SOFTMAX)
    taken: dict[str, list[float]] = {each.name: [] for each in contenders}
    with torch.no_grad():
        for turn in range(_TURNS + 1):
            for each in contenders:
                time = seconds(lambda each=each: attend_by(each.method, call, each.options), call.q.device)
                # The first call may allocate and compile.
                if turn:
                    taken[each.name].append(time)
    return {name: median(times) for name, times in taken.items()}
