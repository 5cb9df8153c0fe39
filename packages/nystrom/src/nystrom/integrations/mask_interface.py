"""Attention masks for transformers' models, in the form that the methods of this library take.

One row of real keys serves all queries. Unsupported patterns raise an error that names them; local layers get a mask
per pair of tokens, for exact attention. See `nystrom.integrations.attention_interface`.

A layer must know which mask its model asked for, and transformers hands it only the tensor. The tensor's type says it:

| | every token sees | causal |
|---|---|---|
| real keys (b, 1, 1, s) | bool, or no mask | uint8, as a column (b, 1, s, 1); with s = 0 all are real |
| number of each token's packed sequence, a column (b, 1, n, 1) | int64 | int32 |
| pairs of a local layer, a window or a chunk (b, 1, n, s) | bool | int8 |

A column is no mask that a caller makes, (b, 1, 1, s) or (b, 1, n, s) of any dtype.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformers import MODEL_MAPPING, NystromformerConfig, PreTrainedModel
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    or_masks,
    packed_sequence_mask_function,
    prepare_padding_mask,
    remap_positions_for_packed_sequence,
    sdpa_mask,
)

from nystrom.attention.exact_limit import may_branch
from nystrom.attention.registry import METHODS
from nystrom.models.configuration import EncoderConfig

# The code of the functions that transformers' makers of mask functions return.
_MADE = {
    maker: [const for const in maker.__code__.co_consts if inspect.iscode(const)]
    for maker in (and_masks, or_masks, packed_sequence_mask_function, remap_positions_for_packed_sequence)
}


class Told(NamedTuple):
    """The contents of a layer's mask."""

    # Real keys, one row for all queries or one per query; None if all are. `make_mask` makes only boolean ones.
    mask: Tensor | None
    # The number of each token's packed sequence; None if each row of the batch is one sequence
    numbers: Int[Tensor, "b n"] | None
    causal: bool | None  # Whether a query sees no later token; None if the mask does not say
    local: bool = False  # Whether it is the mask of a causal local layer


def read_mask(mask: Tensor | None) -> Told:
    """Read a mask of `make_mask`, or of the caller."""
    if mask is None:
        return Told(None, None, None)
    if mask.dtype == torch.bool:
        return Told(mask, None, False if mask.ndim == 4 and mask.shape[2] == 1 else None)
    if mask.dtype == torch.int8:
        # Causal in part, where there are images in a window: the layer says what it is.
        return Told(mask.bool(), None, None, local=True)
    is_column = mask.ndim == 4 and mask.shape[3] == 1
    if is_column and mask.dtype == torch.uint8:
        return Told(mask.mT.bool() if mask.shape[2] else None, None, True)
    if is_column and mask.dtype in (torch.int32, torch.int64):
        return Told(None, mask[:, 0, :, 0], mask.dtype == torch.int32)
    return Told(mask, None, None)


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
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **_: Any,
) -> Bool[Tensor, "b 1 #n s"] | Int[Tensor, "b 1 n #s"] | None:
    """Make the mask of a model, as AttentionMaskInterface expects: the real keys, one row for all queries.

    For packed sequences, which transformers detects by restarting positions, the mask is the number of each token's
    sequence instead. `read_mask` reads both.

    Raises:
        ValueError: A causal mask that the method does not support, any other pattern, a mask of the wrong rank, or a
            model that never looks up attention by name.
    """
    check_asks(_model_of(config), method)
    who = f"{type(config).__name__.removesuffix('Config')} (model type {config.model_type!r})"
    if attention_mask is not None and attention_mask.ndim != 2:
        raise ValueError(f"attention_mask has shape {tuple(attention_mask.shape)}; expected (batch, tokens).")
    if local_size is None:
        pattern = _pattern(mask_function)
        causal = _holds(mask_function, causal_mask_function) if pattern is None else pattern.causal
        if causal and not (method in METHODS and METHODS[method].causal):
            raise ValueError(
                f"{who} asks for a causal mask, which {method} attention cannot honour: landmarks and features see the "
                'whole sequence. Leave its attn_implementation at "sdpa", or use "near_far"; in an encoder-decoder, '
                f"set it on the encoder only: nystrom.integrations.set_attention(model.get_encoder(), {method!r})."
            )
        if pattern is None or (pattern.numbers is not None and attention_mask is not None):
            raise ValueError(
                f"{who} asks for a custom mask pattern, such as blocks, which {method} attention cannot honour: "
                'leave its attn_implementation at "sdpa".'
            )
        if pattern.numbers is not None:
            return pattern.numbers[:, None, :, None].to(torch.int32 if causal else torch.int64)
        # Not a mask that the model goes on to change, nor that of tokens that follow those of a cache.
        if causal:
            row = q_length == kv_length and allow_is_causal_skip
        else:
            row = allow_is_bidirectional_skip or mask_function is not bidirectional_mask_function
        if row:
            padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
            if padding is None or (may_branch(padding) and bool(padding.all())):
                return torch.ones(batch_size, 1, 0, 1, dtype=torch.uint8, device=device) if causal else None
            padding = padding[:, None, None, kv_offset : kv_offset + kv_length]
            return padding.mT.to(torch.uint8) if causal else padding
    # For exact attention; a local layer says itself whether it is causal.
    pairs = sdpa_mask(
        batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, local_size=local_size,
        allow_is_causal_skip=False, allow_is_bidirectional_skip=False, use_vmap=use_vmap, device=device,
    )  # fmt: skip
    if pairs is None or local_size is None or not _holds(mask_function, causal_mask_function):
        return pairs
    return pairs.to(torch.int8)


