r"""The methods of this library as attention implementations in transformers' own models.

Importing `nystrom.integrations` registers each method without weights of its own with transformers' AttentionInterface
and AttentionMaskInterface, so that `attn_implementation="nystrom"` (or "skyformer", "performer", ...) works in
`from_pretrained`, `from_config` and `set_attn_implementation` of any encoder that asks these interfaces. Not
registered are "softmax", which transformers calls "sdpa", and "linformer", whose projections would have to be learned.

**Options** are those of the method, in `config.attention_options = {"num_landmarks": 32}` (of the model, or of a part,
such as `config.vision_config`; a saved model keeps it), or keyword arguments of one call, which take precedence, in
models that pass them on: `model(**x, num_landmarks=32)`. The option `exact_layers=(0, 1)` gives the layers with these
numbers exact attention; `nystrom.integrations.layer_numbers` says which layers have numbers. `exact_heads=(1,)` gives
it to these heads, of every layer or of one in a plan. The scale is the model's; "linear" has none. Nothing is drawn at
random: landmarks, samples and rotations are spread evenly, and random features come from one fixed seed, the same in
all layers, also in training.

**Masks.** Padding, at either end, is honoured: padded queries reach no landmark. In encoders they get the outputs of
exact attention over the real keys if the input has at most `MASKED_UP_TO` tokens, and zeros otherwise. Unsupported
requests raise an error that names them: causal attention (except with `near_far`), a mask or bias per pair of tokens,
any other pattern, a layer that is causal where its mask is not or the reverse, and `output_attentions`. Local layers
(ModernBERT's) and those in `exact_layers` run transformers' exact attention, with its mask and dropout. Elsewhere there
are no n x s weights, so dropout on them has no effect; a warning says so once.

**Packed sequences** in one row each attend only to themselves, in all layers. They are marked by `cu_seq_lens_q` and
`cu_seq_lens_k`, the keyword arguments of transformers' DataCollatorWithFlattening(return_flash_attn_kwargs=True), and
in decoders also by position_ids that restart.

**Decoders.** `near_far` also supports causal layers. A whole prompt or text uses causal near_far, which is exact up to
`exact_up_to` tokens; the tokens that follow attend exactly to the cache that transformers keeps, so `generate` works.
With a static cache, which holds more keys than the prompt has, the prompt is read exactly. Cross-attention is exact,
since an approximation would choose keys by later queries. Other methods raise.

**Cross-attention.** A mask of the keys does not show whether it is also the mask of the queries: if there is a mask,
the layer decides (`attends_elsewhere`), and a layer that could do either raises. In self-attention over a cache, such
as PEFT's prefix tuning of an encoder, the queries are the last keys.

A model that never asks the interface would run its own attention: creating it raises an error
(`nystrom.integrations.patches`). `nystrom.integrations.check_attention` runs a model once and reports what each layer
did.

Departs from the methods' own defaults in two places: "reformer" has shared_qk=False, since these encoders have keys;
"near_far" has the sizes of `near_far_sizes` for the longest input that the configuration names.
"""

import inspect
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.utils.output_capturing import _active_collector

from nystrom.attention.exact_heads import attend_by_options
from nystrom.attention.exact_limit import may_branch
from nystrom.attention.fused import fused_softmax
from nystrom.attention.mask_values import unignored_tokens
from nystrom.attention.parts.biased_softmax import biased_softmax
from nystrom.attention.plan import PLAN, plan_of_options
from nystrom.attention.position_bias import PositionBias
from nystrom.attention.registry import METHODS, WEIGHTLESS
from nystrom.checks import check_names, nearest_name
from nystrom.integrations.bert_names import longest_input
from nystrom.integrations.layer_numbers import number_of
from nystrom.integrations.mask_interface import make_mask, read_mask
from nystrom.integrations.modules import default_options
from nystrom.integrations.relative_positions import beside, has_buckets, pairs, takes_bias
from nystrom.shapes import Masks, cross_masks, is_number, zero_masked

