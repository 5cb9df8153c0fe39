"""Conversion of a trained BERT or RoBERTa to a Nyströmformer, and of trained models to longer inputs.

The weights stay as they are. Attention becomes Nyström attention, or another method that was asked for, the skip
convolution starts at zero, and position rows move to where this library counts from. So where the landmarks suffice for
exact attention, for up to `num_landmarks` real tokens, the converted model equals its source; longer inputs are
approximated, and need further training.

Carried over: the encoder, and the heads for masked words, token classification and question answering. Left behind, and
reported by name: poolers and the classifiers on them (their tanh has no place here), and next-sentence prediction. A
source that computes what the encoder cannot, such as relative positions or a decoder, raises.

Departs from the sources: dropout of attention weights is 0, positions count from the first real token (BERT also counts
padding on the left), and all masked tokens give the same vector.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from nystrom.attention.plan import PLAN, read_plan
from nystrom.attention.registry import METHODS
from nystrom.checks import check_names
from nystrom.integrations.bert_names import FAMILIES, Renamed, read_config, rename
from nystrom.integrations.modules import DEFAULTS
from nystrom.models.classes import model_class
from nystrom.models.configuration import POSITION_OFFSET, EncoderConfig
from nystrom.models.encoder import EncoderModel, EncoderPreTrainedModel
from nystrom.models.files.folder import (
    check_fresh,
    copy_tokenizer,
    fresh_folder,
    read_tensors,
)
from nystrom.models.files.json_object import read_json
from nystrom.models.files.loading import check_weights
from nystrom.models.heads.language import EncoderForMaskedLM, EncoderForPreTraining
from nystrom.models.heads.tokens import EncoderForQuestionAnswering, EncoderForTokenClassification
from nystrom.models.positions import Lengthening, resize_positions

_POSITIONS = "embeddings.position_embeddings.weight"
_OWN_PREFIX = f"{EncoderPreTrainedModel.base_model_prefix}."


@dataclass(frozen=True)
class Conversion:
    """What a conversion did.

    Attributes:
        folder: Where the new model is.
        source: Model type of the source.
        model: Class of the new model.
        mapped: Tensors taken from the source.
        left_behind: Tensors of the source that the new model does not have.
        started: Tensors that the source does not have; all are zero.
        parameters: Number of weights of the new model.
        positions: The longest input of the source, and of the new model.
        tokenizer: Files of the tokenizer; empty where the source had none.
    """

    folder: Path
    source: str
    model: str
    mapped: int
    left_behind: tuple[str, ...]
    started: tuple[str, ...]
    parameters: int
    positions: tuple[int, int]
    tokenizer: tuple[str, ...]

    def __str__(self) -> str:
        """A summary in a few lines."""
        lines = [
            f"{self.source} -> {self.model} in {self.folder}: {self.parameters:,} parameters",
            f"mapped: {self.mapped} tensors",
            f"left behind: {', '.join(self.left_behind) or 'nothing'}",
            f"started at zero: {f'{len(self.started)} skip convolutions' if self.started else 'nothing'}",
            f"positions: {self.positions[0]} -> {self.positions[1]}",
            f"tokenizer: {', '.join(self.tokenizer) or 'none in the source; copy one into the folder'}",
        ]
        return "\n".join(lines)


def convert(
    source: Path,
    to: Path,
    *,
    attention: str | None = None,
    options: Mapping[str, object] | None = None,
    num_landmarks: int | Literal["auto"] = "auto",
    plan: Path | None = None,
    conv_kernel_size: int | Literal["auto"] | None = "auto",
    max_position_embeddings: int | None = None,
    positions: Lengthening = "repeat",
) -> Conversion:
    """Make a Nyströmformer of a BERT or RoBERTa, or give a Nyströmformer another number of positions.

    Args:
        source: Folder of a BERT, RoBERTa, XLM-RoBERTa, CamemBERT or Nyströmformer: config.json, safetensors and, if
            there is one, its tokenizer.
        to: Folder for the new model; made, or empty.
        attention: Method, such as "near_far"; Nyström attention, or what a model of this library has, if not given.
        options: Options of the method.
        num_landmarks: Landmarks m, of methods that have them; "auto" is 64, or what a Nyströmformer has.
        plan: File of a method for each layer, which `nystrom inspect --budget` writes, in place of one method for all.
        conv_kernel_size: Odd size of the skip convolution, None for none; "auto" is 33 with Nyström attention or a plan
            and none with another method, or what a Nyströmformer has, which cannot be changed.
        max_position_embeddings: The longest input, padding included; None is what the source has.
        positions: How more positions are made of the trained ones: "repeat" the table, or "interpolate" in it.

    Returns:
        What was mapped, left behind and started.

    Raises:
        ValueError: A source that cannot be read or represented, or options or a folder that do not fit.
    """
    if plan is not None and num_landmarks != "auto":
        raise ValueError(f"num_landmarks is {num_landmarks} but plan says what each layer does: leave one out.")
    if plan is not None and (attention is not None or options):
        raise ValueError("plan says what each layer does, and attention or its options are given too: leave one out.")
    planned = None if plan is None else read_plan(plan)
    asked = _asked(attention, options or {}, num_landmarks)
    check_fresh(to)
    check_weights(source)
    config = read_json(source / "config.json")
    kind = config.get("model_type")
    if kind in FAMILIES:
        made = _from_bert(source, asked, conv_kernel_size)
    elif kind in (EncoderConfig.model_type, "nystromformer"):
        made = _from_own(source, asked, conv_kernel_size)
    else:
        known = ", ".join([*FAMILIES, "nystromformer", EncoderConfig.model_type])
        raise ValueError(
            f"{source} holds a model of type {kind!r}; expected one of {known}. For other models, "
            "attn_implementation='nystrom' replaces the attention alone."
        )
    if planned is not None:
        planned.check_layers(made.config.num_hidden_layers, str(source))
        made.config.attention, made.config.attention_options = PLAN, planned.options
        # The published format has one method for all layers.
        made.config.segment_means_seq_len = None
    before = made.config.max_position_embeddings
    wanted = before if max_position_embeddings is None else max_position_embeddings
    if made.config.positions == "learned":
        name = f"{made.prefix}{_POSITIONS}"
        table = _one(made.tensors, name, source)
        resized = resize_positions(table[POSITION_OFFSET:], wanted, how=positions)
        made.tensors[name] = torch.cat([table[:POSITION_OFFSET], resized])
    made.config.max_position_embeddings = wanted
    model = _load(made, source)
    with fresh_folder(to) as partial:
        model.save_pretrained(partial)
        default = FAMILIES[kind].tokenizer if kind in FAMILIES else None
        tokenizer = copy_tokenizer(source, partial, max_length=wanted, default_class=default)
    return Conversion(
        folder=to,
        source=kind,
        model=type(model).__name__,
        mapped=made.mapped,
        left_behind=made.left_behind,
        started=made.started,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        positions=(before, wanted),
        tokenizer=tokenizer,
    )


@dataclass
class _NewModel:
    """The parts of the new model; its position table still has the length of the source's."""

    config: EncoderConfig
    model: type[EncoderPreTrainedModel]
    tensors: dict[str, Tensor]
    mapped: int
    left_behind: tuple[str, ...] = ()
    started: tuple[str, ...] = ()

    @property
    def prefix(self) -> str:
        return "" if self.model is EncoderModel else _OWN_PREFIX


