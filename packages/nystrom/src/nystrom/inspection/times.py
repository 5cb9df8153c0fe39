"""How long methods take for the attention of one layer over one text, in turns."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from nystrom.clock import seconds
from nystrom.inspection.candidates import SOFTMAX, Candidate
from nystrom.integrations.layer_calls import LayerCall, attend_by
from nystrom.interleaved_timing import Quartiles, in_turns, is_open, quartiles, ratios, too_busy

# Calls of each method that are timed, one of each in a turn.
_TURNS = 7


@dataclass(frozen=True)
class Times:
    """Times of a layer's attention over one text."""

    turns: Mapping[str, Sequence[float]]  # Seconds of each method in each turn, exact attention ("softmax") among them

    @property
    def seconds(self) -> dict[str, float]:
        """The median of each method."""
        return {name: spread.middle for name, spread in self.quartiles.items()}

    @property
    def quartiles(self) -> dict[str, Quartiles]:
        """The quartiles of each method's seconds."""
        return {name: quartiles(taken) for name, taken in self.turns.items()}

    def mean(self, layers: Mapping[str, float]) -> Quartiles:
        """The quartiles of the mean time of layers: how many have each method, of which some may be parts of layers."""
        turns = zip(*([count * time for time in self.turns[name]] for name, count in layers.items()), strict=True)
        return quartiles([sum(times) / sum(layers.values()) for times in turns])

    def ratio(self, one: str, other: str) -> Quartiles:
        """The quartiles of the ratio of two methods' times within each turn."""
        return ratios(self.turns[one], self.turns[other])

    def doubt(self, pairs: Iterable[tuple[str, str]]) -> str | None:
        """A sentence where the turns leave open which of a pair is faster (`nystrom.interleaved_timing`), or None."""
        ratios = {pair: ratio for pair in pairs if is_open(ratio := self.ratio(*pair))}
        return too_busy(ratios, len(next(iter(self.turns.values())))) if ratios else None


def time_methods(call: LayerCall, candidates: Sequence[Candidate], tick: Callable[[], object] = lambda: None) -> Times:
    """Time each method, and exact attention, in turns, on a call for one sequence.

    `tick` is called after each of `calls_of(candidates)` calls.
    """
    clocks = {
        each.name: partial(seconds, partial(attend_by, each.method, call, each.options), call.q.device)
        for each in _contenders(candidates)
    }
    with torch.no_grad():
        return Times(in_turns(clocks, _TURNS, tick=tick))


def calls_of(candidates: Sequence[Candidate]) -> int:
    """How many calls `time_methods` makes."""
    return (1 + _TURNS) * len(_contenders(candidates))


def _contenders(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    return (*(each for each in candidates if each != SOFTMAX), SOFTMAX)
