"""The published format of Nyströmformer: what its config.json says in the words of `EncoderConfig`, and back.

The checkpoints `uw-madison/nystromformer-512` ... `-4096`, and all that transformers' `NystromformerFor...` classes
save, have `model_type` "nystromformer". What those classes compute, in the fields of `EncoderConfig`:

| config.json | means |
|---|---|
| always | the norm after each block, heads that read the first token |
| `num_landmarks` equal to `segment_means_seq_len` | exact attention, at every length; all the published checkpoints |
| another `num_landmarks` | Nyström attention, only for inputs of exactly `segment_means_seq_len` tokens |
| `inv_coeff_init_option` false | the start value of the inverse of the authors; taken here for each sequence alone |
| `inv_coeff_init_option` true | a start value per matrix, "paper" here; transformers' class fails at it |
| `attention_probs_dropout_prob` | nothing: it is never applied, and is read as 0 |

The convolution of the values is there in both kinds of attention.

The number of landmarks is changed by `from_pretrained(folder, attention_options={"num_landmarks": 32})`. Where the
folder has exact attention this makes it Nyström attention; if the result has no place in this format, the error says
so, and `segment_means_seq_len=None` beside it takes this library's own.

Source: `transformers/models/nystromformer/modeling_nystromformer.py`, version 5.23.
"""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from transformers import NystromformerConfig, PreTrainedConfig

from nystrom.attention.methods.nystrom import NystromOptions
from nystrom.checks import check_at_least, check_names

PUBLISHED_TYPE = NystromformerConfig.model_type

_DEFAULTS = {entry.name: entry.default for entry in fields(NystromformerConfig) if entry.default is not MISSING}
# Fields with one name and one meaning in both configurations.
_SHARED = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act"),
    *("hidden_dropout_prob", "max_position_embeddings", "type_vocab_size", "initializer_range", "layer_norm_eps"),
    *("pad_token_id", "bos_token_id", "eos_token_id", "conv_kernel_size", "tie_word_embeddings"),
)
# What any configuration of transformers may hold beside the model's own fields.
_OF_ALL_MODELS = {entry.name for entry in fields(PreTrainedConfig)} | {"torch_dtype", "num_labels", "output_attentions"}
# Words that change nothing where they hold this value, and that ask for another model where they do not.
_INERT = {
    "add_cross_attention": False,
    "is_decoder": False,
    "is_encoder_decoder": False,
    "position_embedding_type": "absolute",
}
# Words of older files that say nothing of the model.
_IGNORED = {"model_type", "use_cache", "gradient_checkpointing", "finetuning_task", "transformers_version"}


def read_published(content: Mapping[str, Any], *, num_landmarks: int | None = None) -> dict[str, Any]:
    """Translate a published configuration.

    Args:
        content: What its config.json holds.
        num_landmarks: Landmarks in place of the file's; asking for them asks for Nyström attention.

    Returns:
        Fields of `EncoderConfig`.

    Raises:
        ValueError: A name that the format does not have, or a value that asks for another model.
    """
    own = {"segment_means_seq_len", "num_landmarks", "attention_probs_dropout_prob"}
    own |= {"inv_coeff_init_option", "inv_init_coeff_option", "task", *_SHARED, *_INERT, *_IGNORED}
    check_names("field of a published config.json", [name for name in content if name[0] != "_"], own | _OF_ALL_MODELS)
    for name, wanted in _INERT.items():
        if content.get(name, wanted) not in (wanted, None):
            raise ValueError(f"{name} is {content[name]!r}; expected {wanted!r}: Nyströmformer has nothing else.")
    start = content.get("inv_coeff_init_option", False)
    if not isinstance(start, bool):
        raise ValueError(f"inv_coeff_init_option is {start!r}; expected true or false.")
    length, stored = (content.get(name, _DEFAULTS[name]) for name in ("segment_means_seq_len", "num_landmarks"))
    check_at_least("segment_means_seq_len", length, 1)
    check_at_least("num_landmarks", stored, 1)
    read = {name: content.get(name, _DEFAULTS[name]) for name in _SHARED}
    read |= {name: content[name] for name in _OF_ALL_MODELS - read.keys() - _INERT.keys() - _IGNORED if name in content}
    read |= {"norm": "post", "pooling": "first", "task": content.get("task"), "segment_means_seq_len": length}
    if num_landmarks is None and stored == length:
        read |= {"attention": "softmax", "attention_options": {}}
    else:
        landmarks = stored if num_landmarks is None else num_landmarks
        options = {"num_landmarks": landmarks, "z0": "paper" if start else "sequence"}
        read |= {"attention": "nystrom", "attention_options": options}
    return _rename(read, "Nystromformer", "Encoder")


