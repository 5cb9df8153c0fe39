r"""Choose the cheapest method for each layer that keeps the error of the whole model within a budget.

The error $e_l(c)$ of the model's hidden states is measured with candidate c in layer l and exact attention in all
others. Errors of different layers are nearly uncorrelated, so their squares add up. All layers start with the candidate
that is fastest by measured time. Then, repeatedly, the upgrade that removes the most squared error per second of added
time is made, until $\sum_l e_l^2$ is within the square of the budget. The choice is then measured on the whole model.
If it misses the budget, more upgrades follow, each measured; if it meets it, upgrades are undone, the last first, as
long as the budget is met.

A candidate with exact heads is a candidate, too: those heads whose effect on the hidden states is the largest in a
model with the candidate in all layers (`nystrom.inspection.head_effects`), one more at a time. With k of h
heads exact, they take k / h of the time of exact attention.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from nystrom.attention.heads import AttentionHeads
from nystrom.attention.plan import AttentionPlan, LayerChoice
from nystrom.checks import check_at_least, check_positive
from nystrom.evaluation import evaluating
from nystrom.inspection.candidates import EXACT, SOFTMAX, Candidate, read_candidates
from nystrom.inspection.head_effects import head_effects, largest_effects
from nystrom.inspection.times import Times, calls_of, time_methods
from nystrom.inspection.whole_model import Batch, Results, WholeModel, compare_models, exact_results, results_of
from nystrom.integrations.bert_names import longest_input
from nystrom.integrations.layer_calls import LayerCall, attend_by, intercepted
from nystrom.integrations.layer_numbers import find_places
from nystrom.progress import Progress


def choose_plan(
    model: nn.Module,
    batches: Sequence[Batch],
    *,
    budget: float,
    methods: Sequence[str],
    seconds: Mapping[str, float] | Times | None = None,
    num_exact_heads: int = 4,
    held_out: Sequence[Batch] = (),
) -> AttentionPlan:
    """Choose a method for each layer of a model, and heads that attend exactly beside it.

    Args:
        model: A model that `nystrom.inspection.inspect_model` takes; measured in evaluation mode.
        batches: Inputs of the model, on which the error is measured.
        budget: Largest relative error of the hidden states after the last layer.
        methods: Names to choose from, such as "nystrom-64"; exact attention only where "softmax" is among them.
        seconds: Times of a layer's attention by these names, and of "softmax", as on the device that the plan is for,
            or the `times` of an inspection; measured here in turns if not given.
        num_exact_heads: The most heads that attend exactly in layers that have another method; 0 for none.
        held_out: Further inputs, on which the chosen plan is measured, too: its error on texts that it was not chosen
            by.

    Returns:
        The plan; `measurements` has its error, that on the held-out texts (None without any), that with its exact heads
        by their layers' method, the share of the squared error that each of these heads made where all layers had its
        method, the times of a layer's attention that it rests on and their mean, with their quartiles over turns, and
        in a sentence whether the machine was too busy to tell if a method in the plan is faster than another
        (`nystrom.interleaved_timing`); None there means that it was not.

    Raises:
        ValueError: No method supports the model, a plan cannot name its layers, or no method meets the budget; the
            message then gives the closest.
    """
    check_positive("budget", budget)
    check_at_least("num_exact_heads", num_exact_heads, 0)
    check_can_be_planned(model)
    candidates = read_candidates(methods, longest_input(getattr(model, "config", None)))
    # Times from elsewhere have no spread.
    given = Times({name: (time,) for name, time in seconds.items()}) if isinstance(seconds, Mapping) else seconds
    if given is not None and (missing := {*(each.name for each in candidates), EXACT} - given.turns.keys()):
        raise ValueError(
            f"seconds lacks {', '.join(sorted(missing))}; expected a time for each method and for softmax."
        )
    if not batches:
        raise ValueError("batches is empty; expected inputs of the model.")
    with evaluating(model):
        search = _Search(model, batches, candidates, given, num_exact_heads)
        # How many runs it takes is known only afterwards.
        with Progress("whole plans", unit="runs") as progress:
            return search.find(budget, held_out, progress.update)


def check_can_be_planned(model: nn.Module) -> None:
    """Raise ValueError if the layers of a model have no numbers, by its modules alone, without running it."""
    holds_methods = any(isinstance(module, AttentionHeads) for module in model.modules())
    if isinstance(model, PreTrainedModel) and not holds_methods:
        find_places(model)


class _Search:
    """The errors and times of one model's layers, and the choice among them."""

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[Batch],
        candidates: Sequence[Candidate],
        times: Times | None,
        num_exact_heads: int,
    ):
        self.most = num_exact_heads
        self.model, self.batches, self.candidates = model, batches, candidates
        self.exact: list[Results] = []
        self.layers: list[int] = []
        self.left: list[int] = []
        self.best: tuple[float, dict[int, Candidate]] = (float("inf"), {})
        calls: list[LayerCall] = []

        def attend(call: LayerCall) -> Tensor:
            if call.layer not in self.layers:
                self.layers.append(call.layer)
            if not calls:
                calls.append(call.sequence(0))
            return attend_by(EXACT, call, {})

        with intercepted(model, attend, left=lambda call: self.left.append(call.layer)):
            runs = Progress("exact attention", len(batches), unit="runs").over(batches)
            self.exact = [results_of(model, batch) for batch in runs]
        if not calls:
            raise ValueError(f"{type(model).__name__} has no layer that a method supports: use another encoder.")
        _, self.num_heads, self.tokens, _ = calls[0].q.shape
        if times is None:
            with Progress("times", calls_of(candidates), unit="calls") as progress:
                times = time_methods(calls[0], candidates, progress.update)
        self.taken, self.times = times, times.seconds
        by_time = sorted(candidates, key=lambda each: self.times[each.name])
        # A candidate slower than exact attention is never better.
        most = next((place for place, each in enumerate(by_time, start=1) if each.method == EXACT), len(by_time))
        self.able = by_time[:most]
        others = [each for each in self.able if each.method != EXACT] if self.most else []
        runs = Progress("effects of heads", len(others) * len(batches), unit="runs")
        with runs:
            self.effects = {each.name: self._effects(each, runs.update) for each in others}
        heads = sum(map(len, self.effects.values()))
        runs = (len(self.layers) * sum(each.method != EXACT for each in self.able) + heads) * len(batches)
        with Progress("single layers", runs, unit="runs") as progress:
            self.ladders = {layer: self._ladder(layer, progress) for layer in self.layers}

    def find(self, budget: float, held_out: Sequence[Batch], tick: Callable[[], object]) -> AttentionPlan:
        """The plan for a budget; `tick` is called after each run of the model."""
        places, steps = dict.fromkeys(self.layers, 0), []
        while self._predicted(places) > budget**2 and (step := self._step(places)) is not None:
            steps.append((step[0], places[step[0]], step[1]))
            places[step[0]] = step[1]
        result = self._measured(places, tick)
        while result.error > budget:
            step = self._step(places)
            if step is None:
                error, choice = self.best
                raise ValueError(
                    f"budget is {budget:g}, which none of {', '.join(each.name for each in self.candidates)} meets; "
                    f"the closest is an error of {error:.3g} with {self._plan(choice)}: allow that much, or add "
                    "costlier methods, such as softmax, exact attention."
                )
            steps.append((step[0], places[step[0]], step[1]))
            places[step[0]] = step[1]
            result = self._measured(places, tick)
        for layer, before, after in reversed(steps):
            if places[layer] == after:
                cheaper = places | {layer: before}
                came = self._measured(cheaper, tick)
                if came.error <= budget:
                    places, result = cheaper, came
        choice = self._choice(places)
        chosen = dict.fromkeys(each.name for each in choice.values())
        used, spread = dict.fromkeys((*chosen, EXACT)), self.taken.quartiles
        mean = self.taken.mean(self._shares(choice))
        return AttentionPlan(
            self._plan(choice).layers,
            {
                "budget": budget,
                "error": result.error,
                "held-out error": self._held_out(choice, held_out, tick),
                **self._facts_of_heads(choice, tick),
                "changed predictions": result.changed,
                "tokens": self.tokens,
                "ms of a layer's attention": {name: round(1e3 * self.times[name], 4) for name in used},
                "quartiles of these ms": {name: _in_ms(spread[name].spread) for name in used},
                "mean ms of a layer's attention": round(1e3 * mean.middle, 4),
                "quartiles of the mean ms": _in_ms(mean.spread),
                "turns": len(self.taken.turns[EXACT]),
                "too busy to tell": self._doubt(chosen),
            },
        )

    def _held_out(
        self, choice: Mapping[int, Candidate], batches: Sequence[Batch], tick: Callable[[], object]
    ) -> float | None:
        """The error of a choice on texts that it was not made by."""
        if not batches:
            return None
        exact = exact_results(self.model, batches, tick)
        return compare_models(self.model, batches, exact, {None: SOFTMAX, **choice}, tick).error

    def _facts_of_heads(self, choice: Mapping[int, Candidate], tick: Callable[[], object]) -> dict[str, Any]:
        """The exact heads of a choice, the share of the squared error that each made, and the error without them."""
        heads = {
            f"{layer}.{head}": round(self.effects[each.name][layer, head], 4)
            for layer, each in sorted(choice.items())
            for head in each.exact_heads
        }
        error = None
        if heads:
            plain = {layer: each.with_exact_heads(()) for layer, each in choice.items()}
            error = compare_models(self.model, self.batches, self.exact, {None: SOFTMAX, **plain}, tick).error
        return {"exact heads": heads, "error without exact heads": error}

    def _shares(self, choice: Mapping[int, Candidate]) -> dict[str, float]:
        """How many layers have each method, exact heads as parts of a layer."""
        shares: dict[str, float] = {}
        for each in choice.values():
            exact = len(each.exact_heads) / self.num_heads
            shares[each.name] = shares.get(each.name, 0) + 1 - exact
            if exact:
                shares[EXACT] = shares.get(EXACT, 0) + exact
        return shares

    def _effects(self, candidate: Candidate, tick: Callable[[], object]) -> dict[tuple[int, int], float]:
        """The heads with the largest effects, and the share of the squared error that each makes."""
        effects = head_effects(self.model, self.batches, self.exact, {None: candidate}, tick)
        total = sum(float(each.clamp(min=0).sum()) for each in effects.values())
        return {place: value / total for place, value in largest_effects(effects, self.most).items()}

    def _doubt(self, chosen: Iterable[str]) -> str | None:
        """Whether a method in the plan may be slower than one that was taken for dearer: the plan would be another."""
        others = dict.fromkeys((*(each.name for each in self.candidates), EXACT))
        return self.taken.doubt(
            (name, other) for name in chosen for other in others if self.times[name] < self.times[other]
        )

    def _ladder(self, layer: int, progress: Progress) -> list[tuple[float, float, Candidate]]:
        """Time, squared error and candidate, each dearer and nearer than the one before."""
        ladder: list[tuple[float, float, Candidate]] = []
        for time, candidate in sorted(self._rungs(layer), key=lambda rung: rung[0]):
            error = 0.0
            if candidate.method != EXACT:
                choice: dict[int | None, Candidate] = {None: SOFTMAX, layer: candidate}
                error = compare_models(self.model, self.batches, self.exact, choice, progress.update).error
            # A candidate with an error that is not finite is chosen only if there is no other.
            if ladder and math.isinf(ladder[-1][1]):
                ladder.pop()
            if not ladder or error**2 < ladder[-1][1]:
                ladder.append((time, error**2, candidate))
        return ladder

    def _rungs(self, layer: int) -> Iterator[tuple[float, Candidate]]:
        """The candidates for a layer with their times, and each with one more exact head at a time."""
        for candidate in self.able:
            time = self.times[candidate.name]
            yield time, candidate
            heads = [head for place, head in self.effects.get(candidate.name, ()) if place == layer]
            for count in range(1, min(len(heads), self.num_heads - 1) + 1):
                share = count / self.num_heads
                yield (1 - share) * time + share * self.times[EXACT], candidate.with_exact_heads(heads[:count])

    def _predicted(self, places: Mapping[int, int]) -> float:
        return sum(self.ladders[layer][place][1] for layer, place in places.items())

    def _step(self, places: Mapping[int, int]) -> tuple[int, int] | None:
        """The layer and its upgrade that remove the most squared error for their time; None if no upgrade is left."""
        held = {layer: len(each.exact_heads) for layer, each in self._choice(places).items()}
        exact = sum(held.values())
        gains = [
            ((self.ladders[layer][place][1] - error) / max(time - self.ladders[layer][place][0], 1e-12), layer, later)
            for layer, place in places.items()
            for later, (time, error, candidate) in enumerate(self.ladders[layer])
            if later > place and exact + len(candidate.exact_heads) - held[layer] <= self.most
        ]
        if not gains:
            return None
        _, layer, later = max(gains)
        return layer, later

    def _choice(self, places: Mapping[int, int]) -> dict[int, Candidate]:
        return {layer: self.ladders[layer][place][2] for layer, place in places.items()}

    def _measured(self, places: Mapping[int, int], tick: Callable[[], object]) -> WholeModel:
        choice = self._choice(places)
        result = compare_models(self.model, self.batches, self.exact, {None: SOFTMAX, **choice}, tick)
        if result.error < self.best[0]:
            self.best = result.error, choice
        return result

    def _plan(self, choice: Mapping[int, Candidate]) -> AttentionPlan:
        # Local layers keep exact attention.
        count = 1 + max(*self.layers, *self.left, 0)
        chosen = (choice.get(layer, SOFTMAX) for layer in range(count))
        return AttentionPlan(tuple(LayerChoice(each.method, each.options) for each in chosen))


def _in_ms(ends: Iterable[float]) -> list[float]:
    return [round(1e3 * end, 4) for end in ends]
