"""The configuration of an encoder, in Hugging Face format.

Fields that transformers' `NystromformerConfig` has keep its names; the others choose the attention by its name in
`nystrom.attention.registry`, the place of the norms and the pooling. A value that contradicts another, or an unused
keyword, raises when the configuration is created; values are checked again when a model is created.

A configuration *file* may hold more than these fields: unknown fields become attributes, as in transformers, and are
saved again. So an attribute that was set on a configuration survives saving and loading.

Departs from `NystromformerConfig`: by default there is no padding token and no convolution, and
`attention_probs_dropout_prob` must be 0 except for exact and kernelized attention with the design "authors". No other
attention stores weights that could be dropped; transformers' own model stores some but never drops them, so a published
0.1 is loaded as 0.

A folder has one of two formats. This library's own has `model_type` "nystrom"; AutoModel gives the classes of
`nystrom.models` for it. The published one has "nystromformer" (see `nystrom.models.files.published`): the classes of
`nystrom.models` load it as well, while AutoModel gives transformers' own class for it. A configuration is written in
the published format where `segment_means_seq_len` is set, as loading such a folder does.
"""

import os
import warnings
from dataclasses import field, fields
from pathlib import Path
from typing import Any, Self, get_args

from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from nystrom.attention.method_names import NO_ATTENTION
from nystrom.attention.plan import PLAN, LayerChoice, plan_of_options
from nystrom.checks import (
    Design,
    FeedForward,
    Norm,
    PooledNormKind,
    Pooling,
    PositionKind,
    check_at_least,
    check_choice,
    check_flag,
    check_names,
)
from nystrom.json_files import read_json
from nystrom.models.field_checks import (
    check_attention,
    check_dropped_weights,
    check_frozen,
    check_heads,
    check_no_option,
    check_numbers,
    check_positions,
    check_taps,
    options_of,
)
from nystrom.models.files.config_file import OWN_TYPE, as_own, check_config_file
from nystrom.models.files.published import check_publishable, write_published
from nystrom.whole_files import write_whole

# Rows of the position table before that of the first token: where the published checkpoints start.
POSITION_OFFSET = 2

# Names that transformers itself writes into a configuration or passes to its constructor, besides the fields.
_FROM_TRANSFORMERS = {
    *("model_type", "num_labels", "name_or_path", "torch_dtype", "use_cache", "output_attentions"),
    *("attn_implementation", "experts_implementation", "auto_map", "quantization_config"),
}
# The keyword by which `from_dict` marks the others as coming from a file, where unknown ones are kept.
_FROM_FILE = "_from_file"


