"""Heads that read single tokens, or one sequence per choice.

**Token classification** puts one layer on each token. **Question answering** scores each token as the start and as the
end of the answer. **Multiple choice** encodes each choice as a sequence of its own, pools it as `EncoderConfig.pooling`
says, and scores it with two layers. State-dict names are those of transformers' Nyströmformer.

Departs from transformers' model: masked tokens can be neither start nor end of an answer, so that padding changes
nothing; and a choice is pooled by the configuration, "first" being the first real token.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers.modeling_outputs import (
    MultipleChoiceModelOutput,
    QuestionAnsweringModelOutput,
    TokenClassifierOutput,
)

from nystrom.models.configuration import EncoderConfig
from nystrom.models.embeddings import check_mask
from nystrom.models.encoder import EncoderModel, EncoderPreTrainedModel
from nystrom.models.heads.losses import IGNORED, mean_loss
from nystrom.models.heads.sequences import pool


class EncoderForTokenClassification(EncoderPreTrainedModel):
    """The encoder with one layer on each token."""

    def __init__(self, config: EncoderConfig):
        super().__init__(config)
        assert config.num_labels, "transformers gives every configuration its labels"
        self.nystromformer = EncoderModel(config)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
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
    ) -> TokenClassifierOutput | tuple[Tensor, ...]:
        """Classify tokens; see `EncoderModel.forward` for what is not named here.

        Args:
            input_ids: Tokens.
            attention_mask: Real tokens, as 1 or True; None where all are.
            token_type_ids: Segment of each token.
            position_ids: Rows of the position table.
            inputs_embeds: Word embeddings in place of `input_ids`.
            labels: Classes, -100 for tokens without one; with them comes the mean loss.
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
        logits = self.classifier(self.dropout(encoded.last_hidden_state))
        loss = None if labels is None else mean_loss(logits, labels)
        output = TokenClassifierOutput(loss=loss, logits=logits, hidden_states=encoded.hidden_states)
        return output if (self.config.return_dict if return_dict is None else return_dict) else output.to_tuple()


class EncoderForQuestionAnswering(EncoderPreTrainedModel):
    """The encoder with scores for the start and the end of an answer."""

    def __init__(self, config: EncoderConfig):
        super().__init__(config)
        self.nystromformer = EncoderModel(config)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()

    def forward(
        self,
        input_ids: Int[Tensor, "b n"] | None = None,
        attention_mask: Bool[Tensor, "b n"] | Int[Tensor, "b n"] | None = None,
        token_type_ids: Int[Tensor, "b n"] | None = None,
        position_ids: Int[Tensor, "b n"] | None = None,
        inputs_embeds: Float[Tensor, "b n w"] | None = None,
        start_positions: Int[Tensor, " b"] | None = None,
        end_positions: Int[Tensor, " b"] | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> QuestionAnsweringModelOutput | tuple[Tensor, ...]:
        """Score each token as start and end of the answer; see `EncoderModel.forward` for what is not named here.

        Args:
            input_ids: Tokens of question and text.
            attention_mask: Real tokens, as 1 or True; None where all are.
            token_type_ids: Segment of each token.
            position_ids: Rows of the position table.
            inputs_embeds: Word embeddings in place of `input_ids`.
            start_positions: First token of the answer; one behind the input was cut off, and is left out of the loss.
            end_positions: Last token of the answer, likewise; comes together with `start_positions`.
            output_attentions: Refused.
            output_hidden_states: Also give what entered each layer.
            return_dict: Give an output object rather than a tuple.

        Raises:
            ValueError: Inputs that do not fit, by name.
        """
        if (start_positions is None) != (end_positions is None):
            absent = "start_positions" if start_positions is None else "end_positions"
            raise ValueError(f"{absent} is None; expected both start_positions and end_positions, or neither.")
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
        start, end = self.qa_outputs(x).unbind(dim=-1)
        keep = check_mask(attention_mask, x)
        if keep is not None:
            start, end = (scores.masked_fill(~keep, torch.finfo(scores.dtype).min) for scores in (start, end))
        loss = None
        if start_positions is not None and end_positions is not None:
            named = (("start_positions", start, start_positions), ("end_positions", end, end_positions))
            first, last = (mean_loss(scores, _inside(place, x.shape[1]), name=name) for name, scores, place in named)
            loss = (first + last) / 2
        output = QuestionAnsweringModelOutput(
            loss=loss, start_logits=start, end_logits=end, hidden_states=encoded.hidden_states
        )
        return output if (self.config.return_dict if return_dict is None else return_dict) else output.to_tuple()


def _inside(place: Int[Tensor, " b"], n: int) -> Int[Tensor, " b"]:
    """Places within the input; those behind it are ignored, those before it are its first."""
    return place.clamp(min=0).masked_fill(place >= n, IGNORED)


class EncoderForMultipleChoice(EncoderPreTrainedModel):
    """The encoder with one score per choice."""

    def __init__(self, config: EncoderConfig):
        super().__init__(config)
        self.nystromformer = EncoderModel(config)
        self.pre_classifier = nn.Linear(config.hidden_size, config.hidden_size)
        self.classifier = nn.Linear(config.hidden_size, 1)
        self.post_init()

    def forward(
        self,
        input_ids: Int[Tensor, "b c n"] | None = None,
        attention_mask: Bool[Tensor, "b c n"] | Int[Tensor, "b c n"] | None = None,
        token_type_ids: Int[Tensor, "b c n"] | None = None,
        position_ids: Int[Tensor, "b c n"] | None = None,
        inputs_embeds: Float[Tensor, "b c n w"] | None = None,
        labels: Int[Tensor, " b"] | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> MultipleChoiceModelOutput | tuple[Tensor, ...]:
        """Score choices; see `EncoderModel.forward` for what is not named here.

        Args:
            input_ids: Tokens of each choice.
            attention_mask: Real tokens, as 1 or True; None where all are.
            token_type_ids: Segment of each token.
            position_ids: Rows of the position table.
            inputs_embeds: Word embeddings in place of `input_ids`.
            labels: The right choices; with them comes the mean loss.
            output_attentions: Refused.
            output_hidden_states: Also give what entered each layer, batch and choices in one axis.
            return_dict: Give an output object rather than a tuple.

        Raises:
            ValueError: Inputs that do not fit, by name.
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
        encoded = self.nystromformer(
            **flat, output_attentions=output_attentions, output_hidden_states=output_hidden_states, return_dict=True
        )
        x = encoded.last_hidden_state
        pooled = pool(x, check_mask(flat["attention_mask"], x), first=self.config.pooling == "first")
        scores = self.classifier(torch.relu(self.pre_classifier(pooled)))
        shaped = input_ids if input_ids is not None else inputs_embeds
        assert shaped is not None, "the encoder has refused an input of neither kind"
        logits = scores.view(shaped.shape[:2])
        loss = None if labels is None else mean_loss(logits, labels)
        output = MultipleChoiceModelOutput(loss=loss, logits=logits, hidden_states=encoded.hidden_states)
        return output if (self.config.return_dict if return_dict is None else return_dict) else output.to_tuple()
