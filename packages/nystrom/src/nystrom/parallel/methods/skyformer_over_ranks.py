"""Skyformer across ranks: all ranks hold the m landmarks, drawn tokens, and add up sums over keys, m e numbers.

Short sequences are exact, as in a single process; see `nystrom.parallel.short`.
"""

import functools

import torch
from jaxtyping import Float
from torch import Tensor

from nystrom.attention.methods.kernelized import sum_by_kernel
from nystrom.attention.methods.skyformer import kernel_of_landmarks, ridged_inverse
from nystrom.attention.options import SkyformerOptions
from nystrom.landmarks import within_reach
from nystrom.parallel.communication import Ranks
from nystrom.parallel.landmarks_over_ranks import shared_draws, uniform
from nystrom.parallel.positions_over_ranks import Tokens
from nystrom.parallel.short import find_short
from nystrom.shapes import Generator, score_scale


def skyformer_over_ranks(
    ranks: Ranks,
    queries: Tokens,
    keys: Tokens,
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    v: Float[Tensor, "b h s e"],
    options: SkyformerOptions,
    generator: Generator,
) -> Float[Tensor, "b h n e"]:
    """`skyformer_attention` of the tokens of all ranks."""
    m, scale = options.num_landmarks, score_scale(q, options.scale)
    weigh = functools.partial(sum_by_kernel, kernel=options.kernel, scale=scale)
    draws, half = shared_draws(ranks, m, generator, q.device), m // 2
    from_queries = uniform(ranks, queries, q, half, draws[:half])
    landmarks = within_reach(torch.cat([from_queries, uniform(ranks, keys, k, m - half, draws[half:])], dim=2))
    inverse = ridged_inverse(kernel_of_landmarks(landmarks, options.kernel, scale), options)
    short = find_short(queries, keys, m)
    landmarks = short.queries_as_landmarks(ranks, landmarks, q)
    right = ranks.sum(weigh(landmarks, k, v, keep=keys.keep))
    middle = short.values_as_middle(ranks, inverse @ right, v)
    landmarks = short.keys_as_landmarks(ranks, landmarks, k)
    return short.results(weigh(q, landmarks, middle, keep=short.real_landmarks()), right)
