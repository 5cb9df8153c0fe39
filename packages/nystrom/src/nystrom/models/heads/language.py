r"""Heads for pretraining: masked words alone, or masked words and the order of sentences.

**Masked LM** scores every word of the vocabulary at every token, $\mathrm{logits} = E\, N(g(W x + w)) + b$, with the
word embeddings E as the last layer unless `tie_word_embeddings` is False. With `sparse_prediction` it scores, in
training, only the k tokens of the batch whose label is not -100: the logits are then (k, v), in the order of the batch
and of the tokens in each sequence, and the loss is the same.

**Sentence order** (SOP) reads the pooled tokens p: two classes, $U \tanh(V p + v) + u$; class 1 means that the two
segments were swapped. The loss of pretraining is the sum of both.

Names are those of transformers' Nyströmformer, which has no head for the order of sentences: its masked LM loads a
folder of `EncoderForPreTraining` and ignores `sop`.

Source: Xiong et al. (2021), arXiv:2102.03902, section 5.1; the order of sentences is that of Lan et al. (2019),
arXiv:1909.11942. Scoring the masked tokens alone is `sparse_prediction` of transformers' ModernBERT.
"""

from dataclasses import dataclass
from typing import Unpack

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers.modeling_outputs import MaskedLMOutput
from transformers.utils.generic import ModelOutput, can_return_tuple

from nystrom.models.configuration import EncoderConfig
from nystrom.models.embeddings import check_mask
from nystrom.models.encoder import EncoderModel, EncoderPreTrainedModel, OutputOptions
from nystrom.models.heads.losses import IGNORED, check_labels, mean_loss
from nystrom.models.heads.sequences import pool
from nystrom.models.parts.activations import activation

