"""The configuration, class and weights of a model that is converted from another.

See `nystrom.integrations.convert` for what is carried over, dropped or initialised at zero.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from nystrom.attention.plan import PLAN
from nystrom.attention.registry import METHODS
from nystrom.checks import check_names
from nystrom.integrations.bert_names import FAMILIES, Renamed, head_kind, read_config, rename
from nystrom.integrations.modules import default_options
from nystrom.models.classes import model_class
from nystrom.models.configuration import NO_ATTENTION, POSITION_OFFSET, EncoderConfig
from nystrom.models.encoder import EncoderModel, EncoderPreTrainedModel
from nystrom.models.files.folder import read_tensors
from nystrom.models.heads.language import EncoderForMaskedLM, EncoderForPreTraining
from nystrom.models.heads.sequences import EncoderForSequenceClassification
from nystrom.models.heads.tokens import (
    EncoderForMultipleChoice,
    EncoderForQuestionAnswering,
    EncoderForTokenClassification,
)

POSITIONS = "embeddings.position_embeddings.weight"
_OWN_PREFIX = f"{EncoderPreTrainedModel.base_model_prefix}."
# Fields of config.json about a head's classes; `nystrom finetune` writes "text_pairs" and "finetuning_task".
_OF_CLASSES = ("problem_type", "text_pairs", "finetuning_task")
_WITH_HEAD: dict[str, type[EncoderPreTrainedModel]] = {
    kind.__name__.removeprefix("Encoder"): kind
    for kind in (
        EncoderForMultipleChoice,
        EncoderForQuestionAnswering,
        EncoderForSequenceClassification,
        EncoderForTokenClassification,
    )
}


@dataclass
class NewModel:
    """The parts of the new model; its position table still has the length of the source's."""

    config: EncoderConfig  # Configuration
    model: type[EncoderPreTrainedModel]  # Class
    tensors: dict[str, Tensor]  # Weights by name
    mapped: int  # Number of weights that come from the source
    left_behind: tuple[str, ...] = ()  # Tensors of the source that were dropped
    started: tuple[str, ...] = ()  # Weights that start at zero

    @property
    def prefix(self) -> str:
        """The prefix of the encoder's weight names."""
        return "" if self.model is EncoderModel else _OWN_PREFIX


class AttentionChoice(NamedTuple):
    """The requested attention."""

    attention: str | None  # The method; None keeps that of the source
    options: dict[str, Any]  # Options of the method
    longest: int | None = None  # Tokens of the new model's longest input; None keeps that of the source

    def options_of(self, attention: str, longest: int) -> dict[str, Any]:
        """All options of a new method, for a source with this longest input."""
        return default_options(attention, self.longest or longest) | self.options


def attention_choice(
    attention: str | None,
    options: Mapping[str, object],
    num_landmarks: int | Literal["auto"],
    longest: int | None = None,
) -> AttentionChoice:
    """The requested attention, checked as far as possible without the source.

    Raises:
        ValueError: An unknown method or option, or a method with learned weights.
    """
    chosen = dict(options)
    if num_landmarks != "auto":
        if "num_landmarks" in chosen:
            raise ValueError(f"num_landmarks is {num_landmarks}, and options also have num_landmarks: leave one out.")
        chosen["num_landmarks"] = num_landmarks
    if attention is None:
        return AttentionChoice(None, chosen, longest)
    check_names("attention method", [attention], METHODS)
    kind = METHODS[attention].options
    check_names(f"option of {attention}", chosen, {entry.name for entry in fields(kind)})
    _check_weightless("attention", attention)
    return AttentionChoice(attention, chosen, longest)


def _check_weightless(what: str, attention: str) -> None:
    if METHODS[attention].weights:
        known = ", ".join(name for name, method in METHODS.items() if not method.weights)
        raise ValueError(
            f"{what} is {attention!r}, which has learned weights that belong to the model: make a model with this "
            f"attention and train it; expected one of {known}."
        )


