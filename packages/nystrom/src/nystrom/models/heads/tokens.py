"""Heads that read single tokens, or one sequence per choice.

**Token classification** puts one layer on each token. **Question answering** scores each token as the start and as the
end of the answer. **Multiple choice** encodes each choice as a sequence of its own, pools it as `EncoderConfig.pooling`
says, and scores it with two layers. State-dict names are those of transformers' Nyströmformer.

Departs from transformers' model: masked tokens can be neither start nor end of an answer, so that padding changes
nothing; an answer given there is left out of the loss, as one beyond the input is; and a choice is pooled as the
configuration says, "first" being the first real token.
"""

from typing import Unpack

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers.modeling_outputs import MultipleChoiceModelOutput, QuestionAnsweringModelOutput, TokenClassifierOutput
from transformers.utils.generic import can_return_tuple

from nystrom.models.configuration import EncoderConfig
from nystrom.models.embeddings import check_mask
from nystrom.models.encoder import EncoderModel, EncoderPreTrainedModel, OutputOptions
from nystrom.models.heads.losses import IGNORED, mean_loss
from nystrom.models.heads.sequences import pool
from nystrom.models.parts.activations import activation
from nystrom.models.parts.dropout import Dropout


class EncoderForTokenClassification(EncoderPreTrainedModel):
    """The encoder with one layer on each token."""

    over_ranks = True

    def __init__(self, config: EncoderConfig):
        super().__init__(config)
        assert config.num_labels, "transformers gives every configuration its labels"
        self.nystromformer = EncoderModel(config)
        self.dropout = Dropout(config.hidden_dropout_prob)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
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
    ) -> TokenClassifierOutput:
        """Classify tokens; see `EncoderModel.forward` for the other arguments.

        Args:
            labels: Classes, -100 for tokens without one; if given, the mean loss is returned as well.

        Raises:
            ValueError: Invalid inputs; the message names them.
        """
        encoded = self.nystromformer(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, return_dict=True, **options
        )
        logits = self.classifier(self.dropout(encoded.last_hidden_state))
        loss = None if labels is None else mean_loss(logits, labels, group=self.group)
        return TokenClassifierOutput(loss=loss, logits=logits, hidden_states=encoded.hidden_states)


class EncoderForQuestionAnswering(EncoderPreTrainedModel):
    """The encoder with scores for the start and the end of an answer."""

    def __init__(self, config: EncoderConfig):
        super().__init__(config)
        self.nystromformer = EncoderModel(config)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Int[Tensor, "b n"] | None = None,
        attention_mask: Bool[Tensor, "b n"] | Int[Tensor, "b n"] | None = None,
        token_type_ids: Int[Tensor, "b n"] | None = None,
        position_ids: Int[Tensor, "b n"] | None = None,
        inputs_embeds: Float[Tensor, "b n w"] | None = None,
        start_positions: Int[Tensor, " b"] | None = None,
        end_positions: Int[Tensor, " b"] | None = None,
        **options: Unpack[OutputOptions],
    ) -> QuestionAnsweringModelOutput:
        """Score each token as start and end of the answer; see `EncoderModel.forward` for the other arguments.

        Args:
            start_positions: First token of the answer; one beyond the input, or at a masked token, is left out of the
                loss.
            end_positions: Last token of the answer, likewise; given together with `start_positions`.

        Raises:
            ValueError: Invalid inputs; the message names them.
        """
        if (start_positions is None) != (end_positions is None):
            absent = "start_positions" if start_positions is None else "end_positions"
            raise ValueError(f"{absent} is None; expected both start_positions and end_positions, or neither.")
        encoded = self.nystromformer(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, return_dict=True, **options
        )
        x = encoded.last_hidden_state
        start, end = self.qa_outputs(x).unbind(dim=-1)
        keep = check_mask(attention_mask, x)
        if keep is not None:
            start, end = (scores.masked_fill(~keep, torch.finfo(scores.dtype).min) for scores in (start, end))
        loss = None
        if start_positions is not None and end_positions is not None:
            named = (("start_positions", start, start_positions), ("end_positions", end, end_positions))
            first, last = (mean_loss(scores, _known(place, scores, keep), name=name) for name, scores, place in named)
            loss = (first + last) / 2
        return QuestionAnsweringModelOutput(
            loss=loss, start_logits=start, end_logits=end, hidden_states=encoded.hidden_states
        )


def _known(
    place: Int[Tensor, " b"], scores: Float[Tensor, "b n"], keep: Bool[Tensor, "b n"] | None
) -> Int[Tensor, " b"]:
    """Positions of real tokens; those beyond the input or at masked tokens are ignored, negative ones are the first."""
    n, first = scores.shape[1], place.clamp(min=0)
    outside = place >= n
    if keep is not None and place.shape == scores.shape[:1]:
        outside = outside | ~keep.gather(1, first.clamp(max=n - 1)[:, None].long())[:, 0]
    return first.masked_fill(outside, IGNORED)


class EncoderForMultipleChoice(EncoderPreTrainedModel):
    """The encoder with one score per choice."""

    pools_without_norm = True

    def __init__(self, config: EncoderConfig):
        super().__init__(config)
        self.nystromformer = EncoderModel(config)
        self.pre_classifier = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = activation(config.head_act or "relu")
        self.classifier = nn.Linear(config.hidden_size, 1)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Int[Tensor, "b c n"] | None = None,
        attention_mask: Bool[Tensor, "b c n"] | Int[Tensor, "b c n"] | None = None,
        token_type_ids: Int[Tensor, "b c n"] | None = None,
        position_ids: Int[Tensor, "b c n"] | None = None,
        inputs_embeds: Float[Tensor, "b c n w"] | None = None,
        labels: Int[Tensor, " b"] | None = None,
        **options: Unpack[OutputOptions],
    ) -> MultipleChoiceModelOutput:
        """Score choices; see `EncoderModel.forward` for the other arguments.

        Args:
            input_ids: Tokens of each choice; hidden states have batch and choices in one axis.
            labels: The right choices; if given, the mean loss is returned as well.

        Raises:
            ValueError: Invalid inputs; the message names them.
        """
        given = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "token_type_ids": token_type_ids,
            "position_ids": position_ids,
            "inputs_embeds": inputs_embeds,
        }
        flat: dict[str, Tensor | None] = {}
        for name, tensor in given.items():
            if tensor is not None and tensor.ndim != (4 if name == "inputs_embeds" else 3):
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}; expected (batch, choices, tokens) first.")
            flat[name] = None if tensor is None else tensor.flatten(0, 1)
        encoded = self.nystromformer(**flat, return_dict=True, **options)
        x = encoded.last_hidden_state
        pooled = pool(x, check_mask(flat["attention_mask"], x), how=self.config.pooling)
        scores = self.classifier(self.activation(self.pre_classifier(pooled)))
        shaped = input_ids if input_ids is not None else inputs_embeds
        assert shaped is not None, "the encoder raises where neither was given"
        logits = scores.view(shaped.shape[:2])
        loss = None if labels is None else mean_loss(logits, labels)
        return MultipleChoiceModelOutput(loss=loss, logits=logits, hidden_states=encoded.hidden_states)
