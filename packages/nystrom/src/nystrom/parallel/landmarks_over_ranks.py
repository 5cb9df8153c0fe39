"""Landmarks of tokens that are split across ranks; the same on every rank. See `nystrom.landmarks`."""

import torch
from jaxtyping import Float
from torch import Tensor

from nystrom.checks import Landmarks
from nystrom.landmarks import KMEANS_STEPS, draw, drawn_ranks, nearest_centres
from nystrom.parallel.communication import Ranks
from nystrom.parallel.positions_over_ranks import Tokens, means_of, segment_means, take
from nystrom.precision import at_least_float32
from nystrom.shapes import Generator


def choose(
    ranks: Ranks,
    tokens: Tokens,
    x: Float[Tensor, "b h n d"],
    m: int,
    landmarks: Landmarks,
    draws: Float[Tensor, " m"] | None,
) -> Float[Tensor, "b h m d"]:
    """The m landmarks of the requested kind, in float32 at least; tokens are zeros where they are not real.

    `draws` are for "uniform" the position of each token within its segment, in [0, 1).
    """
    if landmarks == "uniform":
        assert draws is not None
        return uniform(ranks, tokens, x, m, draws)
    return kmeans(ranks, tokens, x, m) if landmarks == "kmeans" else segment_means(ranks, tokens, x, m)


def shared_draws(ranks: Ranks, m: int, generator: Generator, device: torch.device) -> Float[Tensor, " m"]:
    """Like `nystrom.landmarks.draw`, with the random draws of the first rank; every rank draws equally many numbers."""
    draws = draw(m, generator, device)
    return draws if generator is None else ranks.send_from(0, draws.contiguous())


def uniform(
    ranks: Ranks, tokens: Tokens, x: Float[Tensor, "b h n d"], m: int, draws: Float[Tensor, " m"]
) -> Float[Tensor, "b h m d"]:
    """One real token from each of m near-equal segments."""
    return take(ranks, tokens, at_least_float32(x), drawn_ranks(tokens.count, m, draws))


def kmeans(ranks: Ranks, tokens: Tokens, x: Float[Tensor, "b h n d"], m: int) -> Float[Tensor, "b h m d"]:
    """Centres of m clusters; in each step, the sums over each rank's own tokens are added up."""
    b, h, n, _ = x.shape
    flat = at_least_float32(x).flatten(0, 1)[:, None]
    real = tokens.keep[:, None].expand(b, h, n).flatten(0, 1)
    centres = segment_means(ranks, tokens, x, m).flatten(0, 1)[:, None]
    for _ in range(KMEANS_STEPS):
        with torch.no_grad():
            nearest = torch.where(real, nearest_centres(flat[:, 0], centres[:, 0]), m)
        means, sizes = means_of(ranks, flat, nearest, m)
        centres = torch.where(sizes[:, None, :, None] > 0, means, centres)
    return centres[:, 0].unflatten(0, (b, h))
