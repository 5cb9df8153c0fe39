"""Attention masks for transformers' models, in the form that the methods of this library take.

One row of real keys serves all queries. Unsupported patterns raise an error that names them; local layers get a mask
per pair of tokens, for exact attention. See `nystrom.integrations.attention_interface`.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformers import MODEL_MAPPING, NystromformerConfig, PreTrainedModel
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    packed_sequence_mask_function,
    prepare_padding_mask,
    sdpa_mask,
)

from nystrom.attention.registry import METHODS
from nystrom.models.configuration import EncoderConfig


def make_mask(
    method: str,
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    config: Any,
    mask_function: Callable[..., Any],
    attention_mask: Tensor | None,
    q_offset: int = 0,
    kv_offset: int = 0,
    local_size: int | None = None,
    allow_is_bidirectional_skip: bool = False,
    device: torch.device | str = "cpu",
    **_: Any,
) -> Bool[Tensor, "b 1 #n s"] | Int[Tensor, "b 1 1 n"] | None:
    """Make the mask of a model, as AttentionMaskInterface expects: the real keys, one row for all queries.

    For packed sequences, which transformers detects by restarting positions, the mask is the number of each token's
    sequence instead.

    The other arguments of this interface (dtype, use_vmap, ...) concern n x s masks and are ignored.

    Raises:
        ValueError: A causal mask that the method does not support, any other pattern, a mask of the wrong rank, or a
            model that never looks up attention by name.
    """
    check_asks(_model_of(config), method)
    who = f"{type(config).__name__.removesuffix('Config')} (model type {config.model_type!r})"
    causal = _holds(mask_function, causal_mask_function)
    if causal and not (method in METHODS and METHODS[method].causal):
        raise ValueError(
            f"{who} asks for a causal mask, which {method} attention cannot honour: landmarks and features see the "
            'whole sequence. Leave its attn_implementation at "sdpa", or use "near_far"; in an encoder-decoder, set '
            f"it on the encoder only: nystrom.integrations.set_attention(model.get_encoder(), {method!r})."
        )
    if attention_mask is not None and attention_mask.ndim != 2:
        raise ValueError(f"attention_mask has shape {tuple(attention_mask.shape)}; expected (batch, tokens).")
    if attention_mask is None and local_size is None and (numbers := _packed_numbers(mask_function)) is not None:
        return numbers[:, None, None]
    whole = mask_function is causal_mask_function and q_length == kv_length
    if whole or (mask_function is bidirectional_mask_function and allow_is_bidirectional_skip):
        padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
        if padding is None or (not torch.compiler.is_compiling() and bool(padding.all())):
            return None
        return padding[:, None, None, kv_offset : kv_offset + kv_length]
    if mask_function is causal_mask_function:
        # Tokens that follow those of a cache, or a cache with room for more.
        return sdpa_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask,
            allow_is_causal_skip=False, device=device,
        )  # fmt: skip
    if mask_function is not bidirectional_mask_function and local_size is None:
        raise ValueError(
            f"{who} asks for a custom mask pattern, such as blocks, which {method} attention cannot honour: "
            'leave its attn_implementation at "sdpa".'
        )
    # A local layer, or a mask that the model goes on to change: n x s, and exact attention.
    return sdpa_mask(
        batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask,
        local_size=local_size, allow_is_causal_skip=False, allow_is_bidirectional_skip=False, device=device,
    )  # fmt: skip


def check_asks(kind: type[PreTrainedModel] | None, method: str) -> None:
    """Check that the source code of a model looks up its attention by name.

    Raises:
        ValueError: It does not, so attn_implementation would be ignored; the message says what to do instead.
    """
    if kind is not None and not kind._can_set_attn_implementation():
        refuse_deaf(kind, method)


def refuse_deaf(kind: type[PreTrainedModel], method: str) -> NoReturn:
    """Raise for a model that ignores attn_implementation, and say what to do instead."""
    if kind.config_class is NystromformerConfig:
        way_out = (
            "the classes of this library load the same folder, with the attention that its config.json asks for: "
            'nystrom.models.EncoderModel.from_pretrained(FOLDER, attention_options={"num_landmarks": 32}), or '
            "EncoderForMaskedLM and so on for its head"
        )
    elif kind.config_class is EncoderConfig:
        way_out = "it takes its attention from its configuration, such as attention='nystrom'"
    else:
        way_out = (
            "use a model that does (BERT, RoBERTa, ModernBERT, ViT, ...), or nystrom.replace_attention if its layers "
            "are nn.MultiheadAttention; where this is a part of a model, name the attention of each part, such as "
            f"attn_implementation={{'text_config': {method!r}, 'vision_config': 'sdpa'}}"
        )
    raise ValueError(
        f"{kind.__name__} has attention of its own and does not ask transformers' AttentionInterface, so "
        f"attn_implementation={method!r} would change nothing: {way_out}."
    )


def _model_of(config: Any) -> type[PreTrainedModel] | None:
    """The base model class of a configuration; None if transformers does not list it."""
    if torch.compiler.is_compiling():
        # The model has run before it is compiled, or runs again without; its source cannot be read from here.
        return None
    kind = MODEL_MAPPING.get(type(config), None)
    return kind[0] if isinstance(kind, list | tuple) else kind


def _packed_numbers(function: Callable[..., Any]) -> Int[Tensor, "b n"] | None:
    """The number of each token's sequence, from a mask function for packed sequences; None for any other."""
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    if function.__qualname__.startswith(packed_sequence_mask_function.__qualname__ + "."):
        return next(cell for cell in cells if isinstance(cell, Tensor))
    parts = [part for cell in cells for part in (cell if isinstance(cell, tuple) else (cell,)) if callable(part)]
    return next((found for part in parts if (found := _packed_numbers(part)) is not None), None)


def _holds(function: Callable[..., Any], wanted: Callable[..., Any]) -> bool:
    """Whether a mask function is `wanted` or contains it: transformers composes mask functions as closures."""
    if function is wanted:
        return True
    for cell in getattr(function, "__closure__", None) or ():
        parts = cell.cell_contents if isinstance(cell.cell_contents, tuple) else (cell.cell_contents,)
        if any(callable(part) and _holds(part, wanted) for part in parts):
            return True
    return False
