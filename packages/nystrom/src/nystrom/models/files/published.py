"""The published format of Nyströmformer: its config.json as fields of `EncoderConfig`, and back.

The checkpoints `uw-madison/nystromformer-512` ... `-4096`, and all that transformers' `NystromformerFor...` classes
save, have `model_type` "nystromformer". The fields of `EncoderConfig` that compute the same:

| config.json | means |
|---|---|
| every file | the norm after each block, heads that read the first token |
| `num_landmarks` equal to `segment_means_seq_len` | exact attention, at every length; all the published checkpoints |
| another `num_landmarks` | Nyström attention, only for inputs of exactly `segment_means_seq_len` tokens |
| `inv_coeff_init_option` false | the start value of the inverse of the authors; taken here for each sequence alone |
| `inv_coeff_init_option` true | a start value per matrix, "paper" here; transformers' class fails at it |
| `attention_probs_dropout_prob` | nothing: it is never applied, and is read as 0 |

Both kinds of attention have the skip convolution of the values. Unknown fields are kept unchanged, as in transformers.

`from_pretrained(folder, attention_options={"num_landmarks": 32})` changes the number of landmarks. If the folder has
exact attention, this switches it to Nyström attention; if this format cannot express the result, the error says so, and
`segment_means_seq_len=None` selects this library's own format.

Source: `transformers/models/nystromformer/modeling_nystromformer.py`, version 5.23.
"""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from transformers import NystromformerConfig

from nystrom.attention.methods.nystrom import NystromOptions
from nystrom.checks import check_at_least

PUBLISHED_TYPE = NystromformerConfig.model_type

_DEFAULTS = {entry.name: entry.default for entry in fields(NystromformerConfig) if entry.default is not MISSING}
# Fields with one name and one meaning in both configurations.
_SHARED = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act"),
    *("hidden_dropout_prob", "max_position_embeddings", "type_vocab_size", "initializer_range", "layer_norm_eps"),
    *("pad_token_id", "bos_token_id", "eos_token_id", "conv_kernel_size", "tie_word_embeddings"),
)
# Fields of `EncoderConfig` that the format does not have.
_OURS = {"attention", "attention_options", "share_attention_weights", "norm", "pooling", "pooled_norm"}
_OURS |= {"positions", "rotary_share", "rotary_across_heads", "short_conv_kernel_size", "feed_forward"}
_OURS |= {"attention_size", "design", "head_act"}
# Fields that are read by rules of their own, or follow from others.
_RULED = {"segment_means_seq_len", "num_landmarks", "attention_probs_dropout_prob"}
_RULED |= {"inv_coeff_init_option", "inv_init_coeff_option"}
# Fields that change nothing where they hold this value, and that ask for another model where they do not.
_INERT = {
    "add_cross_attention": False,
    "is_decoder": False,
    "is_encoder_decoder": False,
    "position_embedding_type": "absolute",
}
# Fields of older files that say nothing about the model, and what is written anew each time.
_IGNORED = {"model_type", "use_cache", "gradient_checkpointing", "finetuning_task", "transformers_version"}


def read_published(content: Mapping[str, Any], *, num_landmarks: int | None = None) -> dict[str, Any]:
    """Translate a published configuration to fields of `EncoderConfig`.

    `num_landmarks` takes the place of the file's, and selects Nyström attention.

    Raises:
        ValueError: A field of this library's own format, or a value that means a different model.
    """
    for name in sorted(_OURS & content.keys()):
        raise ValueError(
            f"config.json holds {name!r}, a field of this library's own format, but is of the published type "
            f"{PUBLISHED_TYPE!r}, in which it means nothing: remove it, or pass {name}= and "
            "segment_means_seq_len=None to from_pretrained."
        )
    for name, wanted in _INERT.items():
        if content.get(name, wanted) not in (wanted, None):
            raise ValueError(f"{name} is {content[name]!r}; expected {wanted!r}: Nyströmformer has no other.")
    start = content.get("inv_coeff_init_option", False)
    if not isinstance(start, bool):
        raise ValueError(f"inv_coeff_init_option is {start!r}; expected true or false.")
    length, stored = (content.get(name, _DEFAULTS[name]) for name in ("segment_means_seq_len", "num_landmarks"))
    check_at_least("segment_means_seq_len", length, 1)
    check_at_least("num_landmarks", stored, 1)
    read = {name: value for name, value in content.items() if name not in _RULED | _INERT.keys() | _IGNORED}
    read |= {name: content.get(name, _DEFAULTS[name]) for name in _SHARED}
    read |= {"norm": "post", "pooling": "first", "segment_means_seq_len": length}
    if num_landmarks is None and stored == length:
        read |= {"attention": "softmax", "attention_options": {}}
    else:
        landmarks = stored if num_landmarks is None else num_landmarks
        options = {"num_landmarks": landmarks, "z0": "paper" if start else "sequence"}
        read |= {"attention": "nystrom", "attention_options": options}
    return _rename(read, "Nystromformer", "Encoder")


def write_published(content: Mapping[str, Any]) -> NystromformerConfig:
    """Translate the result of `EncoderConfig.to_dict`, once `check_publishable` has accepted it, to that of
    transformers.
    """
    length = content["segment_means_seq_len"]
    exact = content["attention"] == "softmax"
    landmarks = length if exact else NystromOptions(**content["attention_options"]).num_landmarks
    kept = {name: value for name, value in content.items() if name not in _OURS | _RULED | _IGNORED}
    # transformers does not know these two, so they are written only where they say something.
    kept = {name: value for name, value in kept.items() if name not in ("task", "sparse_prediction") or value}
    return NystromformerConfig(
        **_rename(kept, "Encoder", "Nystromformer"),
        segment_means_seq_len=length,
        num_landmarks=landmarks,
        attention_probs_dropout_prob=0.0,
    )


def check_publishable(content: Mapping[str, Any]) -> None:
    """Raise ValueError for the first field that transformers' own model cannot compute, each being valid by itself."""
    length = content["segment_means_seq_len"]
    check_at_least("segment_means_seq_len", length, 1)
    wanted = {"norm": "post", "pooling": "first", "positions": "learned"}
    wanted |= {
        "short_conv_kernel_size": None,
        "feed_forward": "plain",
        "pooled_norm": "none",
        "attention_size": None,
        "head_act": None,
        "design": "transformers",
    }
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
            f"num_landmarks is {m} as well, which means exact attention there (attention='softmax' here; or set "
            "segment_means_seq_len to the length that transformers is to take)"
        )
    elif length % m:
        reasons.append(f"num_landmarks is {m}, which does not divide it")
    return reasons


def _rename(content: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    """Rename the classes in `architectures` to those of the other library."""
    if names := content.get("architectures"):
        # transformers has no head for pretraining; its masked LM reads the same folder.
        names = [f"{new}{name.removeprefix(old)}" if name.startswith(old) else name for name in names]
        content["architectures"] = [
            "NystromformerForMaskedLM" if x == "NystromformerForPreTraining" else x for x in names
        ]
    return content
