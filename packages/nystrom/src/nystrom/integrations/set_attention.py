"""Set the attention of one part of a transformers model, and check what a model really runs.

`set_attn_implementation` of transformers writes into a configuration that parts may share: in Whisper or BART the
decoder would get the encoder's method, and raise. `set_attention` gives a part a configuration of its own first.

A model that is set to a method may still run exact attention in some layers. `check_attention` runs the model once and
reports what each layer did.

The models of this library hold their methods themselves, without the interface: these are replaced directly.
"""

import copy
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from nystrom.attention.heads import AttentionHeads
from nystrom.attention.plan import PLAN, AttentionPlan, plan_of_options
from nystrom.attention.registry import METHODS
from nystrom.checks import check_names
from nystrom.integrations.attention_interface import (
    REGISTERED,
    SERVED,
    Route,
    option_names,
    refuse_name,
)
from nystrom.integrations.first_checks import check_model, unchanged_if_refused
from nystrom.integrations.layer_calls import watched
from nystrom.integrations.layer_numbers import number_layers
from nystrom.integrations.mask_interface import check_asks
from nystrom.integrations.patches import share_configurations
from nystrom.integrations.position_tables import watch_positions, watched_positions
from nystrom.integrations.relative_positions import is_handed_positions, read_tables
from nystrom.models.blocks import EncoderSelfAttention
from nystrom.models.encoder import EncoderPreTrainedModel


class AttentionUse(NamedTuple):
    """The attention that the layers of a model ran.

    Attributes:
        method: Name of the method, or of a plan.
        layers: Layers that ran the method, by module name, each with its options.
        methods: The method of each of these layers.
        exact: Layers that were set to the method but ran transformers' exact attention: local ones, and those in
            `exact_layers`.
    """

    method: str
    layers: dict[str, dict[str, Any]]
    exact: tuple[str, ...]
    methods: dict[str, str]


def set_attention(part: nn.Module, method: str | AttentionPlan, options: Mapping[str, Any] | None = None) -> None:
    """Set the attention method of a part of a transformers model, or of each layer; the rest is unchanged.

    Args:
        part: A model of transformers or of this library, or a part that makes its own masks, such as
            `model.get_encoder()`. With "sdpa", also a single layer of a transformers model.
        method: A registered method, "sdpa" for exact attention, or a plan (`nystrom.attention.plan`) for all layers of
            a model.
        options: Options of the method, such as {"num_landmarks": 32}; they replace `config.attention_options`.

    Raises:
        ValueError: An unknown method or option, a part that cannot use it, a plan for a different number of layers, or
            a plan or `exact_layers` if layers have no numbers.
    """
    if isinstance(method, AttentionPlan) or method == PLAN:
        plan = method if isinstance(method, AttentionPlan) else plan_of_options(options or {})
        _set_plan(part, plan)
        return
    if method in METHODS and method not in REGISTERED:
        refuse_name("method", method)
    check_names("attention method", [method], (*REGISTERED, "sdpa"))
    options = dict(options or {})
    if isinstance(part, EncoderPreTrainedModel):
        part.set_attention("softmax" if method == "sdpa" else method, options)
        return
    check_names(f"option of {method}", options, set() if method == "sdpa" else option_names(method))
    if method != "sdpa":
        if not isinstance(part, PreTrainedModel):
            raise ValueError(
                f"part is a {type(part).__name__}, which is not a model of transformers and makes no masks: pass the "
                "model, or its encoder (model.get_encoder()); for other models use nystrom.replace_attention."
            )
        check_asks(type(part), method)
        if "exact_layers" in options:
            number_layers(part)
    elif not isinstance(part, PreTrainedModel):
        _check_alone(part)
    with unchanged_if_refused(part):
        _write(part, method, options)
        check_model(part)
    share_configurations(part)
    if method != "sdpa":
        watch_positions(part)
        read_tables(part)


def _check_alone(part: nn.Module) -> None:
    """Raise for a layer that is to be exact while others hand it a bias in a form of their method."""
    for layer in part.modules():
        config: Any = getattr(layer, "config", None)
        if is_handed_positions(layer) and config._attn_implementation in SERVED:
            raise ValueError(
                f"part is a {type(part).__name__}, which other layers hand their relative positions to: set its "
                "encoder, with the options exact_layers=(number, ...) for this layer, or with 'sdpa' as a whole."
            )