class _Asked(NamedTuple):
    """The attention that was asked for; None for the method of the source."""

    attention: str | None
    options: dict[str, Any]


def _asked(attention: str | None, options: Mapping[str, object], num_landmarks: int | Literal["auto"]) -> _Asked:
    """The attention that was asked for, checked as far as it can be without the source."""
    found = dict(options)
    if num_landmarks != "auto":
        if "num_landmarks" in found:
            raise ValueError(f"num_landmarks is {num_landmarks}, and options have num_landmarks too: leave one out.")
        found["num_landmarks"] = num_landmarks
    if attention is None:
        return _Asked(None, found)
    check_names("attention method", [attention], METHODS)
    kind = METHODS[attention].options
    check_names(f"option of {attention}", found, {entry.name for entry in fields(kind)})
    _check_weightless("attention", attention)
    return _Asked(attention, DEFAULTS.get(attention, {}) | found)


def _check_weightless(what: str, attention: str) -> None:
    if METHODS[attention].weights is not None:
        known = ", ".join(name for name, method in METHODS.items() if method.weights is None)
        raise ValueError(
            f"{what} is {attention!r}, which has weights of its own that belong to the model: make a model with this "
            f"attention and train it; expected one of {known}."
        )


def _from_bert(source: Path, asked: _Asked, conv_kernel_size: int | Literal["auto"] | None) -> _NewModel:
    theirs = read_config(source)
    family = FAMILIES[theirs["model_type"]]
    shift = theirs["pad_token_id"] + 1 if family.shifted else 0
    attention = asked.attention or "nystrom"
    taps = 33 if attention == "nystrom" else None
    shared = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    shared += ("hidden_act", "hidden_dropout_prob", "type_vocab_size", "initializer_range", "layer_norm_eps")
    config = EncoderConfig(
        **{name: theirs[name] for name in (*shared, "pad_token_id")},
        max_position_embeddings=theirs["max_position_embeddings"] - shift,
        attention=attention,
        attention_options={"num_landmarks": 64} | asked.options if attention == "nystrom" else asked.options,
        conv_kernel_size=taps if conv_kernel_size == "auto" else conv_kernel_size,
        # The token that the classifiers of these models read.
        pooling="first",
    )
    architecture = (theirs["architectures"] or [""])[0]
    renamed = rename(read_tensors(source), token_classifier=architecture.endswith("ForTokenClassification"))
    if family.head_act not in (None, theirs["hidden_act"]):
        # Its language head has an activation of its own, and this encoder's has that of the configuration.
        renamed = renamed.without_masked_lm()
    table = _one(renamed.body, _POSITIONS, source)
    if table.shape[0] != theirs["max_position_embeddings"]:
        raise ValueError(
            f"{source} has {table.shape[0]} rows in its position table, but config.json says max_position_embeddings "
            f"= {theirs['max_position_embeddings']}: fetch the checkpoint again."
        )
    # The rows before the first token's are never read; RoBERTa has some, too.
    renamed.body[_POSITIONS] = torch.cat([table.new_zeros(POSITION_OFFSET, table.shape[1]), table[shift:]])
    plan = _with_head(renamed, config, theirs, source)
    if config.conv_kernel_size is not None:
        zeros = table.new_zeros(config.num_attention_heads, 1, config.conv_kernel_size, 1)
        places = [f"encoder.layer.{i}.attention.self.conv.weight" for i in range(config.num_hidden_layers)]
        plan.started = tuple(f"{plan.prefix}{place}" for place in places)
        plan.tensors |= {name: zeros.clone() for name in plan.started}
    return plan