def check_asks(kind: type[PreTrainedModel] | None, method: str) -> None:
    """Raise ValueError unless the source code of a model looks up its attention by name; else the name would be
    ignored.
    """
    if kind is not None and not kind._can_set_attn_implementation():
        raise_ignores_attn_implementation(kind, method)


def raise_ignores_attn_implementation(kind: type[PreTrainedModel], method: str) -> NoReturn:
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


class _Pattern(NamedTuple):
    """A mask function that the methods can honour: causal or not, in one sequence or packed ones."""

    causal: bool
    numbers: Int[Tensor, "b n"] | None = None


def _pattern(function: Callable[..., Any]) -> _Pattern | None:
    """The pattern of a mask function; None for any other pattern, such as blocks or windows."""
    if function is causal_mask_function:
        return _Pattern(causal=True)
    if _sees_all(function):
        return _Pattern(causal=False)
    if _is_made_by(function, packed_sequence_mask_function):
        return _Pattern(False, next(part for part in _cells(function) if isinstance(part, Tensor)))
    if _is_made_by(function, remap_positions_for_packed_sequence):
        return next(_pattern(part) for part in _cells(function) if callable(part))
    if not _is_made_by(function, and_masks):
        return None
    parts = [_pattern(part) for part in _cells(function)]
    numbers = [part.numbers for part in parts if part is not None and part.numbers is not None]
    if None in parts or len(numbers) > 1:
        return None
    return _Pattern(any(part is not None and part.causal for part in parts), *numbers)


def _sees_all(function: Callable[..., Any]) -> bool:
    """Whether a mask function is True for all indices: it takes none, or one part of its union does."""
    if function is bidirectional_mask_function:
        return True
    if _is_made_by(function, or_masks):
        return any(map(_sees_all, _cells(function)))
    taken = inspect.signature(function).parameters.values()
    return all(entry.kind is entry.VAR_POSITIONAL for entry in taken) and bool(function())


def _is_made_by(function: Callable[..., Any], maker: Callable[..., Any]) -> bool:
    # Compare code objects: torch.compile cannot trace a function's qualified name.
    return getattr(function, "__code__", None) in _MADE[maker]


def _cells(function: Callable[..., Any]) -> list[Any]:
    """The contents of a closure: transformers composes mask functions as closures."""
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    return [part for cell in cells for part in (cell if isinstance(cell, tuple) else (cell,))]


def _holds(function: Callable[..., Any], wanted: Callable[..., Any]) -> bool:
    """Whether a mask function is `wanted` or contains it."""
    return function is wanted or any(callable(part) and _holds(part, wanted) for part in _cells(function))
