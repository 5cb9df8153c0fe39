"""transformers' encoders whose tokens are split across the ranks of a process group.

`nystrom.parallel.parallelize` hands such a model here, once `nystrom.integrations` is imported. A hook before the
encoder counts positions across all ranks and passes the mask to the layers, on which the group is set (see
`nystrom.integrations.attention_interface`). Operations outside of attention that need a whole sequence run across all
ranks: the first token or the mean of a head for sequences, and the mean loss of a head for tokens. Only the families in
`PLACES` and `AFTER_PADDING` are supported, since others may mix tokens elsewhere.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
    PreTrainedModel,
)

from nystrom.attention.mask_values import real_tokens
from nystrom.attention.plan import PLAN, plan_of_options
from nystrom.attention.registry import METHODS
from nystrom.integrations.attention_interface import GROUP, SERVED
from nystrom.parallel.agreement import agree, check_group
from nystrom.parallel.communication import Ranks
from nystrom.parallel.models import mean_over_ranks, pool_over_ranks
from nystrom.parallel.positions_over_ranks import find_tokens
from nystrom.precision import at_least_float32
from nystrom.shapes import Group

# Model types whose position of a token is its place, padding included.
PLACES = ("albert", "bert", "distilbert", "electra", "ernie", "eurobert", "modernbert", "nomic_bert")
# Model types that count tokens other than padding, from the row after that of padding.
AFTER_PADDING = ("camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta")

_HEADS = {
    "none": MODEL_MAPPING,
    "masked words": MODEL_FOR_MASKED_LM_MAPPING,
    "tokens": MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    "sequences": MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
}
_POOLING = {"cls": "first", "bos": "first", "mean": "mean"}
_HELD = "_nystrom_over_ranks"


def parallelize_transformers(model: nn.Module, group: Group) -> bool:
    """Let a model of transformers take one piece of each sequence per rank, at least one token; changed in place.

    Returns whether it is a model of transformers, and none of `nystrom.models`; see `nystrom.parallel.parallelize`.

    Raises:
        ValueError: An invalid group, or a family, head, attention or rotation that does not work across ranks.
    """
    if not isinstance(model, PreTrainedModel) or hasattr(model, "group"):
        return False
    head = _find_head(model)
    _check_attention(model)
    if group is not None:
        check_group(group)
    held = model.__dict__.pop(_HELD, None)
    for handle in held.handles if held is not None else ():
        handle.remove()
    for module in model.modules():
        module.__dict__.pop(GROUP, None)
        if group is not None:
            module.__dict__[GROUP] = group
    if group is not None:
        model.__dict__[_HELD] = _Hooks(model, group, head)
    return True


def _find_head(model: PreTrainedModel) -> str:
    who, kind = type(model).__name__, model.config.model_type
    if kind not in (*PLACES, *AFTER_PADDING):
        raise ValueError(
            f"model is a {who} (model type {kind!r}), which may mix tokens outside of "
            f"attention; expected one of {', '.join(sorted((*PLACES, *AFTER_PADDING)))}, or a model of nystrom.models."
        )
    heads = [name for name, known in _HEADS.items() if type(model) is known.get(type(model.config), None)]
    if not heads:
        raise ValueError(
            f"model is a {who}, whose head does not work over ranks; expected {kind} without a head, or with one for "
            "masked words, tokens or sequences."
        )
    if heads == ["sequences"] and getattr(model.config, "classifier_pooling", "cls") not in _POOLING:
        raise ValueError(
            f"model is a {who} with classifier_pooling={model.config.classifier_pooling!r}, which does not work over "
            f"ranks; expected one of {', '.join(_POOLING)}."
        )
    rope = getattr(model.config, "rope_parameters", None) or {}
    for part in (rope, *(part for part in rope.values() if isinstance(part, Mapping))):
        if part.get("rope_type", "default") in ("dynamic", "longrope"):
            raise ValueError(
                f"model is a {who} whose rotation {part['rope_type']!r} depends on the length of its input, which no "
                "rank sees whole: use one of another rope_type."
            )
    return heads[0]


def _check_attention(model: PreTrainedModel) -> None:
    configs: list[Any] = [module.config for module in model.modules() if getattr(module, "config", None) is not None]
    implementations: list[str] = sorted({config._attn_implementation for config in configs})
    if len(implementations) != 1 or implementations[0] not in SERVED:
        raise ValueError(
            f"model attends by {' and '.join(implementations)}, and a layer of transformers' own attention sees only "
            "a rank's own "
            'tokens: call model.set_attn_implementation("nystrom"); for exact attention in some layers pass '
            'attention_options={"exact_layers": ...}.'
        )
    stored = getattr(model.base_model.config, "attention_options", None) or {}
    methods = (
        {name for name, _ in plan_of_options(stored).layers} if implementations[0] == PLAN else set(implementations)
    )
    for method in sorted(methods):
        if not METHODS[method].over_ranks:
            able = ", ".join(name for name in SERVED if name in METHODS and METHODS[name].over_ranks)
            raise ValueError(f"model attends by {method}, which does not work over ranks: use one of {able}.")


@dataclass
class _Hooks:
    """The hooks around the encoder of one model, and the state that they share during a call."""

    model: PreTrainedModel  # The model with its head
    group: Group  # The group
    head: str  # The purpose of the head
    handles: list[Any] = field(default_factory=list)  # The hooks
    labels: Tensor | None = None  # Labels of this rank's tokens
    keep: Tensor | None = None  # Mask of this rank's real tokens

    def __post_init__(self) -> None:
        base: Any = self.model.base_model
        if self.head != "none":
            self.handles.append(self.model.register_forward_pre_hook(self._before_head, with_kwargs=True))
        self.handles.append(base.register_forward_pre_hook(self._before, with_kwargs=True))
        if getattr(base, "pooler", None) is not None:
            self.handles.append(base.pooler.register_forward_pre_hook(self._before_pooler))
        if self.head == "sequences":
            self.handles.append(base.register_forward_hook(self._pool))
        elif self.head != "none":
            self.handles.append(self.model.register_forward_hook(self._add_loss))

    def _before_head(self, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        """Keep what the head must not see: the mask of tokens that it would count, and labels of part of the tokens."""
        given = _named(module, inputs, named)
        if self.head == "sequences":
            self.keep = given.pop("attention_mask", None)
        else:
            self.labels = given.pop("labels", None)
            if given.get("num_items_in_batch") is not None:
                raise ValueError("num_items_in_batch is given, but the loss over ranks is a mean: leave it out.")
        return (), given

    def _before(self, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        """Check that the ranks agree, count positions across all ranks, and pass the mask to the layers."""
        _check_attention(self.model)
        given, ranks = _named(module, inputs, named), check_group(self.group)
        mask = self.keep if self.head == "sequences" else given.get("attention_mask")
        tokens = next((given[name] for name in ("input_ids", "inputs_embeds") if given.get(name) is not None), None)
        lengths = self._agree(ranks, tokens, mask, given.get("position_ids"))
        assert isinstance(tokens, Tensor)
        if 0 in lengths:
            raise ValueError(f"rank {lengths.index(0)} of the group holds no tokens: give each rank at least one.")
        self.keep = None if mask is None else mask.bool()
        if given.get("position_ids") is None:
            given["position_ids"] = _positions(ranks, lengths, module, tokens)
        mask = None if self.keep is None else self.keep[:, None, None]
        kinds = set(getattr(module.config, "layer_types", None) or ())
        # A local layer would otherwise get a mask for each pair of tokens.
        given["attention_mask"] = dict.fromkeys(kinds, mask) if "sliding_attention" in kinds else mask
        return (), given

    def _agree(self, ranks: Ranks, tokens: Tensor | None, mask: Tensor | None, positions: Tensor | None) -> list[int]:
        """Tokens of each rank, after the ranks have compared their arguments."""
        refusal = _refusal(tokens, mask, self.labels)
        facts: dict[str, object] = {"model": type(self.model).__name__, "training": self.model.training}
        facts |= {"inputs": "ids" if _are_ids(tokens) else "embeddings"}
        for name, value in (("attention_mask", mask), ("labels", self.labels), ("position_ids", positions)):
            facts[name] = "None" if value is None else "given"
        held = 0
        if tokens is not None and refusal is None:
            facts["batch"], held = len(tokens), tokens.shape[1]
        return [n for n, _ in agree(ranks, facts, (held, 0), refusal)]

    def _before_pooler(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
        """Put the first token of all ranks first, or alone, in the pooler's input."""
        (x,) = inputs
        first = pool_over_ranks(self.group, x if x.ndim == 3 else x[:, None], None, how="first")
        return first[:, None] if x.ndim == 3 else first

    def _pool(self, module: nn.Module, inputs: tuple[Any, ...], out: Any) -> Any:
        """One token for the head: the first across all ranks, or the mean."""
        how = _POOLING[getattr(self.model.config, "classifier_pooling", "cls")]
        pooled = pool_over_ranks(self.group, out[0], self.keep if how == "mean" else None, how=how)[:, None]
        return (pooled, *out[1:]) if isinstance(out, tuple) else type(out)(**{**out, "last_hidden_state": pooled})

    def _add_loss(self, module: nn.Module, inputs: tuple[Any, ...], out: Any) -> Any:
        if self.labels is None:
            return out
        logits, labels = at_least_float32(out[0]).flatten(0, 1), self.labels.flatten()
        total = F.cross_entropy(logits, labels, reduction="sum")
        loss = mean_over_ranks(self.group, total, (labels != -100).sum())
        return (loss, *out) if isinstance(out, tuple) else type(out)(**{**out, "loss": loss})


