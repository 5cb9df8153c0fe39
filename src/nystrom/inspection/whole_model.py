"""A model's hidden states and predictions for one batch, whatever its class."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

Batch = Mapping[str, Any] | Tensor


class Results(NamedTuple):
    """What a model makes of the real tokens of a batch.

    Attributes:
        hidden: Hidden states after the last layer; of a model that is not transformers' its first output.
        predictions: The class of each sequence, or of each real token; None without a head that classifies.
    """

    hidden: Float[Tensor, "t w"]
    predictions: Int[Tensor, " p"] | None


def results_of(model: nn.Module, batch: Batch) -> Results:
    """Run a model, without gradients.

    Args:
        model: A model of transformers, or any Module.
        batch: Its inputs by name, or its only input.

    Raises:
        ValueError: It gives no tensor of hidden states.
    """
    seen: list[Any] = []
    body = model.base_model if isinstance(model, PreTrainedModel) else model
    hook = body.register_forward_hook(lambda module, inputs, out: seen.append(out))
    try:
        with torch.no_grad():
            out = model(**batch) if isinstance(batch, Mapping) else model(batch)
    finally:
        hook.remove()
    hidden = _first(seen[0])
    if not isinstance(hidden, Tensor) or hidden.ndim < 2:
        raise ValueError(f"{type(body).__name__} gives a {type(hidden).__name__} first; expected its hidden states.")
    keep = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    real = keep.bool() if isinstance(keep, Tensor) and keep.shape == hidden.shape[:2] else None
    logits = getattr(out, "logits", None)
    predictions = None
    if isinstance(logits, Tensor) and logits.shape[-1] > 1:
        predictions = _real(logits.argmax(dim=-1), real if logits.ndim == 3 else None).flatten()
    return Results(_real(hidden, real).flatten(0, -2), predictions)


def _first(out: Any) -> Any:
    if isinstance(out, Mapping):
        out = tuple(out.values())
    return out[0] if isinstance(out, tuple | list) else out


def _real(x: Tensor, real: Tensor | None) -> Tensor:
    return x if real is None else x[real]