def from_bert(source: Path, choice: AttentionChoice, conv_kernel_size: int | Literal["auto"] | None) -> NewModel:
    """Convert a BERT or RoBERTa to the requested attention.

    Raises:
        ValueError: It cannot be read, or has features that the encoder does not support.
    """
    theirs = read_config(source)
    family = FAMILIES[theirs["model_type"]]
    shift = theirs["pad_token_id"] + 1 if family.shifted else 0
    attention = choice.attention or "nystrom"
    taps = 33 if attention == "nystrom" else None
    positions = theirs["max_position_embeddings"] - shift
    usual = {"num_landmarks": 64} if attention == "nystrom" else {}
    shared = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    shared += ("hidden_act", "hidden_dropout_prob", "type_vocab_size", "initializer_range", "layer_norm_eps")
    config = EncoderConfig(
        **{name: theirs[name] for name in (*shared, "pad_token_id")},
        max_position_embeddings=positions,
        attention=attention,
        attention_options=usual | choice.options_of(attention, positions),
        conv_kernel_size=taps if conv_kernel_size == "auto" else conv_kernel_size,
        # The token that the classifiers of these models read.
        pooling="first",
    )
    architecture = (theirs["architectures"] or [""])[0]
    tensors = read_tensors(source)
    head = head_kind(tensors, architecture)
    renamed = rename(tensors, head=head)
    table = one_tensor(renamed.body, POSITIONS, source)
    if table.shape[0] != theirs["max_position_embeddings"]:
        raise ValueError(
            f"{source} has {table.shape[0]} rows in its position table, but config.json says max_position_embeddings "
            f"= {theirs['max_position_embeddings']}: fetch the checkpoint again."
        )
    # The rows before the first token's are never read; RoBERTa has some, too.
    renamed.body[POSITIONS] = torch.cat([table.new_zeros(POSITION_OFFSET, table.shape[1]), table[shift:]])
    plan = _with_head(renamed, head, config, theirs, source)
    if config.conv_kernel_size is not None:
        zeros = table.new_zeros(config.num_attention_heads, 1, config.conv_kernel_size, 1)
        places = [f"encoder.layer.{i}.attention.self.conv.weight" for i in range(config.num_hidden_layers)]
        plan.started = tuple(f"{plan.prefix}{place}" for place in places)
        plan.tensors |= {name: zeros.clone() for name in plan.started}
    return plan


def _with_head(renamed: Renamed, head: str, config: EncoderConfig, theirs: dict[str, Any], source: Path) -> NewModel:
    """The model with all tensors of the source that have a counterpart here."""
    body = {f"{_OWN_PREFIX}{name}": tensor for name, tensor in renamed.body.items()}
    if renamed.head:
        model = _WITH_HEAD[head]
        if model in (EncoderForSequenceClassification, EncoderForTokenClassification):
            config.id2label = {int(key): label for key, label in theirs["id2label"].items()}
            config.label2id = {label: key for key, label in config.id2label.items()}
            for name in _OF_CLASSES:
                if theirs.get(name) is not None:
                    setattr(config, name, theirs[name])
        if model in (EncoderForMultipleChoice, EncoderForSequenceClassification):
            # The pooler's.
            config.head_act = "tanh"
        mapped = len(renamed.body) + len(renamed.head)
        return NewModel(config, model, body | renamed.head, mapped, renamed.without_masked_lm)
    if renamed.masked_lm:
        act = FAMILIES[theirs["model_type"]].head_act
        config.head_act = None if act == config.hidden_act else act
        language = _language_head(renamed, config, theirs, source)
        mapped = len(renamed.body) + len(renamed.masked_lm)
        return NewModel(config, EncoderForMaskedLM, body | language, mapped, renamed.left_behind)
    return NewModel(config, EncoderModel, renamed.body, len(renamed.body), renamed.left_behind)


def _language_head(renamed: Renamed, config: EncoderConfig, theirs: dict[str, Any], source: Path) -> dict[str, Tensor]:
    """The head with its decoder, which a checkpoint may store separately or share with the word embeddings."""
    head, decoder, bias = dict(renamed.masked_lm), "cls.predictions.decoder.weight", "cls.predictions.bias"
    words = one_tensor(renamed.body, "embeddings.word_embeddings.weight", source)
    if decoder not in head and not theirs["tie_word_embeddings"]:
        raise ValueError(f"{source} has tie_word_embeddings = false but no {decoder}: fetch the checkpoint again.")
    head.setdefault(decoder, words)
    config.tie_word_embeddings = torch.equal(head[decoder], words)
    # If the checkpoint holds both, transformers adds the decoder's.
    used = "cls.predictions.decoder.bias" if "cls.predictions.decoder.bias" in head else bias
    head[bias] = head["cls.predictions.decoder.bias"] = one_tensor(head, used, source)
    return head