def _with_head(renamed: Renamed, config: EncoderConfig, theirs: dict[str, Any], source: Path) -> _NewModel:
    """The model with as much of the source as has a place here."""
    body = {f"{_OWN_PREFIX}{name}": tensor for name, tensor in renamed.body.items()}
    if renamed.answers:
        questions = any(name.startswith("qa_outputs.") for name in renamed.answers)
        if not questions:
            config.id2label = {int(key): label for key, label in theirs["id2label"].items()}
            config.label2id = {label: key for key, label in config.id2label.items()}
        model = EncoderForQuestionAnswering if questions else EncoderForTokenClassification
        left_behind = renamed.without_masked_lm().left_behind
        return _NewModel(config, model, body | renamed.answers, len(renamed.body) + len(renamed.answers), left_behind)
    if renamed.masked_lm:
        head = _language_head(renamed, config, theirs, source)
        mapped = len(renamed.body) + len(renamed.masked_lm)
        return _NewModel(config, EncoderForMaskedLM, body | head, mapped, renamed.left_behind)
    return _NewModel(config, EncoderModel, renamed.body, len(renamed.body), renamed.left_behind)


def _language_head(renamed: Renamed, config: EncoderConfig, theirs: dict[str, Any], source: Path) -> dict[str, Tensor]:
    """The head with its decoder, which a checkpoint may hold separately or share with the word embeddings."""
    head, decoder, bias = dict(renamed.masked_lm), "cls.predictions.decoder.weight", "cls.predictions.bias"
    words = _one(renamed.body, "embeddings.word_embeddings.weight", source)
    if decoder not in head and not theirs["tie_word_embeddings"]:
        raise ValueError(f"{source} has tie_word_embeddings = false but no {decoder}: fetch the checkpoint again.")
    head.setdefault(decoder, words)
    config.tie_word_embeddings = torch.equal(head[decoder], words)
    # Where the checkpoint holds both, transformers adds the decoder's.
    used = "cls.predictions.decoder.bias" if "cls.predictions.decoder.bias" in head else bias
    head[bias] = head["cls.predictions.decoder.bias"] = _one(head, used, source)
    return head


