r"""Softmax averages over the keys of all ranks, from the averages of each rank.

With $C_r$ the softmax average over the keys of rank r, and $\ell_r$ the logarithm of its normaliser,
$$C = \frac{\sum_r e^{\ell_r - M} C_r}{\sum_r e^{\ell_r - M}}, \qquad
\ell = M + \ln \sum_r e^{\ell_r - M}, \qquad M = \max_r \ell_r.$$
C does not depend on M, which therefore needs no gradient.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from nystrom.attention.parts.logsumexp import softmax_and_logsumexp
from nystrom.parallel.communication import Ranks
from nystrom.parallel.positions_over_ranks import Tokens
from nystrom.precision import at_least_float32


def join(
    ranks: Ranks, means: Float[Tensor, "b h r e"], logs: Float[Tensor, "b h r 1"]
) -> tuple[Float[Tensor, "b h r e"], Float[Tensor, "b h r 1"]]:
    """Averages and logarithms of normalisers over all ranks, from those over the keys of each.

    The logarithms are far below all others for a rank without a real key.
    """
    top = ranks.largest(logs)
    weight = (logs - top).exp()
    sums = ranks.sum(torch.cat([weight * means, weight], dim=-1))
    # The largest of the weights is 1.
    total = sums[..., -1:]
    return sums[..., :-1] / total, top + total.log()


def joined_softmax(
    ranks: Ranks,
    keys: Tokens,
    q: Float[Tensor, "b h r d"],
    k: Float[Tensor, "b h s d"],
    v: Float[Tensor, "b h s e"],
    *,
    scale: float | None,
) -> tuple[Float[Tensor, "b h r e"], Float[Tensor, "b h r 1"]]:
    """Softmax attention of a few replicated queries to the keys of all ranks; in float32 at least.

    Values are zeros where a key is not real. Also returns the logarithms of the normalisers.
    """
    q, k, v = (at_least_float32(x) for x in (q, k, v))
    keep = None if keys.whole and keys.lengths[ranks.rank] else keys.keep
    return join(ranks, *softmax_and_logsumexp(q, k, v, keep=keep, scale=scale))
