r"""A transformer encoder in Hugging Face format, with the attention method chosen by the configuration.

Token x of a layer, with the norm after each block ("post", as published) or before it ("pre"):
$$\text{post: } y = N(x + A(x)),\; z = N(y + F(y)) \qquad \text{pre: } y = x + A(N(x)),\; z = y + F(N(y)),$$
A the attention with its optional convolutions, F the feed-forward block (`nystrom.models.blocks`). "pre" adds a norm
after the last layer and has none on the embeddings.

State-dict names are those of transformers' Nyströmformer; with "pre" each norm keeps the name that it has with "post",
and the last one is `encoder.LayerNorm`.

Departs from transformers' model: any length, a mask that every layer honours (see `nystrom.models.embeddings`), and no
attention weights, neither returned nor dropped.
"""

import os
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import CONFIG_NAME
from transformers.utils.output_capturing import capture_outputs

from nystrom.attention.heads import AttentionHeads
from nystrom.attention.method_names import NO_ATTENTION
from nystrom.attention.registry import METHODS
from nystrom.checks import check_names
from nystrom.models.blocks import EncoderLayer, EncoderSelfAttention, EncoderStack, build_method
from nystrom.models.configuration import EncoderConfig
from nystrom.models.design import EmbeddingTable, start_linear
from nystrom.models.embeddings import EncoderEmbeddings, check_mask
from nystrom.models.files.folder import write_card
from nystrom.models.files.loading import check_fit, check_shapes, check_tied, check_weights, find_folder, report_held
from nystrom.shapes import Group

# Attention that transformers may choose for a model by itself; nothing here reads it.
_UNSAID = (None, "sdpa", "eager")


class OutputOptions(TypedDict, total=False):
    """Keywords that every model takes, as transformers' models do.

    Also `return_dict`, which transformers handles: False returns a tuple rather than an output object. Omitted keywords
    are taken from the configuration.
    """

    output_hidden_states: bool | None  # Also return the input of each layer, and the final output
    output_attentions: bool | None  # Not supported, because no method stores its weights; True raises
    head_mask: Tensor | None  # Not supported, because no method stores weights to mask; a tensor raises


