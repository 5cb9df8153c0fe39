r"""Classification of pairs: two documents through one encoder, as the Retrieval task of the Long Range Arena has it.

With the pooled documents $x_0$ and $x_1$,
$$\mathrm{logits} = W_2\, \mathrm{ReLU}(W_1 [x_0;\; x_1;\; x_0 \odot x_1;\; x_0 - x_1] + b_1) + b_2,$$
the hidden layer being as wide as the encoder's feed-forward block.

Source: the classifier of both papers' code for Retrieval. No published checkpoint has this head; its names are ours.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers.modeling_outputs import SequenceClassifierOutput

from nystrom.models.configuration import EncoderConfig
from nystrom.models.embeddings import check_mask
from nystrom.models.encoder import EncoderModel, EncoderPreTrainedModel
from nystrom.models.heads.sequences import pool


class PairHead(nn.Module):
    """Two layers on both documents, their product and their difference."""

    def __init__(self, config: EncoderConfig):
        super().__init__()
        assert config.num_labels, "transformers gives every configuration its labels"
        self.dense = nn.Linear(4 * config.hidden_size, config.intermediate_size)
        self.out_proj = nn.Linear(config.intermediate_size, config.num_labels)

    def forward(self, x: Float[Tensor, "b 2 w"]) -> Float[Tensor, "b c"]:
        """Classify."""
        first, second = x.unbind(1)
        parts = torch.cat([first, second, first * second, first - second], dim=-1)
        return self.out_proj(F.relu(self.dense(parts)))


class EncoderForPairClassification(EncoderPreTrainedModel):
    """The encoder on each of two documents, with a head on both."""

    def __init__(self, config: EncoderConfig):
        super().__init__(config)
        self.nystromformer = EncoderModel(config)
        self.classifier = PairHead(config)
        self.post_init()

    def forward(
        self,
        input_ids: Int[Tensor, "b 2 n"],
        attention_mask: Bool[Tensor, "b 2 n"] | Int[Tensor, "b 2 n"] | None = None,
        labels: Int[Tensor, " b"] | None = None,
        return_dict: bool | None = None,
    ) -> SequenceClassifierOutput | tuple[Tensor, ...]:
        """Classify pairs of documents.

        Args:
            input_ids: Tokens of both documents, padded to one length.
            attention_mask: Real tokens, as 1 or True; None where all are.
            labels: Classes; with them comes the mean cross entropy.
            return_dict: Give an output object rather than a tuple; None asks the configuration.

        Raises:
            ValueError: Inputs that do not fit, by name.
        """
        if input_ids.ndim != 3 or input_ids.shape[1] != 2:
            raise ValueError(f"input_ids has shape {tuple(input_ids.shape)}; expected (batch, 2 documents, tokens).")
        if attention_mask is not None and attention_mask.shape != input_ids.shape:
            raise ValueError(
                f"attention_mask has shape {tuple(attention_mask.shape)} but input_ids has {tuple(input_ids.shape)}: "
                "pass one 0 or 1 per token of both documents."
            )
        mask = None if attention_mask is None else attention_mask.flatten(0, 1)
        x = self.nystromformer(input_ids.flatten(0, 1), attention_mask=mask, return_dict=True).last_hidden_state
        pooled = pool(x, check_mask(mask, x), first=self.config.pooling == "first")
        logits = self.classifier(pooled.unflatten(0, (-1, 2)))
        loss = None if labels is None else F.cross_entropy(logits, labels)
        output = SequenceClassifierOutput(loss=loss, logits=logits)
        return output if (self.config.return_dict if return_dict is None else return_dict) else output.to_tuple()
