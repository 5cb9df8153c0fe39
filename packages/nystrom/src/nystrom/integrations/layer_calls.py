r"""Intercept the inputs of each attention layer of a running model, and compute its attention another way.

`intercepted(model, attend)` is a context in which `attend` computes the attention of each layer. Two kinds of layers
are supported, the same as for the methods of this library:

- layers of a transformers model that ask transformers' AttentionInterface; local ones, and those under a mask per pair
  of tokens, keep their exact attention and are not shown to `attend`; those with T5's relative positions raise;
- layers that hold a method of this library (`nystrom.models`, `nystrom.MultiheadAttention`, and what
  `nystrom.replace_attention` put in). A skip convolution of the values is added to what `attend` gives.

Layers are numbered in the order in which they run, including those that are not shown.

`watched(method, see)` is a context in which layers of transformers models that are set to a method compute what they
did, and `see` looks on.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

from nystrom.attention.exact_heads import attend_by_options
from nystrom.attention.heads import AttentionHeads
from nystrom.attention.skip import depthwise_skip
from nystrom.integrations.attention_interface import Route, choose_route, masks_of
from nystrom.integrations.mask_interface import check_asks, make_mask
from nystrom.integrations.modules import default_options
from nystrom.integrations.position_tables import watch_positions
from nystrom.integrations.relative_positions import has_buckets
from nystrom.shapes import Masks

INTERCEPTED = "nystrom_intercepted"
# A method that the layers must be able to run: the errors of the interface name it.
_ASKED = "nystrom"
_PACKED = (
    "the model is given packed sequences, whose layers cannot be inspected one sequence at a time: pad them, and pass "
    "attention_mask."
)


class LayerCall(NamedTuple):
    """One call of one attention layer."""

    layer: int  # Number, from 0, in the order in which layers run
    name: str  # Name in the model
    q: Float[Tensor, "b h n d"]  # Queries
    k: Float[Tensor, "b h s d"]  # Keys, repeated for each head if heads share them
    v: Float[Tensor, "b h s e"]  # Values, repeated likewise
    masks: Masks  # Which tokens are real, and whether the call is self-attention
    scale: float | None  # Factor on the scores; None means 1 / sqrt(d)

    @property
    def keep(self) -> Bool[Tensor, "b s"] | None:
        """Real keys; None if all are."""
        return self.masks.settled()[0]

    def sequence(self, place: int) -> "LayerCall":
        """The call for a single sequence of the batch; a self-attention mask that masks nothing is dropped."""
        one = slice(place, place + 1)
        keep, *others = (None if mask is None else mask[one] for mask in self.masks)
        masks = Masks(None if keep is None or bool(keep.all()) else keep, *others)
        return self._replace(q=self.q[one], k=self.k[one], v=self.v[one], masks=masks)


Attend = Callable[[LayerCall], Float[Tensor, "b h n e"]]


def attend_by(method: str, call: LayerCall, options: Mapping[str, Any]) -> Float[Tensor, "b h n e"]:
    """The output of a method without learned weights for a layer's call; the scale is the layer's if the method has
    one.
    """
    named = default_options(method) | dict(options)
    return attend_by_options(method, call.q, call.k, call.v, call.masks, call.scale, named)


@contextmanager
def intercepted(
    model: nn.Module, attend: Attend, *, left: Callable[[LayerCall], object] | None = None
) -> Iterator[None]:
    """Let another function compute the attention of a model's layers while this context lasts.

    `attend` returns the output of a layer for its call; `left` sees the calls of layers that keep exact attention,
    which carry no masks.

    Raises:
        ValueError: No layer of the model is supported; or, when the model runs, a layer needs something that no method
            of this library supports, such as causal attention.
    """
    heads = {module: name for name, module in model.named_modules() if isinstance(module, AttentionHeads)}
    calls = _Calls(attend, left)
    if heads:
        # Layers may share one Module of a method, so its number is counted at the start of each pass of the model.
        hook = model.register_forward_pre_hook(calls.start)
        own = {module: module.__dict__.get("forward") for module in heads}
        try:
            for module, name in heads.items():
                module.forward = calls.of_heads(module, name)
            yield
        finally:
            hook.remove()
            for module, forward in own.items():
                module.__dict__.pop("forward", None)
                if forward is not None:
                    module.forward = forward
        return
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"{type(model).__name__} holds no attention of this library and is not a model of transformers: first "
            "replace "
            'its nn.MultiheadAttention with nystrom.replace_attention(model, "softmax").'
        )
    check_asks(type(model), _ASKED)
    AttentionInterface.register(
        INTERCEPTED, calls.of_interface({module: name for name, module in model.named_modules()})
    )
    AttentionMaskInterface.register(INTERCEPTED, lambda **named: make_mask(_ASKED, **named))
    configs: dict[int, Any] = {
        id(module.config): module.config for module in model.modules() if getattr(module, "config", None)
    }
    before = [
        (config, config._attn_implementation, getattr(config, "attention_options", None)) for config in configs.values()
    ]
    hooks = [model.register_forward_pre_hook(calls.start), *watch_positions(model)]
    try:
        for config, _, options in before:
            config._attn_implementation = INTERCEPTED
            if options is not None:
                config.attention_options = {}
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for config, implementation, options in before:
            config._attn_implementation = implementation
            if options is not None:
                config.attention_options = options
        # Release the model, which the function registered above holds.
        AttentionInterface.register(INTERCEPTED, _ended)


def _ended(*tensors: Tensor, **named: Any) -> tuple[Tensor, None]:
    """The registered function outside of any `intercepted` context; raises."""
    raise RuntimeError(f"{INTERCEPTED} attention works only inside `intercepted`.")


@contextmanager
def watched(
    method: str, see: Callable[[nn.Module, Route, tuple[Tensor, Tensor, Tensor, Tensor], float | None], object]
) -> Iterator[None]:
    """Let a function see each call of the layers, of any transformers model, that are set to a method.

    `see` gets the layer and its route; its queries, keys, values and output, as the interface has them; and its scale.
    """
    registered: Callable[..., tuple[Tensor, None]] = AttentionInterface()[method]

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
        result = registered(module, query, key, value, attention_mask, scaling, dropout, **named)
        route = choose_route(method, module, query, attention_mask, named)
        see(module, route, (query, key, value, result[0]), scaling)
        return result

    AttentionInterface.register(method, attention)
    try:
        yield
    finally:
        AttentionInterface.register(method, registered)


class _Calls:
    """Numbers the layers of a forward pass, and turns their inputs into calls."""

    def __init__(self, attend: Attend, left: Callable[[LayerCall], object] | None):
        self.attend, self.left, self.count = attend, left, 0

    def start(self, module: nn.Module, inputs: Any) -> None:
        """Begin a forward pass of the model."""
        self.count = 0

    def next(self) -> int:
        """The number of the layer that runs now."""
        self.count += 1
        return self.count - 1

    def of_heads(self, module: AttentionHeads, name: str) -> Callable[..., Tensor]:
        """In place of the forward pass of a method of this library in a layer."""

        def forward(q: Tensor, k: Tensor, v: Tensor, *, skip: Tensor | None = None, **named: Any) -> Tensor:
            if named.get("is_causal"):
                raise ValueError(
                    f"{name or 'the layer'} is causal, but each of its queries is looked at with all keys: leave out "
                    "is_causal."
                )
            if named.get("cu_seqlens") is not None:
                raise ValueError(_PACKED)
            if named.get("bias") is not None:
                raise ValueError(
                    f"{name or 'the layer'} has a bias of positions, which is not looked at: compare the outputs of "
                    "the model with those of one whose layers have method='softmax', which takes the bias, too."
                )
            masks = Masks(*(named.get(key) for key in Masks._fields))
            scale = getattr(module.options, "scale", None)
            result = self.attend(LayerCall(self.next(), name, q, k, v, masks, scale))
            return result if skip is None else depthwise_skip(v, skip, keep=masks.keep, to=result)

        return forward

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
            if has_buckets(module):
                raise ValueError(
                    f"{type(module).__name__} adds relative positions to its scores, which are not looked at: set the "
                    'encoder to "near_far" by nystrom.integrations.set_attention, and compare its states with those of '
                    '"sdpa".'
                )
            number = self.next()
            route = choose_route(_ASKED, module, query, attention_mask, named)
            if route.cu_seqlens is not None:
                raise ValueError(_PACKED)
            groups = query.shape[1] // key.shape[1]
            keys, values = repeat_kv(key, groups), repeat_kv(value, groups)
            masks = Masks(route.keep) if route.exact else masks_of(module, query, key, route.keep, declared=True)
            call = LayerCall(number, names[module], query, keys, values, masks, scaling)
            if route.exact:
                if self.left is not None:
                    self.left(call)
                return sdpa_attention_forward(
                    module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=False
                )
            return self.attend(call).transpose(1, 2).contiguous(), None

        return attention
