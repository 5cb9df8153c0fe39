"""Checks of the values of `nystrom.models.configuration.EncoderConfig`; each error names the field."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, get_args

from nystrom.attention.method_names import DROPS_WEIGHTS, NO_ATTENTION
from nystrom.attention.plan import PLAN, LayerChoice, plan_of_options
from nystrom.attention.registry import METHODS
from nystrom.checks import PositionKind, check_at_least, check_choice, check_flag, check_names


def check_numbers(*, positive: Mapping[str, object], shares: Mapping[str, object]) -> None:
    """Raise ValueError for the first number that is not positive and finite, or not in [0, 1)."""
    for name, value in positive.items():
        if not _is_number(value) or not 0 < value < math.inf:  # pyright: ignore[reportOperatorIssue]
            raise ValueError(f"{name} is {value!r}; expected a positive number.")
    for name, value in shares.items():
        if not _is_number(value) or not 0 <= value < 1:  # pyright: ignore[reportOperatorIssue]
            raise ValueError(f"{name} is {value!r}; expected a number in [0, 1).")


def check_heads(hidden_size: int, attention_size: object, heads: int) -> None:
    """Raise ValueError unless the width of queries, keys and values is a multiple of the number of heads."""
    name = "hidden_size" if attention_size is None else "attention_size"
    check_at_least(name, hidden_size if attention_size is None else attention_size, 1)
    if (width := hidden_size if attention_size is None else attention_size) % heads:  # pyright: ignore
        raise ValueError(f"{name} is {width} but num_attention_heads is {heads}; expected a multiple of the heads.")


def check_dropped_weights(share: object, attention: str, *, design: str) -> None:
    """Raise ValueError if dropout is to be applied to weights of attention that stores none."""
    if share == 0:
        return
    if design != "authors" or attention not in DROPS_WEIGHTS:
        raise ValueError(
            f"attention_probs_dropout_prob is {share!r}, but {attention} of design {design!r} stores no weights that "
            "could be dropped (only softmax and kernelized of design 'authors' do): expected 0. Use "
            "hidden_dropout_prob; of a published Nyströmformer drop the value, which transformers does not use either."
        )


def check_attention(attention: object, options: object, *, layers: int, shared: bool) -> None:
    """Raise ValueError for an unknown attention or option, an invalid value, or options or shared weights without
    attention.
    """
    check_names("attention", [attention], (*METHODS, PLAN, NO_ATTENTION))  # pyright: ignore[reportArgumentType]
    if not isinstance(options, dict):
        raise ValueError(f"attention_options is {options!r}; expected a dictionary of options by name.")
    if attention == PLAN:
        plan_of_options(options).check_layers(layers, "the configuration")
    elif attention == NO_ATTENTION:
        if options or shared:
            named = f"attention_options is {options!r}" if options else "share_attention_weights is True"
            raise ValueError(f"{named}, but attention is {NO_ATTENTION!r}, which has none: leave it out.")
    else:
        kind = METHODS[attention].options  # pyright: ignore[reportArgumentType]
        check_names(f"option of {attention}", options, {entry.name for entry in fields(kind)})
        kind(**options)


def check_frozen(design: str, layers: Iterable[LayerChoice]) -> None:
    """Raise ValueError unless Linformer in the design "authors" says which of the two papers' code bases it follows."""
    if design == "authors" and any(method == "linformer" and "frozen" not in options for method, options in layers):
        raise ValueError(
            "design is 'authors', but linformer's option frozen is not given, on which the two papers' code differs: "
            "pass attention_options={'frozen': False} for Nyströmformer's, which trains the projections, or True for "
            "Skyformer's; in nystrom train --options.frozen."
        )


def check_taps(name: str, value: object) -> None:
    """Raise ValueError for a size of a convolution that is neither None nor an odd number."""
    if value is not None:
        check_at_least(name, value, 1)
        if value % 2 == 0:  # pyright: ignore[reportOperatorIssue]
            raise ValueError(
                f"{name} is {value}; expected an odd number, so that it has a middle, or no convolution: None in a "
                "configuration, 0 in nystrom train."
            )


def check_positions(positions: object, *, share: object, across_heads: object, head_dim: int, attends: bool) -> None:
    """Check the kind of positions, and the options of rotary ones.

    Raises:
        ValueError: An unknown kind, a share outside (0, 1], heads of odd width, rotary positions without attention, or
            rotary options with other positions.
    """
    check_choice("positions", positions, get_args(PositionKind))
    check_flag("rotary_across_heads", across_heads)
    if not _is_number(share) or not 0 < share <= 1:  # pyright: ignore[reportOperatorIssue]
        raise ValueError(
            f"rotary_share is {share!r}; expected a number in (0, 1], the share of the width that is rotated."
        )
    if positions == "rotary":
        if not attends:
            raise ValueError(
                f"positions is 'rotary' but attention is {NO_ATTENTION!r}, which has no queries and keys to rotate: "
                "use positions 'none' or 'learned'."
            )
        if head_dim % 2:
            raise ValueError(
                f"positions is 'rotary' but a head has {head_dim} channels; expected an even number, since channels "
                "are rotated in pairs: change num_attention_heads or hidden_size."
            )
    elif share != 1 or across_heads:
        named = "rotary_across_heads is True" if share == 1 else f"rotary_share is {share}"
        raise ValueError(f"{named} but positions is {positions!r}: leave it out, or use positions 'rotary'.")


def check_no_option(given: Mapping[str, Any]) -> None:
    """Raise ValueError, which says where it belongs, if an option of an attention method is given as a field."""
    for name in given:
        if name in options_of(METHODS):
            raise ValueError(
                f"{name} is an option of an attention method, not of EncoderConfig: "
                f"pass attention_options={{{name!r}: {given[name]!r}}}."
            )


def options_of(methods: Iterable[str]) -> set[str]:
    """Names of the options of some methods; a name that is not a method has none."""
    return {option.name for name in methods if name in METHODS for option in fields(METHODS[name].options)}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
