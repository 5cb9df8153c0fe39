r"""A loss for every token of a corrupted input, in addition to that of its class.

Each real token is corrupted independently with probability 0.3: one in three becomes a random token, the others get a
learned vector in place of their embedding. The class is predicted from the corrupted input, and a separate head on the
last hidden states predicts every token, corrupted or not:
$$\ell = \ell_{\text{class}} + \lambda \frac{1}{b} \sum_{s} \frac{1}{n_s} \sum_{i \text{ real}} -\log p_s(x_i),$$
$n_s$ being the real tokens of sequence s. Each sequence has equal weight, so gradient accumulation gives the gradient
of the whole batch. Evaluation sees clean inputs and no head; the saved model has neither the head nor the vector.

Draws come from torch's global generator, whose state is part of a checkpoint.

`nystrom pretrain TASK` also uses the vector and the head (`nystrom_lab.training.masked`).

Source: arXiv:2501.14850.
Departs from it: the mask is a vector rather than a symbol of the vocabulary, since pictures use all of theirs.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from nystrom.models import EncoderConfig
from nystrom.models.heads.language import LanguageHead
from nystrom.parallel.agreement import check_group
from nystrom.precision import at_least_float32
from nystrom.shapes import Group

CORRUPTED, RANDOM = 0.3, 1 / 3


class Denoiser(nn.Module):
    """The vector that masks a token, and the head that predicts tokens."""

    def __init__(self, config: EncoderConfig):
        super().__init__()
        self.first = 0 if config.pad_token_id is None else 1
        assert config.pad_token_id in (None, 0), "the tasks pad with token 0, or not at all"
        self.vocab_size, self.std = config.vocab_size, config.initializer_range
        self.mask = nn.Parameter(torch.empty(config.hidden_size))
        self.head = LanguageHead(config)
        # The second name of a bias, which only published models have: processes wait for each gradient there is.
        self.head.predictions.bias.requires_grad_(False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the vector as embeddings are initialised."""
        nn.init.normal_(self.mask, std=self.std)

    def corrupt(
        self, ids: Int[Tensor, "*b n"], keep: Bool[Tensor, "*b n"] | None, words: nn.Embedding
    ) -> Float[Tensor, "*b n w"]:
        """Embeddings of a corrupted input."""
        draw = torch.rand(ids.shape, device=ids.device)
        chosen = draw < CORRUPTED if keep is None else (draw < CORRUPTED) & keep
        becomes_random = draw < CORRUPTED * RANDOM
        other = torch.randint_like(ids, self.first, self.vocab_size)
        return self.masked(torch.where(chosen & becomes_random, other, ids), chosen & ~becomes_random, words)

    def masked(
        self, ids: Int[Tensor, "*b n"], chosen: Bool[Tensor, "*b n"], words: nn.Embedding
    ) -> Float[Tensor, "*b n w"]:
        """Embeddings of an input, with the vector in place of the chosen tokens."""
        embedded = words(ids)
        return torch.where(chosen[..., None], self.mask.to(embedded.dtype), embedded)

    def loss(
        self,
        x: Float[Tensor, "s n w"],
        ids: Int[Tensor, "s n"],
        chosen: Bool[Tensor, "s n"] | None,
        *,
        group: Group = None,
    ) -> Float[Tensor, ""]:
        """Mean over the sequences of the mean loss of their chosen tokens.

        Args:
            chosen: Tokens to score, such as the real ones; None for all.
            group: Process group across which the tokens are split; the loss is the mean of the results of its ranks.
        """
        chosen = torch.ones_like(ids, dtype=torch.bool) if chosen is None else chosen
        size = 1 if group is None else check_group(group).size
        return size * self.scores(x, ids, chosen, group=group)[0].mean()

    def scores(
        self,
        x: Float[Tensor, "s n w"],
        ids: Int[Tensor, "s n"],
        chosen: Bool[Tensor, "s n"],
        *,
        group: Group = None,
    ) -> tuple[Float[Tensor, " s"], Int[Tensor, " s"]]:
        """For each sequence, the mean loss of its chosen tokens, and how many of them are predicted; see `loss`.

        The sum over the ranks of a group gives both of the whole sequence.
        """
        logits = at_least_float32(self.head(x[chosen]))
        losses = torch.zeros(ids.shape, device=x.device, dtype=logits.dtype)
        losses[chosen] = F.cross_entropy(logits, ids[chosen], reduction="none")
        right = torch.zeros_like(chosen)
        right[chosen] = logits.argmax(dim=-1) == ids[chosen]
        count = chosen.sum(dim=1)
        if group is not None:
            count = check_group(group).gather(count).sum(dim=0)
        return losses.sum(dim=1) / count.clamp(min=1), right.sum(dim=1)
