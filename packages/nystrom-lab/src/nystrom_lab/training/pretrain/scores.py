r"""Scores of a model on masked words and the order of sentences.

For the N masked words of all instances together, the loss is $\ell = -\frac1N \sum \log p(\text{word})$, the accuracy
the share whose largest score is that of the word behind the mask, and the perplexity $e^\ell$; loss and accuracy of
the order are means over instances. Only masked tokens are scored.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from nystrom.models import EncoderConfig
from nystrom.models.embeddings import check_mask
from nystrom.models.heads.language import EncoderForPreTraining
from nystrom.models.heads.losses import IGNORED
from nystrom.models.heads.sequences import pool
from nystrom.parallel.agreement import check_group
from nystrom.precision import at_least_float32
from nystrom_lab.measure.rows import Row
from nystrom_lab.training.finite import check_outputs
from nystrom_lab.training.pretrain.data import HeldOutInstances
from nystrom_lab.training.results import Provenance, accuracy_row, result_row
from nystrom_lab.training.scoring import score_batches

STUDY = "pretrain mlm-sop"


class Scores(NamedTuple):
    """Scores of a model.

    Attributes:
        mlm_loss: Mean loss of a masked word.
        mlm_accuracy: Share of the masked words that are predicted.
        perplexity: Exponential of `mlm_loss`.
        sop_loss: Mean loss of the order.
        sop_accuracy: Share of the instances whose order is predicted.
        words: Masked words.
        instances: Instances.
    """

    mlm_loss: float
    mlm_accuracy: float
    perplexity: float
    sop_loss: float
    sop_accuracy: float
    words: int
    instances: int


@torch.no_grad()
def score_batch(model: EncoderForPreTraining, batch: Mapping[str, Tensor]) -> Tensor:
    """Score each instance of a batch.

    Args:
        batch: A batch from `MlmSop.collate`, or this rank's piece of it.

    Returns:
        For each instance its masked words, those that are predicted, the sum of their losses, whether the order is
        predicted, and its loss; (b, 5), float64.

    Raises:
        NotFinite: An output of the model is not a finite number.
    """
    encoded = model.nystromformer(batch["input_ids"], batch["attention_mask"], batch["token_type_ids"])
    x, labels, order = encoded.last_hidden_state, batch["labels"], batch["sentence_order_label"]
    masked = labels != IGNORED
    words = at_least_float32(check_outputs(model.cls(x[masked])))
    scores = x.new_zeros(len(x), 5, dtype=torch.float64)
    of_words = torch.stack(
        [
            torch.ones_like(labels[masked], dtype=torch.float64),
            (words.argmax(dim=-1) == labels[masked]).double(),
            F.cross_entropy(words, labels[masked], reduction="none").double(),
        ],
        dim=1,
    )
    scores[:, :3].index_add_(0, masked.nonzero()[:, 0], of_words)
    if model.group is not None:
        scores = check_group(model.group).sum(scores)
    pooled = pool(x, check_mask(batch["attention_mask"], x), how=model.config.pooling, group=model.group)
    orders = at_least_float32(check_outputs(model.sop(pooled)))
    scores[:, 3] = (orders.argmax(dim=-1) == order).double()
    scores[:, 4] = F.cross_entropy(orders, order, reduction="none").double()
    return scores


def sum_up(scores: NDArray[np.float64]) -> Scores:
    """Scores of a model from the results of `score_batch` for all instances."""
    words, right, loss, order, order_loss = scores.sum(axis=0).tolist()
    masked = max(words, 1)
    return Scores(
        mlm_loss=loss / masked,
        mlm_accuracy=right / masked,
        # A loss of some hundreds, early in a run that fails, gives an infinite one.
        perplexity=torch.tensor(loss / masked, dtype=torch.float64).exp().item(),
        sop_loss=order_loss / len(scores),
        sop_accuracy=order / len(scores),
        words=round(words),
        instances=len(scores),
    )


def score_model(
    model: EncoderForPreTraining, held_out: HeldOutInstances, *, batch_size: int, device: str, precision: str
) -> Scores:
    """Score a model on held-out instances."""
    machine: dict[str, Any] = {"batch_size": batch_size, "device": device, "precision": precision}
    scores = score_batches(model, held_out, held_out.data.collate, partial(score_batch, model), **machine)
    return sum_up(scores.numpy())


def score_rows(config: EncoderConfig, scores: Scores, provenance: Provenance, *, length: int) -> list[Row]:
    """Scores as rows; `repeats` is the number of masked words, or of instances."""
    facts = {} if length == config.max_position_embeddings else {"length": length}
    more: dict[str, Any] = {"study": STUDY, "facts": facts}
    note = "the exponential of the loss is beyond float64" if scores.perplexity == math.inf else ""
    words, instances = {"repeats": scores.words, **more}, {"repeats": scores.instances, **more}
    return [
        accuracy_row(config, "validation MLM accuracy", scores.mlm_accuracy, scores.words, provenance, **more),
        result_row(config, "validation MLM loss", scores.mlm_loss, "", provenance, **words),
        result_row(config, "validation perplexity", scores.perplexity, "", provenance, note=note, **words),
        accuracy_row(config, "validation SOP accuracy", scores.sop_accuracy, scores.instances, provenance, **more),
        result_row(config, "validation SOP loss", scores.sop_loss, "", provenance, **instances),
    ]


def summary(scores: Scores) -> str:
    """Scores in one line."""
    return (
        f"held out: MLM accuracy {scores.mlm_accuracy:.1%}, loss {scores.mlm_loss:.3f}, perplexity "
        f"{scores.perplexity:.4g} ({scores.words} masked words); SOP accuracy {scores.sop_accuracy:.1%}, loss "
        f"{scores.sop_loss:.3f} ({scores.instances} instances)"
    )
