"""Tensor names of a BERT or RoBERTa checkpoint, mapped to those of an encoder of this library.

Names and layouts are those of transformers' BertModel, RobertaModel (XLM-RoBERTa and CamemBERT have the same) and
their heads; in converted TensorFlow checkpoints `gamma` and `beta` are a norm's weight and bias. The position table of
BERT starts with the first token's row, that of RoBERTa has `pad_token_id + 1` rows before it.

A tensor inside the encoder without a counterpart here would change what the model computes, so it raises. A pooler
becomes the first layer of the head on it. Heads that have no class here are dropped and reported.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import CONFIG_MAPPING
from transformers.activations import ACT2FN

from nystrom.checks import check_names
from nystrom.json_files import read_json

# Buffers that old versions of transformers saved; they hold nothing that was learned.
_BUFFERS = re.compile(r"embeddings\.(position_ids|token_type_ids)$")
_PREFIX = re.compile(r"(?:bert|roberta|camembert|xlm_roberta)\.")
_BODY = re.compile(rf"(?:{_PREFIX.pattern})?((?:embeddings|encoder)\..+)$")
_INSIDE = re.compile(
    r"embeddings\.(?:(?:word|position|token_type)_embeddings\.weight|LayerNorm\.(?:weight|bias))$"
    r"|encoder\.layer\.\d+\.(?:attention\.self\.(?:query|key|value)|intermediate\.dense"
    r"|(?:attention\.)?output\.(?:dense|LayerNorm))\.(?:weight|bias)$"
)
_MASKED_LM = {
    "cls.predictions.bias": "cls.predictions.bias",
    "cls.predictions.decoder": "cls.predictions.decoder",
    "cls.predictions.transform.dense": "cls.predictions.transform.dense",
    "cls.predictions.transform.LayerNorm": "cls.predictions.transform.LayerNorm",
    "lm_head.bias": "cls.predictions.bias",
    "lm_head.decoder": "cls.predictions.decoder",
    "lm_head.dense": "cls.predictions.transform.dense",
    "lm_head.layer_norm": "cls.predictions.transform.LayerNorm",
}
# Weights of the other heads, by the end of their class's name. BERT's and RoBERTa's classifiers differ in names alone.
_QUESTIONS = "ForQuestionAnswering"
_HEADS = {
    "ForTokenClassification": {"classifier": "classifier"},
    _QUESTIONS: {"qa_outputs": "qa_outputs"},
    "ForSequenceClassification": {
        "pooler.dense": "classifier.dense",
        "classifier": "classifier.out_proj",
        "classifier.dense": "classifier.dense",
        "classifier.out_proj": "classifier.out_proj",
    },
    "ForMultipleChoice": {"pooler.dense": "pre_classifier", "classifier": "classifier"},
}


@dataclass(frozen=True)
class Family:
    """A model type that can be converted."""

    shifted: bool  # The position table begins with extra rows, up to and including the padding token's
    tokenizer: str  # The tokenizer, for folders that do not name one
    head_act: str | None  # The activation of its language head; None if the configuration sets it


FAMILIES: dict[str, Family] = {
    "bert": Family(shifted=False, tokenizer="BertTokenizer", head_act=None),
    "roberta": Family(shifted=True, tokenizer="RobertaTokenizer", head_act="gelu"),
    "xlm-roberta": Family(shifted=True, tokenizer="XLMRobertaTokenizer", head_act="gelu"),
    "camembert": Family(shifted=True, tokenizer="CamembertTokenizer", head_act="gelu"),
}


# Model types of transformers whose table of positions begins with rows that no token has, up to the padding token's.
_SHIFTED = frozenset(
    {name for name, family in FAMILIES.items() if family.shifted}
    | {"data2vec-text", "esm", "ibert", "lilt", "longformer", "luke", "mpnet", "roberta-prelayernorm"}
    | {"xlm-roberta-xl", "xmod"}
)
# Model types that `nystrom convert` gives more positions.
_LENGTHENED = frozenset({*FAMILIES, "nystromformer", "nystrom"})


@dataclass(frozen=True)
class Renamed:
    """The tensors of a checkpoint under this library's names."""

    body: dict[str, Tensor]  # Tensors of the encoder, without a prefix
    masked_lm: dict[str, Tensor]  # Tensors of the language head; empty if there is none
    head: dict[str, Tensor]  # Tensors of another head, see `head_kind`; empty if there is none
    sources: dict[str, str]  # Maps the names here to those in the source
    left_behind: tuple[str, ...]  # Source names of tensors without a counterpart here

    @property
    def without_masked_lm(self) -> tuple[str, ...]:
        """Source names of the tensors without a counterpart, and of the language head."""
        return (*self.left_behind, *(self.sources[name] for name in self.masked_lm))