def from_own(source: Path, choice: AttentionChoice, conv_kernel_size: int | Literal["auto"] | None) -> NewModel:
    """Convert a model of this library, or of the published format, to the requested attention.

    Raises:
        ValueError: It cannot be read, or its attention has learned weights.
    """
    config = EncoderConfig.from_pretrained(source)
    if conv_kernel_size not in ("auto", config.conv_kernel_size):
        raise ValueError(
            f"conv_kernel_size is {conv_kernel_size} but {source} was trained with {config.conv_kernel_size}: leave it "
            "out, a Nyströmformer keeps its convolution."
        )
    changes: dict[str, Any] = {}
    if choice.attention not in (None, config.attention):
        if config.attention == NO_ATTENTION:
            raise ValueError(
                f"{source} is a model without attention, which has neither queries nor keys: make a model with "
                f"{choice.attention} and train it."
            )
        if config.attention != PLAN:
            _check_weightless(f"the attention of {source}", config.attention)
        changes["attention"] = choice.attention
        changes["attention_options"] = choice.options_of(choice.attention, config.max_position_embeddings)
    elif choice.options:
        changes["attention_options"] = choice.options
    if changes:
        # num_landmarks turns the exact attention of a published folder into Nyström attention; the published format
        # cannot express all options.
        config = EncoderConfig.from_pretrained(source, **changes, segment_means_seq_len=None)
    model = model_class(config, source)
    # Buffers that older versions saved and nothing reads.
    passed = [re.compile(pattern) for pattern in EncoderPreTrainedModel._keys_to_ignore_on_load_unexpected or ()]
    tensors = {
        name: tensor for name, tensor in read_tensors(source).items() if not any(each.search(name) for each in passed)
    }
    if model is EncoderForMaskedLM and any(name.startswith("sop.") for name in tensors):
        # The published format has one name for both.
        model = EncoderForPreTraining
    return NewModel(config, model, tensors, len(tensors))


def one_tensor(tensors: dict[str, Tensor], name: str, source: Path) -> Tensor:
    """The tensor of this name; ValueError if there is none."""
    if name not in tensors:
        raise ValueError(
            f"{source} lacks {name}: its weights are incomplete, or belong to another model than config.json says."
        )
    return tensors[name]


def with_weights(plan: NewModel, source: Path) -> EncoderPreTrainedModel:
    """Build the model and load these tensors; ValueError if one is missing, left over or of the wrong shape."""
    # All start values are replaced, so drawing them must not move the caller's random numbers.
    with torch.random.fork_rng(devices=[]):
        model = plan.model(plan.config)
    wanted, shared = model.state_dict(), set(model.all_tied_weights_keys or ())
    for name, tensor in plan.tensors.items():
        if name not in wanted:
            raise ValueError(
                f"{source} has {name}, which {plan.model.__name__} does not have: fetch the checkpoint again."
            )
        if tensor.shape != wanted[name].shape:
            raise ValueError(
                f"{source} has {name} of shape {tuple(tensor.shape)}; expected {tuple(wanted[name].shape)} by its "
                "config.json: fetch the checkpoint again."
            )
    for name in wanted:
        if name not in shared:
            one_tensor(plan.tensors, name, source)
    for name, other in (model.all_tied_weights_keys or {}).items():
        if {name, other} <= plan.tensors.keys() and not torch.equal(plan.tensors[name], plan.tensors[other]):
            raise ValueError(
                f"{source} holds different values for {name} and {other}, which its config.json ties: set "
                "tie_word_embeddings to false there."
            )
    dtypes = {tensor.dtype for tensor in plan.tensors.values() if tensor.is_floating_point()}
    if len(dtypes) == 1:
        torch.nn.Module.to(model, dtypes.pop())
    model.load_state_dict(plan.tensors, strict=False)
    return model
