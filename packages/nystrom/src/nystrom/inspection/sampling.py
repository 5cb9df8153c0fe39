r"""Estimate ratios of sums over all queries from a sample, with confidence intervals.

For each sequence t, r_t of its N_t real queries are drawn without replacement. For values $a_i \ge 0$ and $b_i > 0$ of
the queries,
$$\hat R = \frac{\sum_t \frac{N_t}{r_t} \sum_{i \in t} a_i}{\sum_t \frac{N_t}{r_t} \sum_{i \in t} b_i}, \qquad
\hat\sigma^2 = \frac{\sum_t N_t^2 (1 - r_t / N_t)\, s_t^2 / r_t}{(\sum_t \frac{N_t}{r_t} \sum_{i \in t} b_i)^2},$$
$s_t^2$ the variance of $a_i - \hat R b_i$ within a sequence: the stratified ratio estimator. The interval is
$\hat R \exp(\pm 1.96\, \hat\sigma / \hat R)$, for a level of 95 %. It is about all queries of these sequences, not
about other texts, and has no width where all queries are taken.

With b = 1 the ratio is a mean; with squared norms the root of the ratio is a relative error in the Frobenius norm.

Source: Cochran, Sampling Techniques (1977), sections 6.10-6.11; the interval on the logarithm is ours, since errors of
attention have long tails to one side.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

_LEVEL = 1.96


class Sample(NamedTuple):
    """Values of the sampled queries of one sequence, for each head."""

    size: int  # Real queries N of the sequence
    top: Float[Tensor, "h r"]  # Values summed in the numerator
    bottom: Float[Tensor, "h r"]  # Values summed in the denominator


class Estimate(NamedTuple):
    """An estimate for each head, with its interval."""

    value: Float[Tensor, " h"]  # The estimate
    low: Float[Tensor, " h"]  # Lower end of the interval
    high: Float[Tensor, " h"]  # Upper end

    @property
    def mean(self) -> float:
        """Mean of the estimates over the heads."""
        return float(self.value.mean())


def draw_queries(real: Int[Tensor, " N"], count: int, generator: torch.Generator) -> Int[Tensor, " r"]:
    """Draw `count` of the real positions without replacement, in order; all of them if there are no more."""
    if len(real) <= count:
        return real
    drawn = torch.randperm(len(real), generator=generator, device=generator.device)[:count].sort().values
    return real[drawn.to(real.device)]


def estimate_ratio(samples: Sequence[Sample], *, root: bool = False) -> Estimate:
    """Estimate the ratio of two sums over all queries, or its `root`, also of the interval, from a sample of each
    sequence.

    The estimate is 0 if the denominator is 0, and NaN if either sum is.
    """
    weights = [sample.size / sample.top.shape[1] for sample in samples]
    top, bottom = (
        torch.stack([w * x.double().sum(dim=1) for w, x in zip(weights, values, strict=True)]).sum(dim=0)
        for values in ([sample.top for sample in samples], [sample.bottom for sample in samples])
    )
    ratio = torch.where(bottom == 0, 0.0, top / bottom)
    variance = torch.zeros_like(ratio)
    for sample in samples:
        count = sample.top.shape[1]
        if count == sample.size:
            continue
        left = sample.top.double() - ratio[:, None] * sample.bottom.double()
        # One query alone has no variance: the square of its deviation takes its place.
        spread = left.var(dim=1) if count > 1 else left[:, 0].square()
        variance += sample.size**2 * (1 - count / sample.size) * spread / count
    relative = torch.where(top > 0, variance.sqrt() / top, 0.0)
    power = 0.5 if root else 1.0
    factor = torch.exp(power * _LEVEL * relative)
    value = ratio**power
    return Estimate(value, value / factor, value * factor)