def _named(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name."""
    return dict(zip(inspect.signature(module.forward).parameters, inputs, strict=False)) | named


def _are_ids(tokens: Tensor | None) -> bool:
    return tokens is not None and not tokens.is_floating_point()


def _refusal(tokens: Tensor | None, mask: Tensor | None, labels: Tensor | None) -> ValueError | None:
    """The error of this rank's inputs; None if they are right."""
    if tokens is None or tokens.ndim != (2 if _are_ids(tokens) else 3):
        came = "neither" if tokens is None else f"of shape {tuple(tokens.shape)}"
        return ValueError(
            f"input_ids or inputs_embeds is {came}; expected (batch, tokens) ids, or embeddings (batch, tokens, width)."
        )
    for name, value in (("attention_mask", mask), ("labels", labels)):
        if value is not None and value.shape != tokens.shape[:2]:
            return ValueError(
                f"{name} has shape {tuple(value.shape)}, but this rank holds tokens of shape "
                f"{tuple(tokens.shape[:2])}: pass its piece, one number for each token."
            )
    try:
        if mask is not None:
            real_tokens("attention_mask", mask)
    except ValueError as error:
        return error
    return None


def _positions(ranks: Ranks, lengths: list[int], base: Any, tokens: Tensor) -> Tensor:
    """The position-table row, or position, of each token among those of all ranks.

    Raises:
        ValueError: There are more tokens than learned positions; raised on all ranks.
    """
    config, total = base.config, sum(lengths)
    offset = config.pad_token_id + 1 if config.model_type in AFTER_PADDING else 0
    table = getattr(getattr(base, "embeddings", None), "position_embeddings", None)
    if isinstance(table, nn.Embedding) and total + offset > table.num_embeddings:
        raise ValueError(
            f"the ranks hold {total} tokens, padding included, and the model has {table.num_embeddings - offset} "
            "positions: cut the sequences, or give the model more positions (nystrom convert "
            "--max-position-embeddings)."
        )
    if offset and _are_ids(tokens):
        real = find_tokens(ranks, lengths, tokens != config.pad_token_id, len(tokens), tokens.device)
        return torch.where(real.keep, real.order + 1, 0) + config.pad_token_id
    start = sum(lengths[: ranks.rank]) + offset
    return torch.arange(start, start + tokens.shape[1], device=tokens.device).expand(len(tokens), -1)