def read_config(source: Path) -> dict[str, Any]:
    """Read config.json, and fill in the defaults of its type.

    Raises:
        ValueError: A value of the wrong type, or one that cannot be represented.
    """
    content = read_json(source / "config.json")
    try:
        filled = CONFIG_MAPPING[content["model_type"]](**content).to_dict()
    except (StrictDataclassError, TypeError) as error:
        raise ValueError(
            f"{source / 'config.json'} is not a valid configuration of {content['model_type']}: {error}"
        ) from error
    filled = content | filled
    _check_representable(filled)
    if FAMILIES[filled["model_type"]].shifted and filled["pad_token_id"] is None:
        raise ValueError("the source has pad_token_id = None; expected a token id: its positions start after that row.")
    return filled


def head_kind(tensors: Iterable[str], architecture: str) -> str:
    """The end of the name of the class of a head for tokens, questions, sequences or choices; "" for none of these.

    It is known from the names in the source, and from the class in config.json.
    """
    if any(name.startswith("qa_outputs.") for name in tensors):
        return _QUESTIONS
    return next((kind for kind in _HEADS if architecture.endswith(kind)), "")


def rename(tensors: dict[str, Tensor], *, head: str) -> Renamed:
    """Sort the tensors of a BERT or RoBERTa checkpoint, with a head as `head_kind` says.

    Raises:
        ValueError: A tensor inside the encoder has no counterpart here, or is not floating point.
    """
    body: dict[str, Tensor] = {}
    masked_lm: dict[str, Tensor] = {}
    answers: dict[str, Tensor] = {}
    layers = dict(_HEADS.get(head, {}))
    if "classifier.dense.weight" in tensors:
        # Published classifiers of RoBERTa hold a pooler that nothing reads.
        layers.pop("pooler.dense", None)
    sources: dict[str, str] = {}
    left_behind = []
    for source, tensor in tensors.items():
        name = re.sub(r"\.gamma$", ".weight", re.sub(r"\.beta$", ".bias", source))
        if inside := _BODY.match(name):
            name, place = inside[1], body
            if _BUFFERS.match(name):
                continue
            if not _INSIDE.match(name):
                raise ValueError(
                    f"the source has {source}, which has no counterpart in this encoder: without it the model would "
                    "compute something different."
                )
        elif (renamed := _layer_name(name, _MASKED_LM)) is not None:
            name, place = renamed, masked_lm
        elif (renamed := _layer_name(_PREFIX.sub("", name, count=1), layers)) is not None:
            name, place = renamed, answers
        else:
            left_behind.append(source)
            continue
        if not tensor.is_floating_point():
            raise ValueError(
                f"{source} has dtype {tensor.dtype}; expected floating point weights, before quantization."
            )
        if name in place:
            raise ValueError(f"the source has {name} twice, once as {source}: it is not one model.")
        place[name], sources[name] = tensor, source
    return Renamed(body, masked_lm, answers, sources, tuple(left_behind))


def _layer_name(name: str, layers: Mapping[str, str]) -> str | None:
    """The name of a parameter here, by the names of layers; None if it is in none of them."""
    if name in layers:
        return layers[name]
    layer, _, last = name.rpartition(".")
    return f"{layers[layer]}.{last}" if layer in layers and last in ("weight", "bias") else None


def _check_representable(config: dict[str, Any]) -> None:
    """Raise ValueError for the first field of a config.json that asks for something that no encoder here computes."""
    plain = {
        "position_embedding_type": ("absolute", "relative positions are a bias per pair of tokens"),
        "is_decoder": (False, "a decoder attends causally"),
        "add_cross_attention": (False, "there is no second sequence to attend to"),
        "chunk_size_feed_forward": (0, "the block runs in one piece; set it to 0, which gives the same results"),
        "pruned_heads": ({}, "all layers have the same heads"),
        "quantization_config": (None, "weights must be floating point numbers; use the model before quantization"),
        "embedding_size": (config["hidden_size"], "words enter as wide as the layers are"),
    }
    for name, (wanted, why) in plain.items():
        came = config.get(name)
        if came is not None and came != wanted:
            raise ValueError(f"the source has {name} = {came!r}; expected {wanted!r}: {why}.")
    if not isinstance(config["hidden_act"], str):
        raise ValueError(f"the source has hidden_act = {config['hidden_act']!r}; expected the name of an activation.")
    check_names("the source's hidden_act", [config["hidden_act"]], ACT2FN)


def positions_of(config: Any) -> int | None:
    """The longest input of a model of this library or of transformers; None if there is no limit."""
    return longest_input(config) if getattr(config, "positions", "learned") == "learned" else None


def longest_input(config: Any) -> int | None:
    """The longest input that a model was made for, whether or not it has a limit; None if unknown."""
    most = getattr(config, "max_position_embeddings", None)
    # Some configurations have -1 where there is no limit.
    if not isinstance(most, int) or most < 1:
        return None
    kind, padding = getattr(config, "model_type", ""), getattr(config, "pad_token_id", None)
    # RoBERTa's table begins with rows that no token has.
    return most - padding - 1 if kind in _SHIFTED and isinstance(padding, int) else most


def more_positions(config: Any, length: int, folder: object = "FOLDER") -> str:
    """A command that gives a model more positions, in words that end a sentence."""
    if getattr(config, "model_type", "") not in _LENGTHENED:
        return "take a model that has more"
    return f"make more with `nystrom convert {folder} --to OTHER --max-position-embeddings {length}`"