class EncoderPreTrainedModel(PreTrainedModel):
    """Base class of all models on this encoder."""

    config_class = EncoderConfig
    config: EncoderConfig
    # The attribute that holds the encoder in a model with a head, as in the published checkpoints.
    base_model_prefix = "nystromformer"
    supports_gradient_checkpointing = True
    _no_split_modules = ["EncoderLayer"]  # noqa: RUF012 (transformers' own declaration)
    _can_record_outputs = {"hidden_states": EncoderLayer}  # noqa: RUF012
    # The loss is a mean over the batch. Otherwise the Trainer would multiply it by steps and processes.
    accepts_loss_kwargs = False
    # Process group whose ranks hold pieces of the tokens, and whether a model works so: see `nystrom.parallel`.
    group: Group = None
    over_ranks = False
    # Whether it knows what to do with the token of the class, `pooling="cls"`.
    takes_class_token = False
    # Whether it pools for a head that the norm of `pooled_norm="batch"` would not reach.
    pools_without_norm = False
    # Buffers that older versions of transformers saved; they hold nothing that was learned.
    _keys_to_ignore_on_load_unexpected = [  # noqa: RUF012
        r"embeddings\.(position_ids|token_type_ids)$",
        # The head of a training that denoises, which is no part of the model.
        r"^denoiser\.",
    ]

    def __init__(self, config: EncoderConfig):
        # Values may have been set on the configuration after it was made.
        config.check()
        if config._attn_implementation not in _UNSAID:
            raise ValueError(
                f"attn_implementation is {config._attn_implementation!r}, an option of transformers' own encoders; "
                f"this one takes its attention from the configuration, such as attention='nystrom', and its methods "
                f"are {', '.join(METHODS)}."
            )
        if config.pooling == "cls" and not self.takes_class_token:
            raise ValueError(
                f"pooling is 'cls', an extra token before the input, which {type(self).__name__} does not support: "
                "use 'first', 'mean' or 'max'."
            )
        if config.pooled_norm != "none" and self.pools_without_norm:
            raise ValueError(
                f"pooled_norm is {config.pooled_norm!r}, which {type(self).__name__} does not support: use 'none'."
            )
        super().__init__(config)

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike | None, *model_args: Any, **kwargs: Any
    ) -> Any:
        """Load a folder of this library's format or of the published one, or a model of the Hugging Face Hub.

        Only safetensors are read. All weights of the encoder must be present and match; a head that the folder lacks is
        newly initialised, as for fine-tuning.

        Args:
            pretrained_model_name_or_path: The folder, or OWNER/NAME.
            *model_args: The same as in transformers.
            **kwargs: The same as in transformers: fields of `EncoderConfig` replace those of the folder, for example
                `attention_options={"num_landmarks": 32}`.

        Returns:
            The model in evaluation mode; with `output_loading_info=True` also what was missing or left over.

        Raises:
            ValueError: Another model or format, a broken file, or weights that do not match; the message names them.
            SizeMismatchError: Weights of the wrong size; both a ValueError and, as in transformers, a RuntimeError.
        """
        if kwargs.pop("use_safetensors", None) is False:
            raise ValueError(
                "use_safetensors is False; expected True: no other format is read, since they can run code."
            )
        if pretrained_model_name_or_path is None:
            made: Any = super().from_pretrained(None, *model_args, **kwargs)
            _freeze(made[0] if isinstance(made, tuple) else made)
            return made
        root = find_folder(pretrained_model_name_or_path, kwargs)
        folder = root / (kwargs.get("subfolder") or "")
        if kwargs.get("config") is None:
            # Report a fault of config.json first: it says what kind of model the folder holds.
            EncoderConfig.get_config_dict(root, subfolder=kwargs.get("subfolder") or "")
        downloaded = not Path(pretrained_model_name_or_path).is_dir() and kwargs.get("revision") is None
        check_weights(folder, variant=kwargs.get("variant"), downloaded=downloaded)
        wants_report, new_sizes = kwargs.pop("output_loading_info", False), kwargs.pop("ignore_mismatched_sizes", False)
        with report_held():
            loaded: Any = super().from_pretrained(
                root,
                *model_args,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **kwargs,
            )
            model, report = loaded
            if not new_sizes:
                check_shapes(report, folder)
            check_fit(model, report, folder)
            check_tied(model, model.get_expanded_tied_weights_keys(all_submodels=False), folder)
        _freeze(model)
        model.name_or_path = model.config.name_or_path = str(pretrained_model_name_or_path)
        return (model, report) if wants_report else model

    def set_attention(self, attention: str, options: dict[str, Any]) -> None:
        """Change the attention method of all layers, or of each layer by a plan; the model's weights stay the same.

        Args:
            attention: A value of the field `attention` of `EncoderConfig`.

        Raises:
            ValueError: An invalid method or option, or a method with weights that would have to be learned.
        """
        changed = {"attention": attention, "attention_options": options}
        if NO_ATTENTION in (attention, self.config.attention):
            raise ValueError(
                f"attention {attention!r} cannot replace {self.config.attention!r}: a model without attention has "
                "neither queries nor keys. Make a model with this attention and train it."
            )
        if self.group is not None:
            raise ValueError(
                "the tokens of this model are split across ranks, which its new attention would not know: set the "
                "attention before `parallelize`."
            )
        config = EncoderConfig.from_dict(self.config.to_dict() | changed)
        layers = [module for module in self.modules() if isinstance(module, EncoderSelfAttention)]
        built = [method.to(self.device) for i in range(len(layers)) if (method := build_method(config, i)) is not None]
        before = [layer.method for layer in layers if layer.method is not None]
        if any(list(method.state_dict()) for method in (*built, *before)):
            raise ValueError(
                f"attention {attention!r} or the present {self.config.attention!r} has learned weights, which "
                "belong to the model: make a model with this attention and train it."
            )
        self.config.attention, self.config.attention_options = attention, options
        for layer, method in zip(layers, built, strict=True):
            layer.method = method.train(layer.training)

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], is_main_process: bool = True, *others: Any, **options: Any
    ) -> None:
        """Save as transformers does, with a card that says what to import before the folder is loaded."""
        super().save_pretrained(save_directory, is_main_process, *others, **options)
        # With an adapter alone transformers writes no configuration.
        if is_main_process and (Path(save_directory) / CONFIG_NAME).is_file():
            write_card(Path(save_directory))

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        # transformers would read it off the source, and takes a file without a class of attention for one that can.
        return False

    def set_attn_implementation(self, attn_implementation: str | dict, allow_all_kernels: bool = False) -> None:
        """Raise ValueError, which names `set_attention`: setting transformers' attention here would change no layer."""
        raise ValueError(
            f"attn_implementation is {attn_implementation!r}, an option of transformers' own encoders, which nothing "
            f"in {type(self).__name__} reads: call model.set_attention('nystrom', {{'num_landmarks': 32}}), or with "
            "another method; 'softmax' is exact attention."
        )

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        start = getattr(module, "reset_parameters", None)
        if isinstance(module, nn.Linear) and self.config.design != "transformers":
            start_linear(module, self.config.design)
        elif isinstance(module, EmbeddingTable) and self.config.design != "transformers":
            module.start()
        elif start is None or isinstance(module, nn.Linear | nn.Embedding | nn.LayerNorm):
            super()._init_weights(module)
        else:
            # Attention methods and their convolution have start values of their own.
            start()


