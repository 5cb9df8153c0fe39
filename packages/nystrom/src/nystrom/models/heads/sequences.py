r"""Classification of sequences.

The tokens are pooled, to their mean $p = \frac{1}{c} \sum_{i \text{ real}} x_i$ over the c real ones, to the first real
one or to the largest value of each channel, $p = \max_{i \text{ real}} x_i$, and two layers classify p, normed before
them where the configuration says so (`nystrom.models.parts.modern`). A sequence without a real token has p = 0.
State-dict names are those of transformers' Nyströmformer.

Departs from transformers' model: pooling is the mean unless the configuration says "first" or "max", and "first" is the
first real token, wherever the padding is.
"""

from typing import Unpack

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers.loss.loss_utils import ForSequenceClassificationLoss
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.utils.generic import can_return_tuple

from nystrom.models.configuration import EncoderConfig, Pooling
from nystrom.models.embeddings import with_class
from nystrom.models.encoder import EncoderModel, EncoderPreTrainedModel, OutputOptions
from nystrom.models.parts.activations import activation
from nystrom.models.parts.dropout import Dropout
from nystrom.models.parts.modern import PooledNorm
from nystrom.parallel.models import pool_over_ranks
from nystrom.precision import at_least_float32
from nystrom.shapes import Group


class ClassificationHead(nn.Module):
    """Two layers on the pooled tokens."""

    def __init__(self, config: EncoderConfig):
        super().__init__()
        assert config.num_labels, "transformers gives every configuration its labels"
        theirs = config.design == "transformers"
        width = config.hidden_size if theirs else config.intermediate_size
        self.norm = None if config.pooled_norm == "none" else PooledNorm(config.hidden_size)
        self.dense = nn.Linear(config.hidden_size, width)
        self.activation = activation(config.head_act or (config.hidden_act if theirs else "relu"))
        self.dropout = Dropout(config.hidden_dropout_prob if theirs else 0.0)
        self.out_proj = nn.Linear(width, config.num_labels)

    def forward(self, x: Float[Tensor, "b w"]) -> Float[Tensor, "b c"]:
        """Classify."""
        x = x if self.norm is None else self.norm(x)
        return self.out_proj(self.dropout(self.activation(self.dense(self.dropout(x)))))


class EncoderForSequenceClassification(EncoderPreTrainedModel):
    """The encoder with a classification head on the pooled tokens."""

    over_ranks = True
    takes_class_token = True

    def __init__(self, config: EncoderConfig):
        super().__init__(config)
        self.nystromformer = EncoderModel(config)
        self.classifier = ClassificationHead(config)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Int[Tensor, "b n"] | None = None,
        attention_mask: Bool[Tensor, "b n"] | Int[Tensor, "b n"] | None = None,
        token_type_ids: Int[Tensor, "b n"] | None = None,
        position_ids: Int[Tensor, "b n"] | None = None,
        inputs_embeds: Float[Tensor, "b n w"] | None = None,
        labels: Tensor | None = None,
        **options: Unpack[OutputOptions],
    ) -> SequenceClassifierOutput:
        """Classify sequences; see `EncoderModel.forward` for the other arguments.

        Args:
            labels: Classes (b), or what `config.problem_type` requires; if given, the mean loss is returned as well.

        Raises:
            ValueError: Invalid inputs; the message names them.
        """
        encoded = self.nystromformer(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, return_dict=True, **options
        )
        x = encoded.last_hidden_state
        logits = self.classifier(pool_encoded(self.config, x, attention_mask, group=self.group))
        if labels is not None and not labels.is_floating_point():
            labels = labels.long()
        loss = None if labels is None else ForSequenceClassificationLoss(labels, logits, self.config)
        return SequenceClassifierOutput(loss=loss, logits=logits, hidden_states=encoded.hidden_states)


def pool_encoded(
    config: EncoderConfig, x: Float[Tensor, "b m w"], attention_mask: Tensor | None, *, group: Group = None
) -> Float[Tensor, "b w"]:
    """Pool the output of an encoder, class token included, to one vector per sequence as its configuration says, see
    `pool`.
    """
    keep = None if attention_mask is None else attention_mask.bool()
    if config.pooling == "cls":
        return pool(x, with_class(keep), how="first")
    return pool(x, keep, how=config.pooling, group=group)


def pool(
    x: Float[Tensor, "b n w"], keep: Bool[Tensor, "b n"] | None, *, how: Pooling = "mean", group: Group = None
) -> Float[Tensor, "b w"]:
    """One vector per sequence: the "mean", "first" or "max" of its real tokens; zeros if there are none.

    The mean is taken in float32 at least.
    """
    if group is not None:
        return pool_over_ranks(group, x, keep, how=how)
    if isinstance(x.shape[1], int) and x.shape[1] == 0:
        return x.sum(dim=1)
    if keep is None:
        if how == "first":
            return x[:, 0]
        return x.amax(dim=1) if how == "max" else at_least_float32(x).mean(dim=1).to(x.dtype)
    if how == "max":
        largest = torch.where(keep[..., None], x, -torch.inf).amax(dim=1)
        return torch.where(keep.any(dim=1, keepdim=True), largest, 0.0)
    x = torch.where(keep[..., None], x, 0.0)
    if how == "first":
        place = keep.int().argmax(dim=-1)
        return x.gather(1, place[:, None, None].expand(-1, 1, x.shape[2]))[:, 0]
    count = keep.sum(dim=-1, keepdim=True).clamp(min=1)
    return (at_least_float32(x).sum(dim=1) / count).to(x.dtype)
