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

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn


class PooledNorm(nn.BatchNorm1d):
    """The norm. A batch of one sequence, which has no variance, uses the fixed values in training as well."""

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
