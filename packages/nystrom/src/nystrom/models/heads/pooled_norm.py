r"""Normalisation of the input of a classification head: each channel to mean 0 and variance 1 over the sequences.

$$y_{s,c} = \frac{p_{s,c} - m_c}{\sqrt{v_c + \epsilon}}$$
for the pooled tokens p of sequence s, with m and v the mean and variance of channel c: those of the batch in training,
and fixed ones in evaluation, where a sequence is classified by itself.

The mean of many tokens hardly differs from one sequence to another, most of all in a new encoder: the part that all
share is far larger than the part that distinguishes them, and it dominates the gradient of the head.

Source: Ioffe and Szegedy (2015), arXiv:1502.03167, batch normalization, without a scale and shift of its own, since a
linear layer follows. In a training of this library the fixed values are measured before each evaluation, on training
samples as an evaluation sees them, without dropout or corruption: Wu and Johnson (2021), arXiv:2105.07576, section 3.
Elsewhere they are the running means of training.

The batch is what a process computes at once: with several processes or gradient accumulation, each part has its own
mean and variance.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from nystrom.evaluation import evaluating


class PooledNorm(nn.BatchNorm1d):
    """The norm. A batch of one sequence, which has no variance, uses the fixed values in training as well.

    Args:
        width: Channels.
        eps: Added to the variance.
    """

    def __init__(self, width: int, eps: float = 1e-5):
        super().__init__(width, eps=eps, affine=False)

    def forward(self, input: Float[Tensor, "b w"]) -> Float[Tensor, "b w"]:
        """Normalise the channels to mean 0 and variance 1."""
        if self.training and len(input) > 1:
            return super().forward(input)
        return F.batch_norm(input, self.running_mean, self.running_var, eps=self.eps)


def pooled_norms(model: nn.Module) -> list[PooledNorm]:
    """The norms of a model: one, or none."""
    return [module for module in model.modules() if isinstance(module, PooledNorm)]


@torch.no_grad()
def measure_pooled(model: nn.Module, calls: Iterable[object]) -> None:
    """Set the fixed mean and variance of each norm of a model to those measured on its inputs.

    With several processes they are measured over all, which must call this together. A compiled model runs uncompiled.

    Args:
        model: The model; its mode is restored afterwards.
        calls: An iterable; each step runs the model once, in evaluation mode, on new sequences.

    Raises:
        ValueError: No sequence reached a norm.
    """
    norms = pooled_norms(model)
    # A compiled graph would not call the hooks.
    with evaluating(model), torch.compiler.set_stance("force_eager"):
        sums = [torch.zeros(3, norm.num_features, dtype=torch.float64) for norm in norms]
        hooks = [norm.register_forward_pre_hook(_adder(total)) for norm, total in zip(norms, sums, strict=True)]
        try:
            for _ in calls:
                pass
        finally:
            for hook in hooks:
                hook.remove()
    for norm, total in zip(norms, sums, strict=True):
        assert norm.running_mean is not None
        assert norm.running_var is not None
        total = total.to(norm.running_mean.device)
        if dist.is_initialized():
            dist.all_reduce(total)
        count, first, second = total
        if not count.all():
            raise ValueError("no sequence reached the norm of the pooled tokens: run the model in each call.")
        mean = first / count
        norm.running_mean.copy_(mean)
        norm.running_var.copy_((second / count - mean.square()).clamp(min=0))


def _adder(total: Float[Tensor, "3 w"]):
    def add(_: nn.Module, given: tuple[Tensor]) -> None:
        x = given[0].to("cpu", torch.float64)
        total.add_(torch.stack([torch.full_like(x[0], len(x)), x.sum(dim=0), x.square().sum(dim=0)]))

    return add
