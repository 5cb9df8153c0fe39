r"""Classification of pairs: two documents through one encoder, as in the Retrieval task of the Long Range Arena.

With the pooled documents $x_0$ and $x_1$,
$$\mathrm{logits} = W_2\, \mathrm{ReLU}(W_1 [x_0;\; x_1;\; x_0 \odot x_1;\; x_0 - x_1] + b_1) + b_2,$$
the hidden layer being as wide as the encoder's feed-forward block; both documents are normed first where the
configuration says so (`nystrom.models.parts.modern`).

Source: the classifier of both papers' code for Retrieval. No published checkpoint has this head; its names are ours.
"""

from typing import Unpack

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.utils.generic import can_return_tuple

from nystrom.models.configuration import EncoderConfig
from nystrom.models.encoder import EncoderModel, EncoderPreTrainedModel, OutputOptions
from nystrom.models.heads.sequences import pool_encoded
from nystrom.models.parts.modern import PooledNorm


class PairHead(nn.Module):
    """Two layers on both documents, their product and their difference."""

    def __init__(self, config: EncoderConfig):
        super().__init__()
        assert config.num_labels, "transformers gives every configuration its labels"
        self.norm = None if config.pooled_norm == "none" else PooledNorm(config.hidden_size)
        self.dense = nn.Linear(4 * config.hidden_size, config.intermediate_size)
        self.out_proj = nn.Linear(config.intermediate_size, config.num_labels)

    def forward(self, x: Float[Tensor, "b 2 w"]) -> Float[Tensor, "b c"]:
        """Classify."""
        if self.norm is not None:
            x = self.norm(x.flatten(0, 1)).view_as(x)
        first, second = x.unbind(1)
        parts = torch.cat([first, second, first * second, first - second], dim=-1)
        return self.out_proj(F.relu(self.dense(parts)))


class EncoderForPairClassification(EncoderPreTrainedModel):
    """The encoder on each of two documents, with a head on both."""

    takes_class_token = True

    def __init__(self, config: EncoderConfig):
        super().__init__(config)
        self.nystromformer = EncoderModel(config)
        self.classifier = PairHead(config)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Int[Tensor, "b 2 n"] | None = None,
        attention_mask: Bool[Tensor, "b 2 n"] | Int[Tensor, "b 2 n"] | None = None,
        labels: Int[Tensor, " b"] | None = None,
        token_type_ids: Int[Tensor, "b 2 n"] | None = None,
        inputs_embeds: Float[Tensor, "b 2 n w"] | None = None,
        **options: Unpack[OutputOptions],
    ) -> SequenceClassifierOutput:
        """Classify pairs of documents; see `EncoderModel.forward` for the other arguments.

        Args:
            input_ids: Tokens of both documents, padded to one length; hidden states have batch and documents in one
                axis.
            attention_mask: Real tokens, as 1 or True; None if all are.
            labels: Classes; if given, the mean cross entropy is returned as well.
            token_type_ids: Segment of each token.
            inputs_embeds: Word embeddings in place of `input_ids`.

        Raises:
            ValueError: Invalid inputs; the message names them.
        """
        named = "inputs_embeds" if input_ids is None else "input_ids"
        came = inputs_embeds if input_ids is None else input_ids
        if came is None or (input_ids is not None and inputs_embeds is not None):
            raise ValueError("expected one of input_ids and inputs_embeds.")
        if came.ndim != (4 if input_ids is None else 3) or came.shape[1] != 2:
            raise ValueError(f"{named} has shape {tuple(came.shape)}; expected (batch, 2 documents, tokens).")
        for name, given in (("attention_mask", attention_mask), ("token_type_ids", token_type_ids)):
            if given is not None and given.shape != came.shape[:3]:
                raise ValueError(
                    f"{name} has shape {tuple(given.shape)} but {named} has {tuple(came.shape[:3])}: "
                    "pass one number per token of both documents."
                )
        mask = None if attention_mask is None else attention_mask.flatten(0, 1)
        segments = None if token_type_ids is None else token_type_ids.flatten(0, 1)
        ids = None if input_ids is None else input_ids.flatten(0, 1)
        words = None if inputs_embeds is None else inputs_embeds.flatten(0, 1)
        encoded = self.nystromformer(ids, mask, segments, inputs_embeds=words, return_dict=True, **options)
        x = encoded.last_hidden_state
        pooled = pool_encoded(self.config, x, mask)
        logits = self.classifier(pooled.unflatten(0, (-1, 2)))
        loss = None if labels is None else F.cross_entropy(logits, labels.long())
        return SequenceClassifierOutput(loss=loss, logits=logits, hidden_states=encoded.hidden_states)
