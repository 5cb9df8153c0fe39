r"""What each attention layer of a running model is given, and another attention in its place.

`intercepted(model, attend)` lets `attend` compute the attention of each layer while it lasts. Two kinds of layers are
served, the same that the methods of this library run in:

- layers of a transformers model that ask transformers' AttentionInterface; local ones, and those under a mask per pair
  of tokens, keep their exact attention and are not shown to `attend`;
- layers that hold a method of this library (`nystrom.models`, `nystrom.MultiheadAttention`, and what
  `nystrom.replace_attention` put in). A skip convolution of the values is added to what `attend` gives.

Layers are numbered in the order in which they run, those that are not shown included.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

from nystrom.attention.heads import AttentionHeads
from nystrom.attention.registry import METHODS, find_function
from nystrom.attention.skip import depthwise_skip
from nystrom.integrations.attention_interface import attends_elsewhere, choose_route
from nystrom.integrations.mask_interface import check_asks, make_mask
from nystrom.integrations.modules import DEFAULTS

_INTERCEPTED = "nystrom_intercepted"
# What the layers must be able to run: the errors of the interface name it.
_ASKED = "nystrom"


class LayerCall(NamedTuple):
    """One call of one attention layer.

    Attributes:
        layer: Its number, in the order in which layers run, from 0.
        name: Its name in the model.
        q: Queries.
        k: Keys, repeated for each head where heads share them.
        v: Values, repeated likewise.
        keep: Real keys; None where all are.
        query_keep: Real queries; None where all are.
        scale: Factor on the scores; None means 1 / sqrt(d).
        elsewhere: Whether the keys are other tokens than the queries, though there are as many.
    """

    layer: int
    name: str
    q: Float[Tensor, "b h n d"]
    k: Float[Tensor, "b h s d"]
    v: Float[Tensor, "b h s e"]
    keep: Bool[Tensor, "b s"] | None
    query_keep: Bool[Tensor, "b n"] | None
    scale: float | None
    elsewhere: bool = False

    def said_queries(self) -> Bool[Tensor, "b n"] | None:
        """Real queries, also where all are but some keys are not: a function would take None for the keys' mask.

        Without any mask, methods with a rule about positions would take as many queries as keys for the same tokens.
        """
        if self.query_keep is None and (self.keep is not None or self.elsewhere):
            return torch.ones(self.q.shape[0], self.q.shape[2], dtype=torch.bool, device=self.q.device)
        return self.query_keep

    def sequence(self, place: int) -> "LayerCall":
        """The call for one sequence of the batch alone."""
        one = slice(place, place + 1)
        keep, query_keep = (None if x is None or bool(x[one].all()) else x[one] for x in (self.keep, self.query_keep))
        if self.query_keep is self.keep:
            # Methods with a rule about positions know self-attention by the one mask.
            query_keep = keep
        return self._replace(q=self.q[one], k=self.k[one], v=self.v[one], keep=keep, query_keep=query_keep)


Attend = Callable[[LayerCall], Float[Tensor, "b h n e"]]


def attend_by(method: str, call: LayerCall, options: Mapping[str, Any]) -> Float[Tensor, "b h n e"]:
    """The output of a method without learned weights for a layer's call.

    Args:
        method: Name of the method.
        call: What the layer was given.
        options: Options of the method; the scale is the layer's where the method has one.
    """
    named: dict[str, Any] = DEFAULTS.get(method, {}) | dict(options)
    if any(option.name == "scale" for option in fields(METHODS[method].options)):
        named["scale"] = call.scale
    return find_function(method)(call.q, call.k, call.v, keep=call.keep, query_keep=call.said_queries(), **named)


@contextmanager
def intercepted(
    model: nn.Module, attend: Attend, *, left: Callable[[LayerCall], object] | None = None
) -> Iterator[None]:
    """Let another function compute the attention of a model's layers while this context lasts.

    Args:
        model: The model; it comes out as it went in.
        attend: Gives the output of a layer for its call.
        left: Is shown the calls of layers that keep their exact attention; their masks are not in the call.

    Raises:
        ValueError: No layer of the model can be served; and, when the model runs, what a layer asks for that no method
            of this library can honour, such as causal attention.
    """
    heads = {module: name for name, module in model.named_modules() if isinstance(module, AttentionHeads)}
    calls = _Calls(attend, left)
    if heads:
        hooks = [module.register_forward_hook(calls.of_heads(name), with_kwargs=True) for module, name in heads.items()]
        # Layers may share one Module of a method, so its number is counted at the start of each pass of the model.
        hooks.append(model.register_forward_pre_hook(calls.start))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        return
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"{type(model).__name__} holds no attention of this library and is no model of transformers: put one into "
            'its nn.MultiheadAttention first, with nystrom.replace_attention(model, "softmax").'
        )
    check_asks(type(model), _ASKED)
    AttentionInterface.register(
        _INTERCEPTED, calls.of_interface({module: name for name, module in model.named_modules()})
    )
    AttentionMaskInterface.register(_INTERCEPTED, lambda **named: make_mask(_ASKED, **named))
    configs: dict[int, Any] = {
        id(module.config): module.config for module in model.modules() if getattr(module, "config", None)
    }
    before = [
        (config, config._attn_implementation, getattr(config, "attention_options", None)) for config in configs.values()
    ]
    hook = model.register_forward_pre_hook(calls.start)
    try:
        for config, _, options in before:
            config._attn_implementation = _INTERCEPTED
            if options is not None:
                config.attention_options = {}
        yield
    finally:
        hook.remove()
        for config, implementation, options in before:
            config._attn_implementation = implementation
            if options is not None:
                config.attention_options = options
        # What was registered holds the model.
        AttentionInterface.register(_INTERCEPTED, _ended)


def _ended(*tensors: Tensor, **named: Any) -> tuple[Tensor, None]:
    """What stands under the name between two contexts."""
    raise RuntimeError(f"{_INTERCEPTED} attention serves only inside `intercepted`.")


class _Calls:
    """Numbers the layers of a pass, and turns what they are given into calls."""

    def __init__(self, attend: Attend, left: Callable[[LayerCall], object] | None):
        self.attend, self.left, self.count = attend, left, 0

    def start(self, module: nn.Module, inputs: Any) -> None:
        """Begin a pass of the model."""
        self.count = 0

    def next(self) -> int:
        """The number of the layer that runs now."""
        self.count += 1
        return self.count - 1

    def of_heads(self, name: str) -> Callable[..., Tensor]:
        """The hook of a method of this library in a layer."""

        def hook(module: nn.Module, tensors: tuple[Tensor, ...], named: dict[str, Any], out: Tensor) -> Tensor:
            q, k, v = tensors
            keep, query_keep, skip = (named.get(key) for key in ("keep", "query_keep", "skip"))
            if query_keep is None and q.shape[2] == k.shape[2]:
                query_keep = keep
            assert isinstance(module, AttentionHeads)
            scale = getattr(module.options, "scale", None)
            elsewhere = query_keep is not keep and q.shape[2] == k.shape[2]
            result = self.attend(LayerCall(self.next(), name, q, k, v, keep, query_keep, scale, elsewhere))
            return result if skip is None else depthwise_skip(v, skip, keep=keep, to=result)

        return hook

    def of_interface(self, names: Mapping[nn.Module, str]) -> Callable[..., tuple[Tensor, None]]:
        """The attention function for transformers' AttentionInterface."""

        def attention(
            module: nn.Module,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attention_mask: Tensor | None,
            scaling: float | None = None,
            dropout: float = 0.0,
            **named: Any,
        ) -> tuple[Tensor, None]:
            number = self.next()
            route = choose_route(_ASKED, module, attention_mask, named)
            groups = query.shape[1] // key.shape[1]
            keys, values = repeat_kv(key, groups), repeat_kv(value, groups)
            call = LayerCall(number, names[module], query, keys, values, route.keep, route.keep, scaling)
            if route.exact:
                if self.left is not None:
                    self.left(call)
                return sdpa_attention_forward(
                    module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=False
                )
            elsewhere = query.shape[2] == key.shape[2] and attends_elsewhere(module)
            if query.shape[2] != key.shape[2] or elsewhere:
                call = call._replace(query_keep=None, elsewhere=elsewhere)
            return self.attend(call).transpose(1, 2).contiguous(), None

        return attention
