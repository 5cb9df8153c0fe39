r"""Heads for pretraining: masked words, and with them the order of sentences.

**Masked LM** scores every word of the vocabulary at every token, $\mathrm{logits} = E\, N(g(W x + w)) + b$, with the
word embeddings E as the last layer unless `tie_word_embeddings` is False.

**Sentence order** (SOP) reads the pooled tokens p: two classes, $U \tanh(V p + v) + u$; class 1 says that the two
segments were swapped. The loss of pretraining is the sum of both.

Names are those of transformers' Nyströmformer, which has no head for the order of sentences: its masked LM loads a
folder of `EncoderForPreTraining` and leaves `sop` aside.

Source: Xiong et al. (2021), arXiv:2102.03902, section 5.1; the order of sentences is that of Lan et al. (2019),
arXiv:1909.11942.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.modeling_outputs import MaskedLMOutput
from transformers.utils.generic import ModelOutput

from nystrom.models.configuration import EncoderConfig
from nystrom.models.embeddings import check_mask
from nystrom.models.encoder import EncoderModel, EncoderPreTrainedModel
from nystrom.models.heads.losses import mean_loss
from nystrom.models.heads.sequences import pool

_TIED = {
    "cls.predictions.decoder.weight": "nystromformer.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}


class WordTransform(nn.Module):
    """What a token passes before it is compared with the words."""

    def __init__(self, config: EncoderConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = ACT2FN[config.hidden_act]
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, x: Float[Tensor, "*b w"]) -> Float[Tensor, "*b w"]:
        """Transform."""
        return self.LayerNorm(self.activation(self.dense(x)))


class WordPredictions(nn.Module):
    """Scores of all words; the bias has two names, as published."""

    def __init__(self, config: EncoderConfig):
        super().__init__()
        self.transform = WordTransform(config)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def reset_parameters(self) -> None:
        """Start the bias at zero."""
        nn.init.zeros_(self.bias)

    def forward(self, x: Float[Tensor, "*b w"]) -> Float[Tensor, "*b v"]:
        """Score."""
        return self.decoder(self.transform(x))


class LanguageHead(nn.Module):
    """The masked LM head under its published name."""

    def __init__(self, config: EncoderConfig):
        super().__init__()
        self.predictions = WordPredictions(config)

    def forward(self, x: Float[Tensor, "*b w"]) -> Float[Tensor, "*b v"]:
        """Score."""
        return self.predictions(x)


class SentenceOrderHead(nn.Module):
    """Whether the two segments are in their order (0) or swapped (1)."""

    def __init__(self, config: EncoderConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.out_proj = nn.Linear(config.hidden_size, 2)

    def forward(self, x: Float[Tensor, "b w"]) -> Float[Tensor, "b 2"]:
        """Classify pooled tokens."""
        return self.out_proj(torch.tanh(self.dense(x)))


class _WithLanguageHead(EncoderPreTrainedModel):
    _tied_weights_keys = _TIED
    cls: LanguageHead

    def get_output_embeddings(self) -> nn.Module:
        """The last layer of the masked LM head."""
        return self.cls.predictions.decoder

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace the last layer of the masked LM head, and its bias under both names."""
        assert isinstance(new_embeddings, nn.Linear), "transformers hands back what get_output_embeddings gave, resized"
        self.cls.predictions.decoder = new_embeddings
        self.cls.predictions.bias = new_embeddings.bias


