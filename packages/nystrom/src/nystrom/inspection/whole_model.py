"""A model's hidden states and predictions, and how far a method moves them from those of exact attention."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from nystrom.attention.mask_values import real_tokens
from nystrom.inspection.candidates import EXACT, Candidate
from nystrom.integrations.layer_calls import LayerCall, attend_by, intercepted

Batch = Mapping[str, Any] | Tensor


@dataclass(frozen=True)
class WholeModel:
    """A method in all layers of a model.

    Attributes:
        error: Relative error of the hidden states after the last layer, over the real tokens of all texts; infinite if
            states are not finite.
        changed: Share of the predictions that change; None without a head that classifies.
    """

    error: float
    changed: float | None


class Results(NamedTuple):
    """The outputs of a model at the real tokens of a batch."""

    # Hidden states after the last layer; for models outside of transformers, the first output
    hidden: Float[Tensor, "t w"]
    # The class of each sequence, or of each real token; None without a head that classifies
    predictions: Int[Tensor, " p"] | None


@torch.no_grad()
def results_of(model: nn.Module, batch: Batch) -> Results:
    """Run a model, of transformers or any Module, without gradients, on inputs by name or its only one.

    Raises:
        ValueError: It returns no tensor of hidden states.
    """
    return run_model(model, batch)


def run_model(model: nn.Module, batch: Batch) -> Results:
    """The same as `results_of`, with gradients if they are enabled."""
    seen: list[Any] = []
    body = model.base_model if isinstance(model, PreTrainedModel) else model
    hook = body.register_forward_hook(lambda module, inputs, out: seen.append(out))
    try:
        out = model(**batch) if isinstance(batch, Mapping) else model(batch)
    finally:
        hook.remove()
    hidden = _first(seen[0])
    if not isinstance(hidden, Tensor) or hidden.ndim < 2:
        raise ValueError(f"{type(body).__name__} gives a {type(hidden).__name__} first; expected its hidden states.")
    keep = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    real = None
    if isinstance(keep, Tensor) and keep.shape == hidden.shape[:2]:
        real = real_tokens("attention_mask", keep)
    logits = getattr(out, "logits", None)
    predictions = None
    if isinstance(logits, Tensor) and logits.shape[-1] > 1:
        predictions = _real(logits.argmax(dim=-1), real if logits.ndim == 3 else None).flatten()
    return Results(_real(hidden, real).flatten(0, -2), predictions)


def exact_results(
    model: nn.Module, batches: Sequence[Batch], tick: Callable[[], object] = lambda: None
) -> list[Results]:
    """Results of a model for its inputs with exact attention in all layers; `tick` is called after each."""
    results = []
    with intercepted(model, lambda call: attend_by(EXACT, call, {})):
        for batch in batches:
            results.append(results_of(model, batch))
            tick()
    return results


def compare_models(
    model: nn.Module,
    batches: Sequence[Batch],
    exact: Sequence[Results],
    choice: Mapping[int | None, Candidate] | None,
    tick: Callable[[], object] = lambda: None,
) -> WholeModel:
    """Run a model with a method in each layer, and compare it with exact attention.

    Args:
        exact: Results of the model for the batches with exact attention.
        choice: The method of each layer by its number, under None that of all others; without it the model's own.
        tick: Is called after each batch.
    """

    def attend(call: LayerCall) -> Tensor:
        assert choice is not None, "the model's own attention is not intercepted"
        candidate = choice.get(call.layer, choice[None])
        return attend_by(candidate.method, call, candidate.options)

    off = size = 0.0
    changed = count = 0
    for batch, wanted in zip(batches, exact, strict=True):
        with nullcontext() if choice is None else intercepted(model, attend):
            came = results_of(model, batch)
        off += float((came.hidden.double() - wanted.hidden.double()).square().sum())
        size += float(wanted.hidden.double().square().sum())
        if came.predictions is not None and wanted.predictions is not None:
            changed += int((came.predictions != wanted.predictions).sum())
            count += wanted.predictions.numel()
        tick()
    error = (off / size) ** 0.5 if size else 0.0
    return WholeModel(error if math.isfinite(error) else math.inf, changed / count if count else None)


def _first(out: Any) -> Any:
    if isinstance(out, Mapping):
        out = tuple(out.values())
    return out[0] if isinstance(out, tuple | list) else out


def _real(x: Tensor, real: Tensor | None) -> Tensor:
    return x if real is None else x[real]
