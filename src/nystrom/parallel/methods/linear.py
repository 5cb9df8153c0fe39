r"""Linear attention across ranks.

For each channel of the features, the average of the values and the logarithm of its normaliser are joined across the
ranks: d (e + 1) numbers; see `nystrom.attention.methods.linear`. Autograd computes the gradient.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from nystrom.attention.options import LinearOptions
from nystrom.parallel.communication import Ranks
from nystrom.parallel.joined import join
from nystrom.parallel.tokens import Tokens
from nystrom.precision import at_least_float32


def linear_over_ranks(
    ranks: Ranks,
    queries: Tokens,
    keys: Tokens,
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    v: Float[Tensor, "b h s e"],
    options: LinearOptions,
) -> Float[Tensor, "b h n e"]:
    """`linear_attention` of the tokens of all ranks."""
    q, k, v = (at_least_float32(x) for x in (q, k, v))
    # Far below every real key, as in a single process.
    k = torch.where(keys.keep[:, None, :, None], k, -torch.finfo(k.dtype).max / 4)
    logs_q, logs_k = (x.clamp(max=0) + x.clamp(min=0).log1p() for x in (q, k))
    means, logs = join(ranks, logs_k.softmax(dim=2).mT @ v, logs_k.logsumexp(dim=2)[..., None])
    return (logs_q + logs.mT).softmax(dim=-1) @ means