def _set_plan(part: nn.Module, plan: AttentionPlan) -> None:
    if not isinstance(part, PreTrainedModel):
        raise ValueError(
            f"part is a {type(part).__name__}, which is not a model of transformers: a plan is for one, or its encoder "
            "(model.get_encoder()); for other models use nystrom.replace_attention, with one method."
        )
    plan.check_layers(part.config.num_hidden_layers, type(part).__name__)
    if isinstance(part, EncoderPreTrainedModel):
        part.set_attention(PLAN, plan.options)
        return
    for method, options in plan.layers:
        check_names("attention method of a plan", [method], (*REGISTERED, "softmax"))
        assert "exact_layers" not in options, "it is no option of a method"
    check_asks(type(part), PLAN)
    number_layers(part)
    with unchanged_if_refused(part):
        _write(part, PLAN, plan.options)
        check_model(part)
    watch_positions(part)
    read_tables(part)


def _write(part: nn.Module, method: str, options: dict[str, Any]) -> None:
    # The memo of a deep copy says which object became which: parts of a configuration are copied with the whole.
    copies: dict[int, Any] = {}
    holders = [module for module in part.modules() if getattr(module, "config", None) is not None]
    if not holders:
        raise ValueError(
            f"part is a {type(part).__name__}, and nothing in it has a configuration that could name its attention: "
            "pass a model of transformers or a layer of one; a model of nystrom.models takes a plan for its layers."
        )
    for module in holders:
        copy.deepcopy(module.config, copies)
    for module in holders:
        module.config = copies[id(module.config)]
        module.config._attn_implementation = method
        module.config.attention_options = options


def check_attention(model: PreTrainedModel, inputs: Mapping[str, Any]) -> AttentionUse:
    """Run a model once, without gradients, and report which layers ran the method that it is set to.

    Args:
        model: A model of transformers, or of this library.
        inputs: Inputs of the model by name.

    Raises:
        ValueError: The model is set to no method of this library, does not ask for the one it is set to, runs exact
            attention in all layers, or is given more tokens than its table has positions; and what its layers raise.
    """
    if isinstance(model, EncoderPreTrainedModel):
        return _check_own(model, inputs)
    parts = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    methods = {name for part in parts if (name := part.config._attn_implementation) in SERVED}
    if not methods:
        # Asking again would not help a model that ignored the name.
        check_asks(type(model), "nystrom")
    if len(methods) != 1:
        came = " and ".join(map(repr, sorted(methods))) or repr(model.config._attn_implementation)
        raise ValueError(
            f"{type(model).__name__} is set to {came}; expected one method of {', '.join(REGISTERED)}: call "
            'model.set_attn_implementation("nystrom"), or nystrom.integrations.set_attention on a part of it.'
        )
    (method,) = methods
    for part in parts:
        if part.config._attn_implementation == method:
            check_asks(type(part), method)
    names = {module: name for name, module in model.named_modules()}
    layers: dict[str, dict[str, Any]] = {}
    exact: dict[str, None] = {}
    ran: dict[str, str] = {}

    def note(module: nn.Module, route: Route, *_: object) -> None:
        if route.exact:
            exact[names[module]] = None
        else:
            layers[names[module]] = route.options
            ran[names[module]] = route.method

    with torch.no_grad(), watched_positions(model), watched(method, note):
        model(**inputs)
    use = AttentionUse(method, layers, tuple(exact), ran)
    _check_gain(model, use)
    return use


def _check_own(model: EncoderPreTrainedModel, inputs: Mapping[str, Any]) -> AttentionUse:
    """The methods of a model of this library, read from its layers, all of which run in each pass."""
    with torch.no_grad():
        model(**inputs)
    heads = {
        name: module.method
        for name, module in model.named_modules()
        if isinstance(module, EncoderSelfAttention) and module.method is not None
    }
    served = {name: method for name, method in heads.items() if method.method != "softmax"}
    use = AttentionUse(
        model.config.attention,
        {name: _changed_options(method) for name, method in served.items()},
        tuple(name for name in heads if name not in served),
        {name: method.method for name, method in served.items()},
    )
    _check_gain(model, use)
    return use


def _changed_options(method: AttentionHeads) -> dict[str, Any]:
    """The options of a method that differ from its defaults."""
    named = {entry.name: getattr(method.options, entry.name) for entry in fields(method.options)}
    usual = type(method.options)()
    return {name: value for name, value in named.items() if value != getattr(usual, name)}


def _check_gain(model: PreTrainedModel, use: AttentionUse) -> None:
    if not use.layers:
        what = f"ran exact attention in {', '.join(use.exact)}" if use.exact else "never asked for it"
        way_out = (
            ": leave the plan out, or make one with a larger budget or for longer texts." if use.method == PLAN else "."
        )
        raise ValueError(
            f"{type(model).__name__} is set to {use.method!r} but {what}, so nothing is gained by the method{way_out}"
        )
