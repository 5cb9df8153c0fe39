"""The loss of heads that classify tokens or sequences.

The mean cross entropy over labels that are not -100, in float32 at least, and 0 if there are none; a plain mean would
be 0 / 0 for a batch in which no token happens to be masked.
"""

from collections.abc import Sequence

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from nystrom.parallel.models import mean_over_ranks
from nystrom.precision import at_least_float32
from nystrom.shapes import Group

IGNORED = -100


def mean_loss(
    logits: Float[Tensor, "*b c"], labels: Int[Tensor, "*b"], *, name: str = "labels", group: Group = None
) -> Float[Tensor, ""]:
    """Mean cross entropy of logits and labels, over the ranks of a group if there is one; a label of -100 is ignored.

    Raises:
        ValueError: Labels, called `name`, do not have the shape of the logits without their last axis, or are floating
            point.
    """
    check_labels(labels, logits.shape[:-1], name=name)
    labels = labels.flatten().long()
    total = F.cross_entropy(
        at_least_float32(logits).reshape(-1, logits.shape[-1]), labels, ignore_index=IGNORED, reduction="sum"
    )
    count = (labels != IGNORED).sum()
    return total / count.clamp(min=1) if group is None else mean_over_ranks(group, total, count)


def check_labels(labels: Tensor, shape: Sequence[int], *, name: str = "labels") -> None:
    """Raise ValueError for labels that are not integers of the shape."""
    if tuple(labels.shape) != tuple(shape):
        raise ValueError(f"{name} has shape {tuple(labels.shape)}; expected {tuple(shape)}.")
    if labels.is_floating_point():
        raise ValueError(f"{name} has dtype {labels.dtype}; expected integer classes, -100 for none.")
