"""T5 and its kin: relative positions as a small object in place of transformers' n x n numbers for each head.

Their first layer, or in UMT5 each, makes the bias of all pairs of tokens (1, h, n, n) by `compute_bias`, and hands it
to the layers after it, which pass it to attention as `position_bias`. In an encoder that is set to a method which takes
a bias of positions, `compute_bias` gives `nystrom.RelativeBuckets` of the layer's table instead, and no layer looks
into it on its way. Layers of it that are exact make the numbers of all pairs, as transformers does.

Decoders keep transformers' exact attention and bias, in their own layers and in cross-attention.
"""

import inspect
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from nystrom.attention.plan import PLAN
from nystrom.attention.position_bias import PositionBias, RelativeBuckets
from nystrom.attention.registry import METHODS

# Layers whose `compute_bias` reads a table of buckets alone. UDOP, whose layers have it too, adds tables of pages.
_OF_T5 = {
    *("T5Attention", "MT5Attention", "UMT5Attention", "SwitchTransformersAttention", "LongT5Attention"),
    "Pop2PianoAttention",
}


def has_buckets(layer: nn.Module) -> bool:
    """Whether a layer has T5's relative positions, or is handed those of one that has."""
    return any(kind.__name__ in _OF_T5 for kind in type(layer).__mro__)


def is_handed_positions(layer: Any) -> bool:
    """Whether it is a layer of an encoder that hands its relative positions to the next, as all do except UMT5's."""
    if not has_buckets(layer) or layer.is_decoder:
        return False
    return "position_bias" in inspect.signature(layer.forward).parameters


def takes_bias(method: str) -> bool:
    """Whether a method takes a bias of positions; in a plan, each layer's method says so when it runs."""
    return method == PLAN or METHODS[method].bias


def read_tables(model: nn.Module) -> None:
    """Let the layers of a model with T5's relative positions give an object where a method takes it."""
    for kind in {type(layer) for layer in model.modules() if has_buckets(layer)}:
        _read_table(kind)


def beside(bias: Any, query: Float[Tensor, "b h n d"]) -> Any:
    """A bias that a layer hands to another, on the device of the other's queries; all else as it came."""
    if not isinstance(bias, RelativeBuckets) or bias.table.device == query.device:
        return bias
    return replace(bias, table=bias.table.to(query.device))


def pairs(bias: PositionBias, query: Float[Tensor, "b h n d"]) -> Float[Tensor, "one h n n"]:
    """The bias of all pairs of tokens, for a layer of exact attention."""
    places = bias.places(query)
    distance = bias.distance(places, places)
    return torch.stack([bias.at_distance(each, distance) for each in bias.weight.to(query.dtype)], dim=1)


def _read_table(kind: Any) -> None:
    made = kind.compute_bias
    if hasattr(made, "__wrapped__"):
        return

    @wraps(made)
    def compute_bias(self: Any, *lengths: Any, **named: Any) -> Any:
        method = self.config._attn_implementation
        if self.is_decoder or method not in (*METHODS, PLAN) or not takes_bias(method):
            return made(self, *lengths, **named)
        # Hooks that bring, gather or adapt the table are around the call of its module.
        buckets = torch.arange(self.relative_attention_num_buckets, device=named.get("device"))
        # In training, checkpointing by re-entry runs this without a graph, and the layers that get it later with one.
        with torch.set_grad_enabled(self.training or torch.is_grad_enabled()):
            table = self.relative_attention_bias(buckets).T
        return RelativeBuckets(table, self.relative_attention_max_distance)

    kind.compute_bias = compute_bias