_TIED = {
    "cls.predictions.decoder.weight": "nystromformer.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}


class WordTransform(nn.Module):
    """The layers between a token and the scores of the words."""

    def __init__(self, config: EncoderConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = activation(config.head_act or config.hidden_act)
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
        """Initialise the bias at zero."""
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
    """Scores for two segments in order (0) or swapped (1)."""

    def __init__(self, config: EncoderConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.out_proj = nn.Linear(config.hidden_size, 2)

    def forward(self, x: Float[Tensor, "b w"]) -> Float[Tensor, "b 2"]:
        """Classify pooled tokens."""
        return self.out_proj(torch.tanh(self.dense(x)))


class _WithLanguageHead(EncoderPreTrainedModel):
    _tied_weights_keys = _TIED
    over_ranks = True
    cls: LanguageHead

    def get_output_embeddings(self) -> nn.Module:
        """The last layer of the masked LM head."""
        return self.cls.predictions.decoder

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace the last layer of the masked LM head, and its bias under both names.

        If they are not tied, the unused bias under the other name is a separate tensor, so a file holds two.
        """
        assert isinstance(new_embeddings, nn.Linear), (
            "transformers passes back what get_output_embeddings gave, resized"
        )
        self.cls.predictions.decoder = new_embeddings
        bias = new_embeddings.bias
        tied = self.config.tie_word_embeddings
        self.cls.predictions.bias = bias if tied else nn.Parameter(bias.detach().clone())

    def _score(
        self, x: Float[Tensor, "b n w"], labels: Int[Tensor, "b n"] | None
    ) -> tuple[Float[Tensor, "*k v"], Float[Tensor, ""] | None]:
        """Scores of words, and their mean loss if labels are given."""
        if labels is None:
            return self.cls(x), None
        check_labels(labels, x.shape[:2])
        if self.config.sparse_prediction and self.training:
            labelled = labels != IGNORED
            x, labels = x[labelled], labels[labelled]
        logits = self.cls(x)
        return logits, mean_loss(logits, labels, group=self.group)


class EncoderForMaskedLM(_WithLanguageHead):
    """The encoder with a head for masked words."""

    def __init__(self, config: EncoderConfig):
        super().__init__(config)
        self.nystromformer = EncoderModel(config)
        self.cls = LanguageHead(config)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Int[Tensor, "b n"] | None = None,
        attention_mask: Bool[Tensor, "b n"] | Int[Tensor, "b n"] | None = None,
        token_type_ids: Int[Tensor, "b n"] | None = None,
        position_ids: Int[Tensor, "b n"] | None = None,
        inputs_embeds: Float[Tensor, "b n w"] | None = None,
        labels: Int[Tensor, "b n"] | None = None,
        **options: Unpack[OutputOptions],
    ) -> MaskedLMOutput:
        """Score words; see `EncoderModel.forward` for the other arguments.

        Args:
            labels: The words behind the masks, -100 for all other tokens.

        Returns:
            `logits` (b, n, v), and with labels the mean `loss`. In training with `sparse_prediction` and labels,
            `logits` is (k, v), of the k tokens that have a label.

        Raises:
            ValueError: Invalid inputs; the message names them.
        """
        encoded = self.nystromformer(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, return_dict=True, **options
        )
        logits, loss = self._score(encoded.last_hidden_state, labels)
        return MaskedLMOutput(loss=loss, logits=logits, hidden_states=encoded.hidden_states)


@dataclass
class PreTrainingOutput(ModelOutput):
    """The output of `EncoderForPreTraining`."""

    loss: Tensor | None = None  # Sum of the losses whose labels were given
    # Scores of words: (b, n, v), or those of the k tokens that have a label (k, v) in training with `sparse_prediction`
    prediction_logits: Tensor | None = None
    sop_logits: Tensor | None = None  # Scores of the order of the two segments (b, 2)
    hidden_states: tuple[Tensor, ...] | None = None  # The input of each layer and the final output, if requested
    prediction_loss: Tensor | None = None  # Mean loss of the words, if their labels were given
    sop_loss: Tensor | None = None  # Mean loss of the order of the segments, if their labels were given


class EncoderForPreTraining(_WithLanguageHead):
    """The encoder with a head for masked words and one for the order of sentences."""

    pools_without_norm = True

    def __init__(self, config: EncoderConfig):
        super().__init__(config)
        self.nystromformer = EncoderModel(config)
        self.cls = LanguageHead(config)
        self.sop = SentenceOrderHead(config)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Int[Tensor, "b n"] | None = None,
        attention_mask: Bool[Tensor, "b n"] | Int[Tensor, "b n"] | None = None,
        token_type_ids: Int[Tensor, "b n"] | None = None,
        position_ids: Int[Tensor, "b n"] | None = None,
        inputs_embeds: Float[Tensor, "b n w"] | None = None,
        labels: Int[Tensor, "b n"] | None = None,
        sentence_order_label: Int[Tensor, " b"] | None = None,
        **options: Unpack[OutputOptions],
    ) -> PreTrainingOutput:
        """Score words and the order of sentences; see `EncoderModel.forward` for the other arguments.

        Args:
            labels: The words behind the masks, -100 for all other tokens.
            sentence_order_label: 0 for segments in order, 1 for swapped ones, -100 for neither.

        Returns:
            The scores; with labels of either or both kinds, also the sum of their mean losses.

        Raises:
            ValueError: Invalid inputs; the message names them.
        """
        encoded = self.nystromformer(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, return_dict=True, **options
        )
        x = encoded.last_hidden_state
        words, of_words = self._score(x, labels)
        order = self.sop(pool(x, check_mask(attention_mask, x), how=self.config.pooling, group=self.group))
        loss, of_order = of_words, None
        if sentence_order_label is not None:
            of_order = mean_loss(order, sentence_order_label, name="sentence_order_label")
            loss = of_order if of_words is None else of_words + of_order
        return PreTrainingOutput(
            loss=loss,
            prediction_logits=words,
            sop_logits=order,
            hidden_states=encoded.hidden_states,
            prediction_loss=of_words,
            sop_loss=of_order,
        )