def _from_own(source: Path, asked: _Asked, conv_kernel_size: int | Literal["auto"] | None) -> _NewModel:
    config = EncoderConfig.from_pretrained(source)
    if conv_kernel_size not in ("auto", config.conv_kernel_size):
        raise ValueError(
            f"conv_kernel_size is {conv_kernel_size} but {source} was trained with {config.conv_kernel_size}: leave it "
            "out, a Nyströmformer keeps its convolution."
        )
    changes: dict[str, Any] = {}
    if asked.attention not in (None, config.attention):
        if config.attention != PLAN:
            _check_weightless(f"the attention of {source}", config.attention)
        changes["attention"] = asked.attention
    if asked.options:
        changes["attention_options"] = asked.options
    if changes:
        # num_landmarks turns the exact attention of a published folder into Nyström attention; the published format
        # cannot say all that may have been asked for.
        config = EncoderConfig.from_pretrained(source, **changes, segment_means_seq_len=None)
    model = model_class(config, source)
    tensors = read_tensors(source)
    if model is EncoderForMaskedLM and any(name.startswith("sop.") for name in tensors):
        # The published format has one name for both.
        model = EncoderForPreTraining
    return _NewModel(config, model, tensors, len(tensors))


def _one(tensors: dict[str, Tensor], name: str, source: Path) -> Tensor:
    if name not in tensors:
        raise ValueError(f"{source} lacks {name}: its weights are cut off, or of another model than config.json says.")
    return tensors[name]


def _load(plan: _NewModel, source: Path) -> EncoderPreTrainedModel:
    """The model with these tensors.

    Raises:
        ValueError: One is missing, left over or of another shape.
    """
    # All start values are replaced, so drawing them must not move the caller's random numbers.
    with torch.random.fork_rng(devices=[]):
        model = plan.model(plan.config)
    wanted, shared = model.state_dict(), set(model.all_tied_weights_keys or ())
    for name, tensor in plan.tensors.items():
        if name not in wanted:
            raise ValueError(f"{source} has {name}, which {plan.model.__name__} has not: fetch the checkpoint again.")
        if tensor.shape != wanted[name].shape:
            raise ValueError(
                f"{source} has {name} of shape {tuple(tensor.shape)}; expected {tuple(wanted[name].shape)} by its "
                "config.json: fetch the checkpoint again."
            )
    for name in wanted:
        if name not in shared:
            _one(plan.tensors, name, source)
    for name, other in (model.all_tied_weights_keys or {}).items():
        if {name, other} <= plan.tensors.keys() and not torch.equal(plan.tensors[name], plan.tensors[other]):
            raise ValueError(
                f"{source} holds different values for {name} and {other}, which its config.json makes one: set "
                "tie_word_embeddings to false there."
            )
    dtypes = {tensor.dtype for tensor in plan.tensors.values() if tensor.is_floating_point()}
    if len(dtypes) == 1:
        torch.nn.Module.to(model, dtypes.pop())
    model.load_state_dict(plan.tensors, strict=False)
    return model
