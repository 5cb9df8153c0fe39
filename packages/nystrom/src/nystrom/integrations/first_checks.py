"""Checks of a model before its first call: whether its layers would refuse the method that it is set to.

A layer raises when it runs (`nystrom.integrations.attention_interface`). If its code and attributes show this before,
the name is refused where it is given: when a model is made or loaded, by `set_attn_implementation` and by
`set_attention`.

| known now | by |
|---|---|
| no layer asks for an attention by name | the code of the classes |
| no layer would get the name | the configurations of the layers |
| a causal layer, and a method that cannot be causal | `is_causal` of the layer, and of its configuration |
| a layer that does not say whether it is causal | no such attribute, and none in its code |
| sinks, soft capping, biases of relative positions | the arguments in its code, and the attributes of the layer |

Known in the first call alone are masks, which a model makes of its inputs, and what it passes from call to call.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import CodeType
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from nystrom.attention.registry import METHODS
from nystrom.integrations.attention_interface import SERVED, is_guess, refuse_causal, refuse_guess, refuse_term
from nystrom.integrations.mask_interface import raise_ignores_attn_implementation
from nystrom.integrations.relative_positions import has_buckets, takes_bias

# Attributes of layers, and of configurations, that add a bias of positions to a mask.
_BIASED_LAYERS = ("relative_position_bias", "bias_u")
_BIASED_MODELS = ("use_relative_position_bias", "use_shared_relative_position_bias")


def check_model(model: nn.Module) -> None:
    """Raise ValueError if the layers of a model would not run the methods that they are set to, where that is known."""
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    for part in parts:
        method = part.config._attn_implementation
        check_asks_anywhere(part, method)
        if method in SERVED and any(getattr(part.config, name, False) for name in _BIASED_MODELS):
            refuse_term(part, method, "a bias")
    for layer in asking_layers(model):
        if (method := layer.config._attn_implementation) in SERVED:
            check_layer(layer, method)


@contextmanager
def unchanged_if_refused(model: nn.Module) -> Iterator[None]:
    """Give all modules their configurations and methods back if this context raises."""
    before: list[tuple[Any, Any]] = [(module, module.config) for module in model.modules() if hasattr(module, "config")]
    names = [(config, vars(config).get("_attn_implementation_internal")) for _, config in before]
    try:
        yield
    except ValueError:
        for module, config in before:
            module.config = config
        for config, name in names:
            config._attn_implementation_internal = name
        raise


def check_asks_anywhere(model: PreTrainedModel, method: str | None) -> None:
    """Check that a model contains a layer that may look up a method, and that it is none that was only guessed.

    Raises:
        ValueError: It has attention, but none that asks transformers' AttentionInterface; or none of its layers reads
            the configuration that names the method; or the method is a likely guess of a name.
    """
    if method is not None and is_guess(method):
        refuse_guess(method)
    if method not in SERVED:
        return
    kinds = {type(module) for module in model.modules()}
    if any("attention" in kind.__name__.lower() for kind in kinds) and not any(map(_asks, kinds)):
        raise_ignores_attn_implementation(type(model), method)


def check_reaches(model: PreTrainedModel) -> None:
    """Raise ValueError if all layers read the configuration of a part, and that names another attention."""
    method = model.config._attn_implementation
    layers = list(asking_layers(model))
    if method in SERVED and layers and all(layer.config._attn_implementation not in SERVED for layer in layers):
        parts = ", ".join(map(repr, model.config.sub_configs))
        raise ValueError(
            f"attn_implementation={{'': {method!r}}} changes no layer of {type(model).__name__}, whose layers read the "
            f"configuration of a part: name the parts, {parts}, or pass {method!r} alone for all of them."
        )


def asking_layers(model: nn.Module) -> Iterator[Any]:
    """The layers of a model whose code looks up an attention by the name in their configuration."""
    for module in model.modules():
        if not isinstance(module, PreTrainedModel) and hasattr(module, "config") and _asks(type(module)):
            yield module


def check_layer(layer: Any, method: str) -> None:
    """Raise ValueError if the method cannot honour what a layer itself says of its attention."""
    names = _names(type(layer))
    if "is_causal" not in names:
        causal = getattr(layer, "is_causal", None)
        if causal and getattr(layer.config, "is_causal", None) is False:
            causal = False
        # Cross-attention may never run, as in Mllama without an image.
        unclear = causal is None and "Cross" not in type(layer).__name__
        if unclear or (causal and not (method in METHODS and METHODS[method].causal)):
            refuse_causal(layer, method, causal)
    if "s_aux" in names and getattr(layer, "sinks", None) is not None:
        refuse_term(layer, method, "s_aux")
    if "softcap" in names and getattr(layer, "attn_logit_softcapping", None) is not None:
        refuse_term(layer, method, "softcap")
    if has_buckets(layer) and takes_bias(method):
        return
    # Conformers have biases for some kinds of positions; others of this name for all.
    if "position_bias" in names and getattr(layer, "position_embeddings_type", "relative") in (
        "relative",
        "relative_key",
    ):
        refuse_term(layer, method, "position_bias")
    if any(getattr(layer, name, None) is not None for name in _BIASED_LAYERS):
        refuse_term(layer, method, "a bias")


@cache
def _asks(kind: type[nn.Module]) -> bool:
    """Whether the code of a class, or of a base class, calls the interface's `get_interface`."""
    return any({"get_interface", "ALL_ATTENTION_FUNCTIONS"} & set(code.co_names) for code in _codes(kind))


@cache
def _names(kind: type[nn.Module]) -> frozenset[str]:
    """The names of the arguments that `forward` passes on: constants of its code, alone or in a tuple."""
    code = inspect.unwrap(kind.forward).__code__
    flat = [name for const in code.co_consts for name in (const if isinstance(const, tuple) else (const,))]
    return frozenset(name for name in flat if isinstance(name, str))


def _codes(kind: type[nn.Module]) -> list[CodeType]:
    # Transformers' base class names the interface, too, where it checks the name of an attention.
    owners = [owner for owner in kind.__mro__ if owner.__module__ != PreTrainedModel.__module__]
    functions = [inspect.unwrap(member) for owner in owners for member in vars(owner).values() if callable(member)]
    return [code for function in functions if (code := getattr(function, "__code__", None)) is not None]
