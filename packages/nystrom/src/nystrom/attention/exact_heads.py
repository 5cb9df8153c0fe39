"""Some heads of a layer attend exactly, by fused attention, and the others by the method of the layer.

In a trained model two heads of 72 may make most of the error of its hidden states; exact attention in these costs
little (docs/inspect.md). Which heads matter belongs to a model, so `exact_heads` is an option of layers and plans: the
functions, which know no layer, do not take it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nystrom.attention.functions import FUNCTIONS
from nystrom.attention.methods.near_far import near_far_attention
from nystrom.attention.methods.nystrom import nystrom_rows
from nystrom.attention.methods.softmax import softmax_attention
from nystrom.attention.options import LayerOptions, check_exact_heads
from nystrom.attention.position_bias import PositionBias
from nystrom.attention.registry import METHODS
from nystrom.shapes import Group, Masks

# Gets which heads these are, and their tensors.
OfHeads = Callable[..., Tensor]
# Found when this file is imported, since torch.compile cannot trace `fields`.
_SCALED = frozenset(name for name, entry in METHODS.items() if "scale" in {each.name for each in fields(entry.options)})


def attend_by_options(
    method: str,
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    v: Float[Tensor, "b h s e"],
    masks: Masks,
    scale: float | None,
    options: Mapping[str, Any],
) -> Float[Tensor, "b h n e"]:
    """The method of a layer by its name, with the layer's own scale, for methods that have one; see `attend_in_two`.

    Args:
        options: Options of the function, and of layers.
    """
    options = dict(options)
    heads = LayerOptions(exact_heads=options.pop("exact_heads", ())).exact_heads
    is_causal, group, bias = options.get("is_causal", False), options.get("group"), options.pop("bias", None)

    def exact(some: list[int], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        of_these = None if bias is None else bias.of_heads(some)
        return exact_attention(q, k, v, masks, scale=scale, is_causal=is_causal, group=group, bias=of_these)

    def by_method(some: list[int] | slice, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        own: dict[str, Any] = {"scale": scale} if method in _SCALED else {}
        if bias is not None:
            own["bias"] = bias.of_heads(some)
        return FUNCTIONS[method](q, k, v, **masks._asdict(), **own, **options)

    return attend_in_two(heads, exact, by_method, q, k, v)


def attend_in_two(
    exact_heads: Sequence[int], exact: OfHeads, method: OfHeads, *tensors: Tensor
) -> Float[Tensor, "b h n e"]:
    """Run `exact` on some heads of the tensors and `method` on the others, and put the heads in their order again.

    Each gets the numbers of its heads, then their tensors. Without `exact_heads`, and for tensors whose heads cannot be
    told apart, which it refuses by name, `method` gets all as they came.

    Raises:
        ValueError: The tensors have no head of such a number, or no other heads.
    """
    h = tensors[0].shape[1] if tensors[0].ndim == 4 else 0
    if not exact_heads or any(not isinstance(x, Tensor) or x.ndim != 4 or x.shape[1] != h for x in tensors):
        return method(slice(None), *tensors)
    check_exact_heads(exact_heads, h)
    heads = [x.unbind(1) for x in tensors]
    outputs: dict[int, Tensor] = {}
    for attend, some in ((exact, [*exact_heads]), (method, [head for head in range(h) if head not in exact_heads])):
        out = attend(some, *(_beside([x[head] for head in some]) for x in heads))
        outputs |= dict(zip(some, out.unbind(1), strict=True))
    return _beside([outputs[head] for head in range(h)])


def _beside(heads: list[Float[Tensor, "b n d"]]) -> Float[Tensor, "b h n d"]:
    """The heads in the layout of a layer, in which those of a token are side by side."""
    return torch.stack(heads, dim=2).transpose(1, 2)


def exact_attention(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    v: Float[Tensor, "b h s e"],
    masks: Masks,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    group: Group = None,
    bias: PositionBias | None = None,
) -> Float[Tensor, "b h n e"]:
    """Exact attention in a layer of any method, with all that such a layer takes."""
    if is_causal:
        # All queries are among the first, which are exact.
        whole: dict[str, Any] = {"block_size": 1, "exact_up_to": q.shape[2], "is_causal": True}
        return near_far_attention(q, k, v, **masks._asdict(), scale=scale, group=group, bias=bias, **whole)
    return softmax_attention(q, k, v, **masks._asdict(), scale=scale, group=group, bias=bias)


def exact_rows(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    queries: Int[Tensor, " r"],
    masks: Masks,
    *,
    scale: float | None = None,
) -> Float[Tensor, "b h r s"]:
    """Rows of the matrix of exact attention, which is that of as many landmarks as tokens."""
    return nystrom_rows(q, k, queries, num_landmarks=max(q.shape[2], k.shape[2], 1), scale=scale, **masks._asdict())
