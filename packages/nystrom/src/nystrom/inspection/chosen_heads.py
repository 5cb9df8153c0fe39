"""Choose a few heads of a model that attend exactly, where all others use one method.

The heads with the largest effects (`nystrom.inspection.head_effects`, one backward pass for each text) are made exact
one after the other, each measured on the whole model, and kept if the squared error of the hidden states falls by
`_WORTH` of what it was. Twice as many are tried as may be kept: effects are known to first order only.
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

_WORTH = 0.05


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
        model: As for `nystrom.inspection.inspect_model`; measured in evaluation mode.
        batches: Its inputs, by which the heads are chosen, of a length at which the method approximates.
        method: A method without learned weights.
        options: Its options.
        num_exact_heads: The most heads that attend exactly.
        held_out: Further inputs, on which the plan is measured, too.

    Returns:
        The plan, with the method in each layer. Its `found` says the exact heads, as "layer.head", with the share of
        the squared error that each makes by its effect; and the error of the hidden states with and without them, also
        on the held-out inputs (None without any).

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
        effects: dict[int, Tensor] = {}
        if most and error:
            effects = head_effects(self.model, self.batches, self.exact, self.plain, self.progress.update)
        total = sum(float(each.clamp(min=0).sum()) for each in effects.values())
        shares: dict[str, float] = {}
        for (layer, head), effect in largest_effects(effects, 2 * most).items():
            more = {**self.kept, layer: [*self.kept.get(layer, ()), head]}
            if len(shares) == most or len(more[layer]) == self.heads[layer]:
                continue
            came = self._error(more)
            if came**2 <= (1 - _WORTH) * error**2:
                self.kept, error, shares[f"{layer}.{head}"] = more, came, round(effect / total, 4)
        found = {"tokens": self.tokens, "exact heads": shares, "error": error, "error without exact heads": without}
        found |= {f"held-out {name}": None for name in ("error", "error without exact heads")}
        if held_out:
            exact = exact_results(self.model, held_out, self.progress.update)
            for name, heads in (("error", self.kept), ("error without exact heads", {})):
                found[f"held-out {name}"] = self._error(heads, held_out, exact)
        return AttentionPlan(self._layers(), found)

    def _error(
        self,
        heads: Mapping[int, Sequence[int]],
        batches: Sequence[Batch] | None = None,
        exact: Sequence[Results] | None = None,
    ) -> float:
        texts, wanted = self.batches if batches is None else batches, self.exact if exact is None else exact
        choice: dict[int | None, Candidate] = {None: self.plain}
        choice |= {layer: self.plain.with_exact_heads(some) for layer, some in heads.items()}
        return compare_models(self.model, texts, wanted, choice, self.progress.update).error

    def _layers(self) -> tuple[LayerChoice, ...]:
        count = 1 + max(*self.heads, *self.left, 0)
        chosen = [
            self.plain.with_exact_heads(self.kept.get(layer, ())) if layer in self.heads else SOFTMAX
            for layer in range(count)
        ]
        return tuple(LayerChoice(each.method, each.options) for each in chosen)