class EncoderForMaskedLM(_WithLanguageHead):
    """The encoder with a head for masked words."""

    def __init__(self, config: EncoderConfig):
        super().__init__(config)
        self.nystromformer = EncoderModel(config)
        self.cls = LanguageHead(config)
        self.post_init()

    def forward(
        self,
        input_ids: Int[Tensor, "b n"] | None = None,
        attention_mask: Bool[Tensor, "b n"] | Int[Tensor, "b n"] | None = None,
        token_type_ids: Int[Tensor, "b n"] | None = None,
        position_ids: Int[Tensor, "b n"] | None = None,
        inputs_embeds: Float[Tensor, "b n w"] | None = None,
        labels: Int[Tensor, "b n"] | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> MaskedLMOutput | tuple[Tensor, ...]:
        """Score all words at all tokens; see `EncoderModel.forward` for what is not named here.

        Args:
            input_ids: Tokens.
            attention_mask: Real tokens, as 1 or True; None where all are.
            token_type_ids: Segment of each token.
            position_ids: Rows of the position table.
            inputs_embeds: Word embeddings in place of `input_ids`.
            labels: The words behind the masks, -100 for all other tokens; with them comes the mean loss.
            output_attentions: Refused.
            output_hidden_states: Also give what entered each layer.
            return_dict: Give an output object rather than a tuple.

        Raises:
            ValueError: Inputs that do not fit, by name.
        """
        encoded = self.nystromformer(
            input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=True,
        )
        logits = self.cls(encoded.last_hidden_state)
        loss = None if labels is None else mean_loss(logits, labels)
        output = MaskedLMOutput(loss=loss, logits=logits, hidden_states=encoded.hidden_states)
        return output if (self.config.return_dict if return_dict is None else return_dict) else output.to_tuple()


@dataclass
class PreTrainingOutput(ModelOutput):
    """What `EncoderForPreTraining` gives.

    Attributes:
        loss: Sum of the losses whose labels came.
        prediction_logits: Scores of all words at all tokens (b, n, v).
        sop_logits: Scores of the order of the two segments (b, 2).
        hidden_states: What entered each layer, and the last result, if asked for.
    """

    loss: Tensor | None = None
    prediction_logits: Tensor | None = None
    sop_logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None


class EncoderForPreTraining(_WithLanguageHead):
    """The encoder with a head for masked words and one for the order of sentences."""

    def __init__(self, config: EncoderConfig):
        super().__init__(config)
        self.nystromformer = EncoderModel(config)
        self.cls = LanguageHead(config)
        self.sop = SentenceOrderHead(config)
        self.post_init()

    def forward(
        self,
        input_ids: Int[Tensor, "b n"] | None = None,
        attention_mask: Bool[Tensor, "b n"] | Int[Tensor, "b n"] | None = None,
        token_type_ids: Int[Tensor, "b n"] | None = None,
        position_ids: Int[Tensor, "b n"] | None = None,
        inputs_embeds: Float[Tensor, "b n w"] | None = None,
        labels: Int[Tensor, "b n"] | None = None,
        sentence_order_label: Int[Tensor, " b"] | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> PreTrainingOutput | tuple[Tensor, ...]:
        """Score words and the order of sentences; see `EncoderModel.forward` for what is not named here.

        Args:
            input_ids: Tokens, two segments.
            attention_mask: Real tokens, as 1 or True; None where all are.
            token_type_ids: Segment of each token.
            position_ids: Rows of the position table.
            inputs_embeds: Word embeddings in place of `input_ids`.
            labels: The words behind the masks, -100 for all other tokens.
            sentence_order_label: 0 for segments in their order, 1 for swapped ones, -100 for neither.
            output_attentions: Refused.
            output_hidden_states: Also give what entered each layer.
            return_dict: Give an output object rather than a tuple.

        Returns:
            The scores; with labels of one kind or both comes the sum of their mean losses.

        Raises:
            ValueError: Inputs that do not fit, by name.
        """
        encoded = self.nystromformer(
            input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=True,
        )
        x = encoded.last_hidden_state
        words = self.cls(x)
        order = self.sop(pool(x, check_mask(attention_mask, x), first=self.config.pooling == "first"))
        parts = []
        if labels is not None:
            parts.append(mean_loss(words, labels))
        if sentence_order_label is not None:
            parts.append(mean_loss(order, sentence_order_label, name="sentence_order_label"))
        loss = sum(parts[1:], parts[0]) if parts else None
        output = PreTrainingOutput(
            loss=loss, prediction_logits=words, sop_logits=order, hidden_states=encoded.hidden_states
        )
        return output if (self.config.return_dict if return_dict is None else return_dict) else output.to_tuple()