def _freeze(model: nn.Module) -> None:
    """Freeze the weights of methods whose options say so: transformers makes everything that it loads trainable."""
    for module in model.modules():
        if isinstance(module, AttentionHeads) and getattr(module.options, "frozen", False):
            module.requires_grad_(False)


class EncoderModel(EncoderPreTrainedModel):
    """The encoder without a head; with `pooling="cls"` it returns one more token, the class token."""

    over_ranks = True
    takes_class_token = True

    def __init__(self, config: EncoderConfig):
        super().__init__(config)
        self.embeddings = EncoderEmbeddings(config)
        self.encoder = EncoderStack(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """The word embeddings."""
        return self.embeddings.word_embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the word embeddings."""
        assert isinstance(value, nn.Embedding), "transformers passes back what get_input_embeddings gave, resized"
        self.embeddings.word_embeddings = value

    @capture_outputs
    def forward(
        self,
        input_ids: Int[Tensor, "b n"] | None = None,
        attention_mask: Bool[Tensor, "b n"] | Int[Tensor, "b n"] | None = None,
        token_type_ids: Int[Tensor, "b n"] | None = None,
        position_ids: Int[Tensor, "b n"] | None = None,
        inputs_embeds: Float[Tensor, "b n w"] | None = None,
        **options: Unpack[OutputOptions],
    ) -> BaseModelOutput:
        """Encode.

        Args:
            input_ids: Tokens.
            attention_mask: Real tokens, as 1 or True; None if all are. Never derived from the ids.
            token_type_ids: Segment of each token; None if all belong to the first.
            position_ids: Rows of the position table (the first token has row 2), or two more than the rotary position;
                None counts from the first real token.
            inputs_embeds: Word embeddings in place of `input_ids`.
            **options: See `OutputOptions`.

        Raises:
            ValueError: Invalid inputs; the message names them.
        """
        self._check_options(options)
        words = self.embeddings.words(input_ids, inputs_embeds)
        keep = check_mask(attention_mask, words)
        if self.embeddings.cls is not None and position_ids is not None:
            raise ValueError(
                "position_ids are given but pooling is 'cls', whose token has a position of its own: leave them out."
            )
        x, keep, turn = self.embeddings(words, keep, token_type_ids, position_ids)
        return BaseModelOutput(last_hidden_state=self.encoder(x, keep, turn))

    def _check_options(self, options: OutputOptions) -> None:
        check_names("keyword", options, OutputOptions.__annotations__)
        if options.get("head_mask") is not None:
            raise ValueError(
                "head_mask is a tensor; expected None: no method stores attention weights that it could mask."
            )
        weights = options.get("output_attentions")
        if self.config.output_attentions if weights is None else weights:
            raise ValueError(
                "output_attentions is True, but no method stores its weights: leave it out; nystrom_rows in "
                "nystrom.attention.methods.nystrom gives rows of them."
            )