class EncoderConfig(PreTrainedConfig):
    """Configuration of `EncoderModel` and the models built on it.

    Args:
        vocab_size: Number of tokens in the vocabulary.
        hidden_size: Width of a token; a multiple of the heads.
        num_hidden_layers: Layers.
        num_attention_heads: Heads.
        intermediate_size: Width inside the feed-forward block.
        hidden_act: Activation, by its name in transformers.
        head_act: Activation inside a head with two layers; None means `hidden_act` for masked words and for sequences
            (ReLU in the other designs), ReLU for choices.
        hidden_dropout_prob: Dropout on embeddings, on the output of each block, and in the classification head.
        attention_probs_dropout_prob: Dropout on the weights of exact and kernelized attention of the design "authors",
            see `nystrom.models.parts.dropped_weights`; 0 elsewhere.
        max_position_embeddings: The longest input, padding included; with rotary positions or none, inputs may be
            longer.
        type_vocab_size: Number of segment types in `token_type_ids`.
        initializer_range: Standard deviation of the initial weights; used by the design "transformers" only.
        layer_norm_eps: Added to the variance in a norm.
        pad_token_id: Id of the padding token, whose embedding stays zero; None if every id is a real token.
        conv_kernel_size: Size of the skip convolution, a depthwise convolution of the values that is added to the
            attention; odd, or None for none. It is part of Nyströmformer, and works with every method.
        attention_size: Width of the queries, keys and values of all heads together; None means `hidden_size`.
        attention: Name of a method in `nystrom.attention.registry.METHODS`; or "nystrom_plan", a method for each layer;
            or "none", values that pass through, so that the convolutions alone join tokens.
        attention_options: Options of that method, by name; the others have the method's defaults. For a plan its
            layers, see `nystrom.attention.plan.AttentionPlan.options`.
        share_attention_weights: All layers share one Module of the method and its weights, such as Linformer's
            projections; only for methods with learned weights.
        norm: "post" (after each block, and on the embeddings) or "pre" (before each block, and after the last).
        pooling: How tokens are pooled to one vector per sequence for the head: the "mean" over real tokens, the "first"
            one, the "max" of each channel over them, or "cls", a learned token before the first.
        pooled_norm: "batch" normalises each channel of that vector to mean 0 and variance 1 over the batch (in
            training, the sequences that a process computes at once) before the classification head; or "none". See
            `nystrom.models.parts.modern`.
        positions: "learned", a table of vectors that are added to the words; "rotary", queries and keys rotated by
            their position, see `nystrom.models.parts.rotary`; or "none".
        rotary_share: Share of the channel pairs that are rotated, in (0, 1].
        rotary_across_heads: Spread the angles over the heads, from local to global ones; otherwise all heads use the
            same angles.
        short_conv_kernel_size: Size of the depthwise convolutions of queries, keys and values, one kernel per channel,
            before the method; odd, or None for none.
        feed_forward: "plain", "gated" by the activation, or "glu", gated by the sigmoid; see `nystrom.models.blocks`.
        design: Classification head, dropout and initial values as in "transformers", in the two papers' code for the
            Long Range Arena ("authors") or in its "official" code; see `nystrom.models.design`.
        task: The task that the model was trained on, if any.
        tie_word_embeddings: Tie the output layer of the masked LM head to the word embeddings.
        sparse_prediction: In training with labels, the heads for masked words score only the tokens that have a label:
            the same loss at a fraction of the time and memory. Their logits are then (masked tokens, v) rather than (b,
            n, v). Evaluation scores all tokens.
        bos_token_id: Token that begins a text; stored for the published format, not used by any model.
        eos_token_id: Token or tokens that end a text; likewise.
        segment_means_seq_len: The only input length that transformers' own model supports, unless attention is exact.
            If set, the configuration is written in the published format, so that transformers itself loads the folder;
            None writes this library's format. The models here take any length either way.

    Raises:
        ValueError: A value out of range, an unknown name, an unused keyword, or a value that the published format
            cannot express if `segment_means_seq_len` asks for it.
    """

    model_type = OWN_TYPE

    vocab_size: int = 30000
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu_new"
    head_act: str | None = None
    hidden_dropout_prob: float | int = 0.1
    attention_probs_dropout_prob: float | int = 0.0
    max_position_embeddings: int = 510
    type_vocab_size: int = 2
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-5
    pad_token_id: int | None = None
    conv_kernel_size: int | None = None
    attention_size: int | None = None
    attention: str = "nystrom"
    attention_options: dict[str, Any] = field(default_factory=dict)
    share_attention_weights: bool = False
    norm: Norm = "post"
    pooling: Pooling = "mean"
    pooled_norm: PooledNormKind = "none"
    positions: PositionKind = "learned"
    rotary_share: float | int = 1.0
    rotary_across_heads: bool = False
    short_conv_kernel_size: int | None = None
    feed_forward: FeedForward = "plain"
    design: Design = "transformers"
    task: str | None = None
    tie_word_embeddings: bool = True
    sparse_prediction: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    segment_means_seq_len: int | None = None

    def __post_init__(self, **kwargs: Any):
        from_file = kwargs.pop(_FROM_FILE, False)
        if self.id2label is not None and kwargs.get("num_labels", len(self.id2label)) != len(self.id2label):
            raise ValueError(
                f"num_labels is {kwargs['num_labels']} but id2label names {len(self.id2label)} labels; "
                "expected the same number, or one of the two."
            )
        unknown = [name for name in kwargs if name[0] != "_" and name not in _FROM_TRANSFORMERS]
        if from_file:
            self._check_extra(unknown)
        else:
            check_no_option(kwargs)
            check_names("EncoderConfig", unknown, {entry.name for entry in fields(self)} | _FROM_TRANSFORMERS)
        self.check()
        super().__post_init__(**kwargs)

    def check(self) -> None:
        """Check all values again, including those set after the configuration was created.

        Raises:
            ValueError: The message names the first invalid field, its value and what was expected.
        """
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"):
            check_at_least(name, getattr(self, name), 1)
        check_at_least("max_position_embeddings", self.max_position_embeddings, 1)
        check_at_least("type_vocab_size", self.type_vocab_size, 1)
        check_heads(self.hidden_size, self.attention_size, self.num_attention_heads)
        check_choice("design", self.design, get_args(Design))
        check_choice("norm", self.norm, get_args(Norm))
        check_choice("pooling", self.pooling, get_args(Pooling))
        check_choice("pooled_norm", self.pooled_norm, get_args(PooledNormKind))
        check_choice("feed_forward", self.feed_forward, get_args(FeedForward))
        check_names("hidden_act", [self.hidden_act], ACT2FN)
        if self.head_act is not None:
            check_names("head_act", [self.head_act], ACT2FN)
        if self.pad_token_id is not None and not 0 <= self.pad_token_id < self.vocab_size:
            raise ValueError(
                f"pad_token_id is {self.pad_token_id} but vocab_size is {self.vocab_size}; "
                "expected a token of the vocabulary, or None where every token is real."
            )
        if self.chunk_size_feed_forward:
            raise ValueError(
                f"chunk_size_feed_forward is {self.chunk_size_feed_forward}; expected 0: the block runs in one piece."
            )
        check_flag("sparse_prediction", self.sparse_prediction)
        dropout = ("hidden_dropout_prob", "attention_probs_dropout_prob")
        check_numbers(
            positive={name: getattr(self, name) for name in ("initializer_range", "layer_norm_eps")},
            shares={name: getattr(self, name) for name in dropout},
        )
        check_dropped_weights(self.attention_probs_dropout_prob, self.attention, design=self.design)
        check_attention(
            self.attention, self.attention_options, layers=self.num_hidden_layers, shared=self.share_attention_weights
        )
        check_frozen(self.design, map(self.layer_attention, range(self.num_hidden_layers)))
        check_taps("conv_kernel_size", self.conv_kernel_size)
        check_taps("short_conv_kernel_size", self.short_conv_kernel_size)
        check_positions(
            self.positions,
            share=self.rotary_share,
            across_heads=self.rotary_across_heads,
            head_dim=self.head_size,
            attends=self.attention != NO_ATTENTION,
        )
        if self.segment_means_seq_len is not None:
            check_publishable({name: getattr(self, name) for name in EncoderConfig.__annotations__})

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path: str | os.PathLike, **kwargs: Any) -> tuple[dict, dict]:
        """Read config.json of either format as fields of this class; also returns the unused `kwargs`.

        Raises:
            ValueError: config.json is missing, is not a JSON object, or belongs to another model.
        """
        folder = Path(pretrained_model_name_or_path) / (kwargs.get("subfolder") or "")
        if folder.is_dir() and kwargs.get("gguf_file") is None:
            check_config_file(folder)
        content, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        return as_own(content, kwargs, f"model {pretrained_model_name_or_path}"), kwargs

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Self:
        """Make a configuration from the result of `to_dict`, or from a published one, with some fields replaced.

        `attention_options` in `kwargs` replaces options one by one where the method stays the same; `num_landmarks`
        among them turns a published configuration with exact attention into one with Nyström attention.

        Args:
            config_dict: The fields; others become attributes of the configuration.
            **kwargs: Replacements for fields, as passed on by a model's `from_pretrained`.

        Raises:
            ValueError: The cases of the class.
        """
        check_no_option(kwargs)
        content = as_own(dict(config_dict), kwargs, "the configuration")
        replaced = {name: kwargs.pop(name) for name in EncoderConfig.__annotations__ if name in kwargs}
        options, before = replaced.get("attention_options"), content.get("attention", cls.attention)
        if isinstance(options, dict) and replaced.get("attention", before) == before:
            replaced["attention_options"] = content.get("attention_options", {}) | options
        elif "attention" in replaced and replaced["attention"] != before:
            replaced.setdefault("attention_options", {})
        if "num_labels" in kwargs and "id2label" not in kwargs:
            content = {name: value for name, value in content.items() if name not in ("id2label", "label2id")}
        return super().from_dict(content | replaced | {_FROM_FILE: True}, **kwargs)

    @classmethod
    def from_json_file(cls, json_file: str | os.PathLike) -> Self:
        """Read one file of either format; see `from_dict`."""
        return cls.from_dict(read_json(Path(json_file)))

    def to_json_file(self, json_file_path: str | os.PathLike, use_diff: bool = True) -> None:
        """Write config.json, in the published format where `segment_means_seq_len` is set; ValueError if that cannot
        express it.
        """
        self.check()
        if self.segment_means_seq_len is None:
            super().to_json_file(json_file_path, use_diff=use_diff)
        else:
            write_whole(Path(json_file_path), write_published(self.to_dict()).to_json_string())

    @property
    def head_size(self) -> int:
        """Width of the queries, keys and values of a head."""
        return (self.attention_size or self.hidden_size) // self.num_attention_heads

    @property
    def longest_input(self) -> int | None:
        """The longest input, padding included; None if positions set no limit."""
        return self.max_position_embeddings if self.positions == "learned" else None

    def layer_attention(self, layer: int) -> LayerChoice:
        """The method of a layer, and its options."""
        if self.attention == PLAN:
            return plan_of_options(self.attention_options).layers[layer]
        return LayerChoice(self.attention, self.attention_options)

    def _check_extra(self, names: list[str]) -> None:
        """Check additional fields of a file before they become attributes."""
        options = options_of([self.attention])
        for name in names:
            # transformers would read its weights from the file of that name; the others would replace a method.
            if name == "transformers_weights" or hasattr(type(self), name):
                raise ValueError(
                    f"the configuration holds {name!r}, which cannot be an attribute of EncoderConfig: remove it from "
                    "config.json, or rename it."
                )
            if name in options:
                warnings.warn(
                    f"the configuration holds {name!r}, which nothing reads: the options of {self.attention} attention "
                    "belong in attention_options.",
                    UserWarning,
                    stacklevel=2,
                )
