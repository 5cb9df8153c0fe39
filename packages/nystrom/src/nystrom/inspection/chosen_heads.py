"""Choose a few heads of a model that attend exactly, where all others use one method.

The `_TRIED` heads with the largest effects (`nystrom.inspection.head_effects`, one backward pass for each text) are
made exact one by one, each measured on the whole model. The best is kept if the squared error of the hidden states
falls by `_WORTH` of what it was, and all effects are taken anew for the next: with the heads of large errors exact,
they are others. Several are tried because effects are known to first order only.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from nystrom.attention.plan import AttentionPlan, LayerChoice
from nystrom.checks import check_at_least, check_names
from nystrom.evaluation import evaluating
from nystrom.inspection.candidates import EXACT, SOFTMAX, Candidate
from nystrom.inspection.head_effects import head_effects, largest_effects
from nystrom.inspection.whole_model import Batch, Results, compare_models, exact_results, results_of
from nystrom.integrations.attention_interface import REGISTERED
from nystrom.integrations.layer_calls import LayerCall, attend_by, intercepted
from nystrom.progress import Progress

_WORTH, _TRIED = 0.05, 3


def choose_exact_heads(
    model: nn.Module,
    batches: Sequence[Batch],
    method: str,
    options: Mapping[str, Any] | None = None,
    *,
    num_exact_heads: int = 4,
    held_out: Sequence[Batch] = (),
) -> AttentionPlan:
    """Choose heads that attend exactly in a model with one method, by their effect on its hidden states.

    Args:
        model: A model that `nystrom.inspection.inspect_model` takes; measured in evaluation mode.
        batches: Inputs of the model, by which the heads are chosen, of a length at which the method approximates.
        method: A method without learned weights.
        options: Options of the method.
        num_exact_heads: The most heads that attend exactly.
        held_out: Further inputs, on which the plan is measured, too.

    Returns:
        The plan, with the method in each layer. `measurements` has the exact heads, as "layer.head" in the order in
        which they were chosen, with the share of the squared error that went with each; and the error of the hidden
        states with and without them, also on the held-out inputs (None without any).

    Raises:
        ValueError: An unknown method or option, no batches, or a model that no method supports.
    """
    check_names("method", [method], REGISTERED)
    check_at_least("num_exact_heads", num_exact_heads, 0)
    if not batches:
        raise ValueError("batches is empty; expected inputs of the model.")
    plain = Candidate(method, method, dict(options or {}), None).with_exact_heads(())
    AttentionPlan((LayerChoice(method, plain.options),))
    with evaluating(model), Progress("exact heads", unit="runs") as progress:
        return _Choice(model, batches, plain, progress).plan(num_exact_heads, held_out)


class _Choice:
    """The heads of one model that were made exact so far, and the error with them."""

    def __init__(self, model: nn.Module, batches: Sequence[Batch], plain: Candidate, progress: Progress):
        self.model, self.batches, self.progress, self.plain = model, batches, progress, plain
        # Heads of each layer, and of layers that keep exact attention anyway.
        self.heads: dict[int, int] = {}
        self.left: list[int] = []
        self.tokens = 0
        self.exact: list[Results] = []
        self.kept: dict[int, list[int]] = {}

        def attend(call: LayerCall) -> Tensor:
            self.heads[call.layer], self.tokens = call.q.shape[1], max(self.tokens, call.q.shape[2])
            return attend_by(EXACT, call, {})

        with intercepted(model, attend, left=lambda call: self.left.append(call.layer)):
            for batch in batches:
                self.exact.append(results_of(model, batch))
                progress.update()

    def plan(self, most: int, held_out: Sequence[Batch]) -> AttentionPlan:
        """The plan with at most so many exact heads."""
        without = error = self._error({})
        shares: dict[str, float] = {}
        while len(shares) < most and (tried := self._tried() if error else {}):
            (layer, head), came = min(tried.items(), key=lambda each: each[1])
            if came**2 > (1 - _WORTH) * error**2:
                break
            self.kept = self._with(layer, head)
            shares[f"{layer}.{head}"] = round((error**2 - came**2) / without**2, 4)
            error = came
        measured = {"tokens": self.tokens, "exact heads": shares, "error": error, "error without exact heads": without}
        measured |= {f"held-out {name}": None for name in ("error", "error without exact heads")}
        if held_out:
            exact = exact_results(self.model, held_out, self.progress.update)
            for name, heads in (("error", self.kept), ("error without exact heads", {})):
                measured[f"held-out {name}"] = self._error(heads, held_out, exact)
        return AttentionPlan(self._layers(), measured)

    def _tried(self) -> dict[tuple[int, int], float]:
        """The heads with the largest effects beside those that are kept, and the error with each."""
        effects = head_effects(self.model, self.batches, self.exact, self._choice(self.kept), self.progress.update)
        for layer, heads in self.kept.items():
            # One head of a layer keeps its method.
            effects[layer][heads if len(heads) < self.heads[layer] - 1 else slice(None)] = 0
        return {place: self._error(self._with(*place)) for place in largest_effects(effects, _TRIED)}

    def _with(self, layer: int, head: int) -> dict[int, list[int]]:
        return {**self.kept, layer: [*self.kept.get(layer, ()), head]}

    def _choice(self, heads: Mapping[int, Sequence[int]]) -> dict[int | None, Candidate]:
        return {None: self.plain, **{layer: self.plain.with_exact_heads(some) for layer, some in heads.items()}}

    def _error(
        self,
        heads: Mapping[int, Sequence[int]],
        batches: Sequence[Batch] | None = None,
        exact: Sequence[Results] | None = None,
    ) -> float:
        texts, wanted = self.batches if batches is None else batches, self.exact if exact is None else exact
        return compare_models(self.model, texts, wanted, self._choice(heads), self.progress.update).error

    def _layers(self) -> tuple[LayerChoice, ...]:
        count = 1 + max(*self.heads, *self.left, 0)
        chosen = [
            self.plain.with_exact_heads(self.kept.get(layer, ())) if layer in self.heads else SOFTMAX
            for layer in range(count)
        ]
        return tuple(LayerChoice(each.method, each.options) for each in chosen)
