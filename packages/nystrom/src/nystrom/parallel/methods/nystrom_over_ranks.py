r"""Nyström attention across ranks.

The landmarks are sums over the tokens of all ranks. The m x n softmax of the right factor is joined from the maxima and
sums of its rows, m (e + 1) numbers. Every rank computes the same inverse, and the left factor needs only a rank's own
queries. So the communication does not depend on n.

Short sequences are exact, as in a single process: their at most m keys or queries are the landmarks, which all ranks
hold.
"""

from jaxtyping import Float
from torch import Tensor

from nystrom.attention.fused import softmax_of_landmarks
from nystrom.attention.methods.nystrom import left_factor
from nystrom.attention.options import NystromOptions
from nystrom.linalg.pinv import pinv
from nystrom.parallel.communication import Ranks
from nystrom.parallel.joined_softmax import joined_softmax
from nystrom.parallel.landmarks_over_ranks import choose, shared_draws
from nystrom.parallel.positions_over_ranks import Tokens
from nystrom.parallel.short import find_short
from nystrom.parallel.skip_over_ranks import skip_over_ranks
from nystrom.shapes import Generator


def nystrom_over_ranks(
    ranks: Ranks,
    queries: Tokens,
    keys: Tokens,
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    v: Float[Tensor, "b h s e"],
    options: NystromOptions,
    generator: Generator,
    skip: Float[Tensor, "h 1 taps 1"] | None,
) -> Float[Tensor, "b h n e"]:
    """`nystrom_attention` of the tokens of all ranks."""
    m, scale = options.num_landmarks, options.scale
    draws = shared_draws(ranks, m, generator, q.device) if options.landmarks == "uniform" else None
    q_landmarks = choose(ranks, queries, q, m, options.landmarks, draws)
    k_landmarks = choose(ranks, keys, k, m, options.landmarks, draws)
    short = find_short(queries, keys, m)
    if options.landmarks != "segment_means":
        # At most m tokens are their own means.
        q_landmarks = short.queries_as_landmarks(ranks, q_landmarks, q)
        k_landmarks = short.keys_as_landmarks(ranks, k_landmarks, k)
    a = short.identity_where_short(softmax_of_landmarks(q_landmarks, k_landmarks, scale=scale))
    inverse = pinv(a, inverse=options.pinv, steps=options.pinv_steps, z0=options.z0)
    right, _ = joined_softmax(ranks, keys, q_landmarks, k, v, scale=scale)
    middle = short.values_as_middle(ranks, inverse @ right, v)
    out = left_factor(q, k_landmarks.to(q.dtype), middle, short.real_landmarks(), scale)
    out = short.results(out, right)
    return out if skip is None else skip_over_ranks(ranks, keys, v, skip, out)