# Names under which the methods are registered, and with the plan of a method for each layer.
REGISTERED = tuple(name for name in WEIGHTLESS if name != "softmax")
SERVED = (*REGISTERED, PLAN)
# Likely guesses of these names. Transformers would refuse them with a list of its own names alone.
GUESSES = {"nystromformer", "linformer", "softmax"} | {
    guess
    for name in REGISTERED
    for plain in (name, name.replace("_", "-"), name.replace("_", ""))
    for guess in (plain, f"{plain}_attention", f"{plain}-attention")
    if guess != name
}
# Most tokens of an input whose masked queries get the outputs of exact attention, as ColBERT's query expansion needs:
# for so few it costs little.
MASKED_UP_TO = 256
# Attribute of the layers of a model whose tokens are cut over ranks: their process group.
GROUP = "_nystrom_group"

_KNOWN = {
    name: frozenset(
        {field.name for field in fields(METHODS[name].options)} - {"scale", *METHODS[name].weight_options}
        | {"exact_layers"}
    )
    for name in REGISTERED
}

_OF_ANY = frozenset(option for options in _KNOWN.values() for option in options)

# Arguments that transformers' models pass to attention and that change nothing here if they are None or False.
_HARMLESS = {
    *("output_hidden_states", "output_router_logits", "return_dict", "num_items_in_batch", "position_ids", "use_cache"),
    *("cache_position", "deterministic", "training", "layer_idx", "target_dtype"),
}
# Terms of the scores that a model has or has not: nobody could leave them out of a call.
_TERMS = {
    **{"s_aux": "attention sinks", "softcap": "soft capping", "position_bias": "relative positions"},
    "a bias": "of relative positions, in its mask",
}
# Arguments that `choose_route` reads: a layer's own, and those of packed sequences.
_SERVED_ELSEWHERE = {*("is_causal", "sliding_window", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")}
# The sequence that a layer attends to where it is not its own, by the names that transformers' models give it.
_SECOND_SEQUENCE = ("encoder_hidden_states", "key_value_states", "cross_attention_states")
# The cache of a layer's own sequence, with tokens from before the queries; `cache` from transformers 5.24 on.
_CACHES = ("cache", "past_key_values", "past_key_value", "layer_past")


class Route(NamedTuple):
    """How one layer attends."""

    method: str  # The method; with a plan, the layer's own
    exact: bool  # Whether the layer uses transformers' exact attention
    causal: bool  # Causal attention: a query sees no later token
    keep: Bool[Tensor, "b s"] | None  # Real keys, for the method
    options: dict[str, Any]  # Options of the method, for the method
    # Start of each packed sequence, and the end of the last; None if each row is one sequence
    cu_seqlens: Int[Tensor, " ends"] | None = None
    # Bias of positions, which the method adds to the scores; in an exact layer also transformers' own tensor
    bias: PositionBias | Tensor | None = None


def register_methods() -> None:
    """Register the methods with transformers under their names; and likely guesses of these, which raise."""
    for name in SERVED:
        AttentionInterface.register(name, partial(attend_layer, name))
        AttentionMaskInterface.register(name, partial(make_mask, name))
    # A name that another package has registered is its own.
    for name in GUESSES - {*AttentionInterface()}:
        AttentionInterface.register(name, partial(refuse_guess, name))


def is_guess(name: str) -> bool:
    """Whether a name is registered as a guess; another package may have made it its own since."""
    function = AttentionInterface().get(name)
    return isinstance(function, partial) and function.func is refuse_guess


def refuse_guess(name: str, *_: object, **__: object) -> NoReturn:
    """Raise for a guess of a name, regardless of the layer's arguments."""
    refuse_name("attn_implementation", name)


def refuse_name(what: str, name: str) -> NoReturn:
    """Raise for a name, of the argument `what`, that is not registered, with the name that was meant."""
    meant = "sdpa" if name == "softmax" else nearest_name(name, REGISTERED)
    hint = "its projections would have to be learned" if name == "linformer" else f"perhaps you meant {meant!r}"
    raise ValueError(
        f"{what} is {name!r}; expected one of {', '.join(REGISTERED)}, or 'sdpa', exact attention: {hint}."
    )


def option_names(method: str) -> frozenset[str]:
    """The options of a method that `config.attention_options` and a call may set."""
    return _KNOWN[method]


def attend_layer(
    method: str,
    module: nn.Module,
    query: Float[Tensor, "b h n d"],
    key: Float[Tensor, "b g s d"],
    value: Float[Tensor, "b g s e"],
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **named: Any,
) -> tuple[Float[Tensor, "b n h e"], None]:
    """Compute attention for a layer of a transformers model, as AttentionInterface expects.

    Args:
        method: A name in `SERVED`.
        attention_mask: The mask from `make_mask`; in a local or exact layer also a boolean mask per pair of tokens.
        dropout: Dropout of attention weights; in training, a method without weights warns that it has no effect.
        **named: Options of the method, and further arguments of the model; unsupported ones that would change the
            result raise.

    Raises:
        ValueError: An unsupported argument; the message names it.
    """
    route, group = choose_route(method, module, query, attention_mask, named), getattr(module, GROUP, None)
    attention_mask, _, _, is_local = read_mask(attention_mask)
    if route.cu_seqlens is not None:
        route = _of_packed(route, module, query, key, attention_mask, named.get("sliding_window"), is_local=is_local)
    elif group is not None and route.exact:
        route = _exact_of_tokens(route, attention_mask, named.get("sliding_window"))
    method = route.method
    # The tokens of a cache are read exactly.
    if route.exact or (route.causal and query.shape[2] != key.shape[2]):
        terms: dict[str, Any] = {"position_bias": pairs(x, query) if isinstance(x := route.bias, PositionBias) else x}
        if route.causal:
            attention_mask = _causal_pairs(query, key, attention_mask)
        whole = route.causal and attention_mask is None and query.shape[2] == key.shape[2]
        return sdpa_attention_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            is_causal=whole,
            **(terms if route.bias is not None else {}),
        )
    if dropout and not torch.compiler.is_compiling():
        warnings.warn(
            f"{method} attention stores no weights, so {type(module).__name__}'s dropout of {dropout} on them has no "
            "effect: set it to 0 in the configuration (attention_probs_dropout_prob in BERT); other dropout works.",
            UserWarning,
            stacklevel=2,
        )
    groups = query.shape[1] // key.shape[1]
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    masks = Masks(route.keep, cu_seqlens=route.cu_seqlens)
    if not route.causal and route.cu_seqlens is None:
        masks = masks_of(module, query, key, route.keep, declared=METHODS[method].positional)
    usual = default_options(method, longest_input(getattr(module, "config", None)), is_causal=route.causal)
    options = usual | route.options | ({} if group is None else {"group": group})
    if route.causal:
        options["is_causal"] = True
    if route.bias is not None:
        if not isinstance(route.bias, PositionBias):
            refuse_term(module, method, "position_bias")
        options["bias"] = route.bias
    out = attend_by_options(method, query, key, value, masks, scaling, options)
    real, n = masks.settled()[1], query.shape[2]
    if real is not None and not route.causal and group is None and is_number(n) and n <= MASKED_UP_TO:
        key, value = zero_masked(key, route.keep), zero_masked(value, route.keep)
        exact = _softmax(query, key, value, route, scaling)
        out = torch.where(real[:, None, :, None], out, exact.to(out.dtype))
    return out.transpose(1, 2).contiguous(), None


def _softmax(query: Tensor, key: Tensor, value: Tensor, route: Route, scale: float | None) -> Tensor:
    """Exact attention to the real keys, for all queries."""
    if not isinstance(route.bias, PositionBias):
        return fused_softmax(query, key, value, keep=route.keep, scale=scale)
    return biased_softmax(query, key, value, route.bias, route.bias.places(query), keep=route.keep, scale=scale)


def choose_route(
    method: str, module: nn.Module, query: Tensor, attention_mask: Tensor | None, named: Mapping[str, Any]
) -> Route:
    """Decide how a layer attends; arguments and errors are those of `attend_layer`."""
    bias = named.get("position_bias")
    if not has_buckets(module):
        return _choose_route(method, module, query, attention_mask, named)
    if attention_mask is not None and attention_mask.is_floating_point() and attention_mask.shape[1:3] == (1, 1):
        # SwitchTransformers makes one of 0 and the lowest float.
        attention_mask = unignored_tokens("attention_mask", attention_mask)
    # The tensor in cross-attention is all zeros, and in a causal layer made for the exact attention.
    of_decoder = bool(getattr(module, "is_causal", False)) or _reads_for_decoder(module)
    given = {name: value for name, value in named.items() if name != "position_bias"}
    route = _choose_route(method, module, query, attention_mask, given)
    route = route._replace(exact=route.exact or of_decoder, bias=beside(bias, query))
    if not route.exact and not (isinstance(bias, PositionBias) and takes_bias(route.method)):
        refuse_term(module, route.method, "position_bias")
    return route


def _choose_route(
    method: str, module: nn.Module, query: Tensor, attention_mask: Tensor | None, named: Mapping[str, Any]
) -> Route:
    who = type(module).__name__
    attention_mask, numbers, told, is_local = read_mask(attention_mask)
    causal = _check_causal(method, module, named.get("is_causal"), told if query.shape[2] > 1 or told else None)
    stored = getattr(getattr(module, "config", None), "attention_options", None) or {}
    exact = False
    if method == PLAN:
        method, stored = plan_of_options(stored).layers[_number(module, "a plan is set")]
        exact = method == "softmax"
    if exact:
        # Options in the call are for the other layers of the plan.
        _check_passed(method, module, named, _OF_ANY)
    options = {} if exact else _options(method, module, stored, named)
    layers = _exact_layers(module, options.pop("exact_layers", ()))
    exact = exact or (bool(layers) and _number(module, f"exact_layers is {layers!r}") in layers)
    # The keys that near_far reads exactly are chosen by a block of queries, in a decoder by later ones, too.
    exact = exact or (METHODS[method].causal and not causal and _reads_for_decoder(module))
    local = is_local or named.get("sliding_window") is not None
    if (cu_seqlens := _packed(who, attention_mask, numbers, named, local=local)) is not None:
        return Route(method, exact or local, causal, None, options, cu_seqlens)
    if attention_mask is None:
        return Route(method, exact or local, causal, None, options)
    if attention_mask.ndim != 4 or attention_mask.dtype != torch.bool:
        raise ValueError(
            f"{who} passes attention a mask of shape {tuple(attention_mask.shape)} and {attention_mask.dtype}; "
            f"{method} attention takes booleans, (batch, tokens) on the model: mask[:, 0, 0].bool() of zeros and ones, "
            "mask[:, 0, 0] == 0 of an additive mask (0 and -inf, or the lowest float). A model that adds a bias to the "
            'scores, such as relative positions, cannot use it: leave attn_implementation at "sdpa" or "eager".'
        )
    if attention_mask.shape[1] == 1 and attention_mask.shape[2] == 1 and not local:
        return Route(method, exact, causal, attention_mask[:, 0, 0], options)
    if not (exact or local or causal) and attention_mask.shape[1] == 1 and _is_one_row(attention_mask):
        return Route(method, exact, causal, attention_mask[:, 0, 0], options)
    if not exact and not local and not (causal and attention_mask.shape[2] != attention_mask.shape[3]):
        raise ValueError(
            f"{who} passes attention a mask of shape {tuple(attention_mask.shape)}, one per pair of tokens, which "
            f"{method} attention cannot honour: pass (batch, tokens) on the model, or for packed sequences "
            "cu_seq_lens_q and cu_seq_lens_k, as DataCollatorWithFlattening(return_flash_attn_kwargs=True) gives them; "
            'name its layers in exact_layers, or leave attn_implementation at "sdpa".'
        )
    return Route(method, True, causal, None, options)


def _is_one_row(mask: Bool[Tensor, "b 1 n s"]) -> bool:
    """Whether a mask per pair of tokens says the same for all queries, as padding does that a model repeats."""
    return mask.stride(2) == 0 or (may_branch(mask) and bool((mask == mask[:, :, :1]).all()))


def _causal_pairs(query: Tensor, key: Tensor, mask: Bool[Tensor, "b 1 #n s"] | None) -> Bool[Tensor, "b 1 n s"] | None:
    """The mask of exact causal attention, for queries that are the last tokens; None if not needed."""
    n, s = query.shape[2], key.shape[2]
    if mask is None and n in (1, s):
        return None
    if mask is not None and mask.shape[2] == n:
        return mask
    pairs = torch.ones(n, s, dtype=torch.bool, device=query.device).tril(s - n)
    # A padded query sees itself: softmax over nothing may be NaN.
    return pairs if mask is None else (mask & pairs) | pairs.triu(s - n)


def _packed(
    who: str, mask: Tensor | None, numbers: Tensor | None, named: Mapping[str, Any], *, local: bool
) -> Int[Tensor, " r"] | None:
    """Start of each packed sequence, and the end of the last: from the call, or from the numbers of `make_mask`.

    Raises:
        ValueError: Boundaries of keys and queries that differ, or a mask in addition.
    """
    ours, theirs = named.get("cu_seq_lens_q"), named.get("cu_seq_lens_k")
    if ours is None and theirs is None:
        if numbers is None:
            return None
        if numbers.shape[0] != 1:
            raise ValueError(
                f"{who} is given packed sequences in {numbers.shape[0]} rows; expected one row: flatten the batch, as "
                "DataCollatorWithFlattening does."
            )
        if (numbers.diff() < 0).any():
            raise ValueError(
                f"{who} is given numbers of packed sequences that decrease; expected each sequence in one piece, one "
                "after the other."
            )
        ends = numbers[0].diff(append=numbers.new_full((1,), -1)).nonzero()[:, 0] + 1
        return torch.cat([ends.new_zeros(1), ends])
    if ours is not theirs and not (
        isinstance(ours, Tensor) and isinstance(theirs, Tensor) and torch.equal(ours, theirs)
    ):
        raise ValueError(f"{who} is given cu_seq_lens_q and other cu_seq_lens_k; expected the same in self-attention.")
    # A mask of local layers says the same once more.
    if mask is not None and not local:
        raise ValueError(
            f"{who} is given packed sequences by cu_seq_lens_q, and a mask of shape {tuple(mask.shape)}: leave out "
            "attention_mask, as packed sequences have no padding."
        )
    return ours


def _of_packed(
    route: Route,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    window: int | None,
    *,
    is_local: bool,
) -> Route:
    """The route of a layer with packed sequences, including exact layers."""
    who, n, edges = type(module).__name__, query.shape[2], route.cu_seqlens
    assert edges is not None, "of packed sequences"
    if n != key.shape[2] or (not route.causal and attends_elsewhere(module)):
        raise ValueError(
            f"{who} is given packed sequences in cross-attention: pad the sequences instead, and pass attention_mask."
        )
    if not route.exact:
        return route
    if not route.causal:
        return _exact_of_tokens(route, None, window)
    if window is not None or is_local:
        starts = edges[1:-1]
        if mask is not None and not mask[0, 0, starts, starts - 1].any():
            # The mask of the window keeps the sequences apart already.
            return route._replace(cu_seqlens=None)
        seen = "chunk" if window is None else f"sliding window of {window} tokens"
        raise ValueError(
            f"{who} is given packed sequences, and sees a {seen} of the past, whose mask does not keep them apart: "
            "also pass position_ids that restart, or pad the sequences."
        )
    # Blocks of one token: all queries are among the first, which are exact in whole blocks.
    return route._replace(method="near_far", exact=False, options={"exact_up_to": n, "block_size": 1})


def _exact_of_tokens(route: Route, mask: Bool[Tensor, "b 1 1 s"] | None, window: int | None) -> Route:
    """Exact attention by this library, across ranks or packed: to all keys, or those less than `window` away."""
    route = route._replace(exact=False, causal=False, keep=None if mask is None else mask[:, 0, 0])
    if window is None:
        return route._replace(method="softmax", options={})
    return route._replace(method="longformer", options={"window": 2 * window - 1})


def masks_of(
    module: nn.Module,
    query: Float[Tensor, "b h n d"],
    key: Float[Tensor, "b g s d"],
    keep: Bool[Tensor, "b s"] | None,
    *,
    declared: bool,
) -> Masks:
    """The masks of a layer's call, from that of its keys; in cross-attention all queries are real.

    Whether the layer is cross-attention is checked only if it matters: if there is a mask, or if `declared`, for a
    method that depends on positions. In self-attention with a cache, such as the prefix of PEFT's prefix tuning, the
    queries are the last keys.
    """
    n, s = query.shape[2], key.shape[2]
    elsewhere = n != s
    if keep is not None or declared:
        elsewhere = attends_elsewhere(module) or (n != s and not _takes(module, _CACHES))
    if elsewhere or n != s:
        own = None if elsewhere or keep is None else keep[:, s - n :]
        return cross_masks(key, keep, own, declared=declared)
    return Masks(keep)


def _takes(module: nn.Module, names: Sequence[str]) -> list[inspect.Parameter]:
    """The arguments of a layer's `forward` with one of these names."""
    taken = inspect.signature(type(module).forward).parameters
    return [entry for name, entry in taken.items() if name in names]


def attends_elsewhere(module: nn.Module) -> bool:
    """Whether the keys of a layer come from another sequence than its queries.

    An attribute `is_cross_attention` decides first. A layer whose `forward` takes no second sequence attends to its
    own, and one that requires a second sequence attends to that. If it is optional, a non-causal layer of a decoder
    attends to the second sequence, and a layer of an encoder (`is_decoder` is False) to its own. The class name is the
    last resort.

    Raises:
        ValueError: None of these decides.
    """
    stated = getattr(module, "is_cross_attention", None)
    if stated is not None:
        return bool(stated)
    second = _takes(module, _SECOND_SEQUENCE)
    named_so = "Cross" in type(module).__name__
    if not second:
        # Queries, keys and values may come from outside, too.
        return named_so
    if any(entry.default is entry.empty for entry in second) or named_so:
        return True
    decodes = getattr(module, "is_decoder", None)
    if decodes is not None:
        # A causal layer has raised before.
        return bool(decodes)
    raise ValueError(
        f"{type(module).__name__} may attend to its own sequence or to another ({second[0].name}), and a mask does not "
        "say which: set is_cross_attention to True or False on the layer."
    )


def _reads_for_decoder(module: nn.Module) -> bool:
    """Whether a layer is the cross-attention of a decoder: of any, unless it says that it is not."""
    return attends_elsewhere(module) and getattr(module, "is_decoder", None) is not False


def _check_causal(method: str, module: nn.Module, passed: bool | None, told: bool | None) -> bool:
    """Whether a layer is causal, by what the model passes as `is_causal` (None leaves it to the layer) and its mask.

    Raises:
        ValueError: The method cannot be causal; the layer does not say whether it is, which transformers' exact
            attention treats as causal; or the layer and its mask say different things.
    """
    who, causal = type(module).__name__, getattr(module, "is_causal", None) if passed is None else passed
    if causal is None or (causal and not (method in METHODS and METHODS[method].causal)):
        refuse_causal(module, method, causal)
    if told is not None and told != bool(causal):
        says, mask = ("causal", "sees all tokens") if causal else ("not causal", "is causal")
        raise ValueError(
            f"{who} says that it is {says} (is_causal is {bool(causal)}), but its mask {mask}. Transformers' own "
            "attentions then follow the mask, or the layer where the mask may be left out: set is_causal on the layer "
            "as it was trained, or is_causal = False in the configuration of a decoder that was trained to see all "
            'tokens; or leave attn_implementation at "eager".'
        )
    return bool(causal)


def refuse_causal(module: nn.Module, method: str, causal: bool | None) -> NoReturn:
    """Raise for a layer that is causal, or does not say whether it is (None), and a method that sees all tokens."""
    what = "is causal" if causal else "does not say whether it is causal (it has no attribute is_causal)"
    raise ValueError(
        f"{type(module).__name__} {what}, and {method} attention sees the whole sequence: leave attn_implementation at "
        '"sdpa", use "near_far", or set is_causal = False on the layer, or in the configuration of a decoder, if it '
        "was trained to see all tokens; in an encoder-decoder, set it on the encoder only: "
        f"nystrom.integrations.set_attention(model.get_encoder(), {method!r})."
    )


def _options(method: str, module: nn.Module, stored: Mapping[str, Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """Options from the configuration and the call, checked against those of the method."""
    known = option_names(method)
    check_names(f"option of {method}", stored, known)
    _check_passed(method, module, named, known)
    return dict(stored) | {name: value for name, value in named.items() if name in known}


def _check_passed(method: str, module: nn.Module, named: Mapping[str, Any], known: frozenset[str]) -> None:
    """Raise for arguments that a model passes to attention which would change the result and no method supports."""
    if named.get("output_attentions") or _collects_weights(module):
        raise ValueError(
            f"output_attentions is True, but {method} attention stores no weights: leave it out, or set "
            'attn_implementation to "eager".'
        )
    for name, value in named.items():
        if name in known or name in _HARMLESS or name in _SERVED_ELSEWHERE:
            continue
        if value is None or value is False:
            continue
        refuse_term(module, method, name)


def refuse_term(module: nn.Module, method: str, name: str) -> NoReturn:
    """Raise for an argument, or a term of the scores, that a layer passes and a method cannot honour."""
    what, way_out = name, "Leave it out, or set"
    if name in _TERMS:
        what, way_out = f"{name} ({_TERMS[name]})", "Leave"
    elif method in _KNOWN:
        way_out = f"Its options are {', '.join(sorted(_KNOWN[method]))}. {way_out}"
    raise ValueError(
        f"{type(module).__name__} passes {what} to attention, which {method} attention cannot honour. "
        f'{way_out} attn_implementation {"at" if name in _TERMS else "to"} "sdpa" or "eager".'
    )


def _collects_weights(module: nn.Module) -> bool:
    """Whether a model collects attention weights from what its layers return, without asking the layers for them."""
    if getattr(getattr(module, "config", None), "output_attentions", False):
        return True
    # A compiled model cannot look; it has run before, or runs again without.
    collected = None if torch.compiler.is_compiling() else _active_collector.get()
    return any("attentions" in name for name in collected or ())


def _exact_layers(module: nn.Module, layers: Sequence[int]) -> Sequence[int]:
    """Check the layer numbers in `exact_layers`."""
    if not layers:
        return layers
    config = getattr(module, "config", None)
    counts = [getattr(config, name, 0) or 0 for name in ("num_hidden_layers", "encoder_layers", "decoder_layers")]
    most = max(counts) or None
    for layer in layers:
        if isinstance(layer, bool) or not isinstance(layer, int) or layer < 0 or (most is not None and layer >= most):
            among = "integers from 0" if most is None else f"layers 0 to {most - 1} of this model"
            raise ValueError(f"exact_layers is {layers!r}; expected {among}.")
    return layers


def _number(module: nn.Module, why: str) -> int:
    """The number of a layer; raises if it has none. `why` names what needs it."""
    number = number_of(module)
    if number is None:
        raise ValueError(
            f"{why}, but {type(module).__name__} does not know its number (layer_idx): set it on the model with "
            "nystrom.integrations.set_attention, which numbers the layers, after loading; or give single layers "
            'exact attention with set_attention(layer, "sdpa").'
        )
    return number
