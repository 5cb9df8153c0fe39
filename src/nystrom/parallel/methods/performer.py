"""Performer across ranks: for each random feature, the averages over the keys are joined: r (e + 1) numbers."""

import torch
from jaxtyping import Float
from torch import Tensor

from nystrom.attention.fused import fused_softmax
from nystrom.attention.methods.performer import projection_of
from nystrom.attention.options import PerformerOptions
from nystrom.kernels import half_norms
from nystrom.parallel.communication import Ranks
from nystrom.parallel.joined import softmax_over_ranks
from nystrom.parallel.tokens import Tokens
from nystrom.precision import at_least_float32
from nystrom.shapes import Generator, score_scale


def performer_over_ranks(
    ranks: Ranks,
    queries: Tokens,
    keys: Tokens,
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    v: Float[Tensor, "b h s e"],
    options: PerformerOptions,
    projection: Float[Tensor, "r d"] | None,
    generator: Generator,
) -> Float[Tensor, "b h n e"]:
    """`performer_attention` of the tokens of all ranks; if a projection is drawn, it is that of the first rank."""
    q, k, v = (at_least_float32(x) for x in (q, k, v))
    scale, given = score_scale(q, options.scale), projection is not None
    projection = projection_of(q, options, projection, generator).to(q.dtype)
    if not given and generator is not None:
        projection = ranks.send_from(0, projection.contiguous())
    rows = (scale**0.5 * projection).expand(*q.shape[:2], -1, -1)
    means, logs = softmax_over_ranks(ranks, keys, rows, k, v, scale=1.0, bias=-half_norms(k, scale=scale))
    wide_q = torch.cat([q, torch.ones_like(q[..., :1])], dim=-1)
    return fused_softmax(wide_q, torch.cat([rows, logs], dim=-1), means, scale=1.0)