def write_published(content: Mapping[str, Any]) -> dict[str, Any]:
    """Translate back what `EncoderConfig.to_dict` gives; `refuse_unpublishable` has let it pass.

    Returns:
        What transformers' `NystromformerConfig` writes into its config.json.
    """
    length = content["segment_means_seq_len"]
    exact = content["attention"] == "softmax"
    landmarks = length if exact else NystromOptions(**content["attention_options"]).num_landmarks
    kept = {name: content[name] for name in (_OF_ALL_MODELS | {*_SHARED}) - _IGNORED if name in content}
    if content["task"] is not None:
        kept["task"] = content["task"]
    written = NystromformerConfig(
        **_rename(kept, "Encoder", "Nystromformer"),
        segment_means_seq_len=length,
        num_landmarks=landmarks,
        attention_probs_dropout_prob=0.0,
    )
    return written.to_diff_dict()


def refuse_unpublishable(content: Mapping[str, Any]) -> None:
    """Refuse a configuration that asks for the published format, but that transformers' own model cannot compute.

    Args:
        content: Fields of `EncoderConfig`, each of them valid by itself.

    Raises:
        ValueError: The first field that is in the way.
    """
    length = content["segment_means_seq_len"]
    check_at_least("segment_means_seq_len", length, 1)
    wanted = {"norm": "post", "pooling": "first"}
    reasons = [f"{name} is {content[name]!r}, not {word!r}" for name, word in wanted.items() if content[name] != word]
    if content["conv_kernel_size"] is None:
        reasons.append("conv_kernel_size is None")
    if content["attention"] == "softmax":
        if content["attention_options"].get("scale") is not None:
            reasons.append("scale is not None")
    elif content["attention"] == "nystrom":
        reasons += _unlike_theirs(NystromOptions(**content["attention_options"]), length)
    else:
        reasons.append(f"attention is {content['attention']!r}")
    if reasons:
        raise ValueError(
            f"segment_means_seq_len is {length}, which asks for the published format, but {reasons[0]}: transformers' "
            "own Nyströmformer cannot compute that. Pass segment_means_seq_len=None for this library's own format."
        )


def _unlike_theirs(options: NystromOptions, length: int) -> list[str]:
    theirs = NystromOptions()
    reasons = [
        f"{name} is {getattr(options, name)!r}, not {getattr(theirs, name)!r}"
        for name in ("landmarks", "pinv", "pinv_steps", "scale")
        if getattr(options, name) != getattr(theirs, name)
    ]
    if options.z0 == "paper":
        reasons.append("z0 is 'paper', not 'sequence' or 'authors'")
    m = options.num_landmarks
    if m == length:
        reasons.append(
            f"num_landmarks is {m} too, which stands for exact attention there (attention='softmax' here; or give "
            "segment_means_seq_len the length that transformers is to take)"
        )
    elif length % m:
        reasons.append(f"num_landmarks is {m}, which does not divide it")
    return reasons


def _rename(content: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    """Name the classes in `architectures` as the other library does."""
    if names := content.get("architectures"):
        # transformers has no head for pretraining; its masked LM reads the same folder.
        names = [f"{new}{name.removeprefix(old)}" if name.startswith(old) else name for name in names]
        content["architectures"] = [
            "NystromformerForMaskedLM" if x == "NystromformerForPreTraining" else x for x in names
        ]
    return content
