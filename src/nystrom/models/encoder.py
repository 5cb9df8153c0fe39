r"""One transformer encoder in Hugging Face format, its attention chosen by the configuration.

Token x of a layer, with the norm after each block ("post", as published) or before it ("pre"):
$$\text{post: } y = N(x + A(x)),\; z = N(y + F(y)) \qquad \text{pre: } y = x + A(N(x)),\; z = y + F(N(y)),$$
A the attention with its optional convolution of the values, F the feed-forward block. "pre" adds a norm after the last
layer and has none on the embeddings.

State-dict names are those of transformers' Nyströmformer; with "pre" each norm keeps the name that it has with "post",
and the last one is `encoder.LayerNorm`.

Departs from transformers' model: any length, a mask that every layer keeps (see `nystrom.models.embeddings`), and no
attention weights, neither returned nor dropped.
"""

import os
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput

from nystrom.attention.registry import METHODS, build_attention
from nystrom.attention.skip import DepthwiseSkip
from nystrom.models.configuration import EncoderConfig
from nystrom.models.embeddings import EncoderEmbeddings, check_mask
from nystrom.models.files.loading import check_fit, check_tied, check_weights, find_folder


class EncoderSelfAttention(nn.Module):
    """Projections, the method, and the convolution of the values where there is one."""

    def __init__(self, config: EncoderConfig):
        super().__init__()
        self.heads = config.num_attention_heads
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)
        self.method = build_attention(
            config.attention,
            num_heads=config.num_attention_heads,
            head_dim=config.hidden_size // config.num_attention_heads,
            **config.attention_options,
        )
        size = config.conv_kernel_size
        self.conv = None if size is None else DepthwiseSkip(config.num_attention_heads, size)

    def borrow_method(self, lender: "EncoderSelfAttention") -> None:
        """Use the method of another layer, which keeps it: its weights have one name, and are saved once."""
        del self.method
        object.__setattr__(self, "method", lender.method)

    def forward(self, x: Float[Tensor, "b n w"], keep: Bool[Tensor, "b n"] | None) -> Float[Tensor, "b n w"]:
        """Attend within each sequence."""
        q, k, v = (
            project(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for project in (self.query, self.key, self.value)
        )
        if self.conv is not None and getattr(self.method, "takes_skip", False):
            out = self.method(q, k, v, keep=keep, skip=self.conv.weight)
        else:
            out = self.method(q, k, v, keep=keep)
            out = out if self.conv is None else self.conv(v, keep=keep, to=out)
        return out.transpose(1, 2).flatten(2)


class EncoderOutput(nn.Module):
    """The end of a block, and its norm on the side of the configuration: `after(block(before(x)), x)`."""

    def __init__(self, config: EncoderConfig, width: int):
        super().__init__()
        self.pre = config.norm == "pre"
        self.dense = nn.Linear(width, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def before(self, x: Float[Tensor, "b n w"]) -> Float[Tensor, "b n w"]:
        """What the block reads."""
        return self.LayerNorm(x) if self.pre else x

    def after(self, y: Float[Tensor, "b n y"], x: Float[Tensor, "b n w"]) -> Float[Tensor, "b n w"]:
        """Project what the block gave, and add it."""
        x = x + self.dropout(self.dense(y))
        return x if self.pre else self.LayerNorm(x)


class EncoderAttention(nn.Module):
    """The attention block."""

    def __init__(self, config: EncoderConfig):
        super().__init__()
        self.self = EncoderSelfAttention(config)
        self.output = EncoderOutput(config, config.hidden_size)

    def forward(self, x: Float[Tensor, "b n w"], keep: Bool[Tensor, "b n"] | None) -> Float[Tensor, "b n w"]:
        """Attend, and add."""
        return self.output.after(self.self(self.output.before(x), keep), x)


class EncoderIntermediate(nn.Module):
    """The widening half of the feed-forward block."""

    def __init__(self, config: EncoderConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.intermediate_size)
        self.activation = ACT2FN[config.hidden_act]

    def forward(self, x: Float[Tensor, "b n w"]) -> Float[Tensor, "b n f"]:
        """Widen."""
        return self.activation(self.dense(x))


class EncoderLayer(GradientCheckpointingLayer):
    """Attention, then feed-forward."""

    def __init__(self, config: EncoderConfig):
        super().__init__()
        self.attention = EncoderAttention(config)
        self.intermediate = EncoderIntermediate(config)
        self.output = EncoderOutput(config, config.intermediate_size)

    def forward(self, x: Float[Tensor, "b n w"], keep: Bool[Tensor, "b n"] | None) -> Float[Tensor, "b n w"]:
        """Run both blocks."""
        x = self.attention(x, keep)
        return self.output.after(self.intermediate(self.output.before(x)), x)


class EncoderStack(nn.Module):
    """The layers, and the last norm with "pre"."""

    def __init__(self, config: EncoderConfig):
        super().__init__()
        self.layer = nn.ModuleList([EncoderLayer(config) for _ in range(config.num_hidden_layers)])
        if config.share_attention_weights:
            self._share_methods(config.attention)
        if config.norm == "pre":
            self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        else:
            self.LayerNorm = None

    def _share_methods(self, attention: str) -> None:
        attentions = [module for module in self.layer.modules() if isinstance(module, EncoderSelfAttention)]
        if not list(attentions[0].method.parameters()):
            raise ValueError(
                f"share_attention_weights is True, but {attention} has no learned weights to share: leave it out."
            )
        for other in attentions[1:]:
            other.borrow_method(attentions[0])

    def forward(
        self, x: Float[Tensor, "b n w"], keep: Bool[Tensor, "b n"] | None
    ) -> tuple[Float[Tensor, "b n w"], tuple[Float[Tensor, "b n w"], ...]]:
        """Run all layers; gives the result, and what entered each layer with the result as the last."""
        states = []
        for layer in self.layer:
            states.append(x)
            x = layer(x, keep)
        x = x if self.LayerNorm is None else self.LayerNorm(x)
        return x, (*states, x)


class EncoderPreTrainedModel(PreTrainedModel):
    """What all models on this encoder share."""

    config_class = EncoderConfig
    config: EncoderConfig
    # The attribute that holds the encoder in a model with a head, as in the published checkpoints.
    base_model_prefix = "nystromformer"
    supports_gradient_checkpointing = True
    _no_split_modules = ["EncoderLayer"]  # noqa: RUF012 (transformers' own declaration)
    # The loss is a mean over the batch. Without this word the Trainer would multiply it by steps and processes.
    accepts_loss_kwargs = False
    # Buffers that older versions of transformers saved, and that hold nothing that was learned.
    _keys_to_ignore_on_load_unexpected = [r"embeddings\.(position_ids|token_type_ids)$"]  # noqa: RUF012

    def __init__(self, config: EncoderConfig):
        # A value that was set on the configuration after it was made has not been looked at yet.
        config.check()
        if config._attn_implementation in METHODS:
            raise ValueError(
                f"attn_implementation is {config._attn_implementation!r}, a word for transformers' own encoders; this "
                f"one takes its attention from the configuration: attention={config._attn_implementation!r}."
            )
        super().__init__(config)

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike | None, *model_args: Any, **kwargs: Any
    ) -> Any:
        """Load a folder of this library's format or of the published one, or a model of the Hugging Face Hub.

        Only safetensors are read. The encoder's weights must fit wholly; a head that the folder does not hold starts
        anew, as for fine-tuning.

        Args:
            pretrained_model_name_or_path: The folder, or OWNER/NAME.
            *model_args: As in transformers.
            **kwargs: As in transformers: fields of `EncoderConfig` replace those of the folder, for example
                `attention_options={"num_landmarks": 32}`; the others are its own.

        Returns:
            The model in evaluation mode, and what was missing or left over with `output_loading_info=True`.

        Raises:
            ValueError: Another model or format, a broken file, or weights that do not fit, by name.
        """
        if kwargs.pop("use_safetensors", None) is False:
            raise ValueError(
                "use_safetensors is False; expected True: no other format is read, since they can run code."
            )
        if pretrained_model_name_or_path is None:
            return super().from_pretrained(None, *model_args, **kwargs)
        root = find_folder(pretrained_model_name_or_path, kwargs)
        folder = root / (kwargs.get("subfolder") or "")
        if kwargs.get("config") is None:
            # Its mistakes come first, and it names what the folder is.
            EncoderConfig.get_config_dict(root, subfolder=kwargs.get("subfolder") or "")
        check_weights(folder, variant=kwargs.get("variant"))
        wants_report = kwargs.pop("output_loading_info", False)
        try:
            loaded: Any = super().from_pretrained(
                root, *model_args, use_safetensors=True, output_loading_info=True, **kwargs
            )
        except RuntimeError as error:
            if "size mismatch" not in str(error) and "ignore_mismatched_sizes" not in str(error):
                raise
            raise ValueError(
                f"model {folder} has weights of other sizes than its config.json says ({error}): correct it, or pass "
                "ignore_mismatched_sizes=True for a new head of another size."
            ) from error
        model, report = loaded
        check_fit(model, report, folder)
        check_tied(model, model.get_expanded_tied_weights_keys(all_submodels=False), folder)
        model.name_or_path = model.config.name_or_path = str(pretrained_model_name_or_path)
        return (model, report) if wants_report else model

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        start = getattr(module, "reset_parameters", None)
        if start is None or isinstance(module, nn.Linear | nn.Embedding | nn.LayerNorm):
            super()._init_weights(module)
        else:
            # Attention methods and their convolution know their own start values.
            start()


class EncoderModel(EncoderPreTrainedModel):
    """The encoder without a head."""

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
        assert isinstance(value, nn.Embedding), "transformers hands back what get_input_embeddings gave, resized"
        self.embeddings.word_embeddings = value

    def forward(
        self,
        input_ids: Int[Tensor, "b n"] | None = None,
        attention_mask: Bool[Tensor, "b n"] | Int[Tensor, "b n"] | None = None,
        token_type_ids: Int[Tensor, "b n"] | None = None,
        position_ids: Int[Tensor, "b n"] | None = None,
        inputs_embeds: Float[Tensor, "b n w"] | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> BaseModelOutput | tuple[Tensor, ...]:
        """Encode.

        Args:
            input_ids: Tokens.
            attention_mask: Real tokens, as 1 or True; None where all are. Never derived from the ids.
            token_type_ids: Segment of each token; None where all belong to the first.
            position_ids: Rows of the position table (the first token has row 2); None counts from the first real token.
            inputs_embeds: Word embeddings in place of `input_ids`.
            output_attentions: Refused: no weights are stored.
            output_hidden_states: Also give what entered each layer; None asks the configuration.
            return_dict: Give an output object rather than a tuple; None asks the configuration.

        Raises:
            ValueError: Inputs that do not fit, by name.
        """
        if output_attentions or (output_attentions is None and self.config.output_attentions):
            raise ValueError(
                "output_attentions is True, but no method stores its weights: leave it out; nystrom_rows in "
                "nystrom.attention.methods.nystrom gives rows of them."
            )
        words = self.embeddings.words(input_ids, inputs_embeds)
        keep = check_mask(attention_mask, words)
        x, states = self.encoder(self.embeddings(words, keep, token_type_ids, position_ids), keep)
        wants_states = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        output = BaseModelOutput(last_hidden_state=x, hidden_states=states if wants_states else None)
        return output if (self.config.return_dict if return_dict is None else return_dict) else output.to_tuple()
