"""Tokens of self-attention, moved so that the first real one of each sequence begins a block."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nystrom.attention.options import NearFarOptions
from nystrom.attention.parts.band import from_first_real, pad_to_blocks
from nystrom.attention.parts.clusters import Chosen, take_rows


class Tokens(NamedTuple):
    """Tokens of self-attention, one head per row, the first real one at the begin of a block, in whole blocks."""

    q: Float[Tensor, "r t d"]
    k: Float[Tensor, "r t d"]
    v: Float[Tensor, "r t e"]
    real: Bool[Tensor, "r t"] | None  # Of the real queries; None if that is not asked for
    chosen: Chosen
    first: Int[Tensor, " r"] | None  # The first real token of each row; None if no token has moved


def moved_tokens(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h n d"],
    v: Float[Tensor, "b h n e"],
    keep: Bool[Tensor, "b n"] | None,
    chosen: Chosen,
    options: NearFarOptions,
) -> Tokens:
    """Move the tokens; queries, keys and values are zeros where they are not real."""
    (b, h, n), size, m = q.shape[:3], options.block_size, options.num_clusters
    q, k, v, heavy, found, cluster = (x.flatten(0, 1) for x in (q, k, v, *chosen))
    if keep is None:
        real = pad_to_blocks(torch.ones_like(cluster, dtype=torch.bool)[..., None], size)[..., 0]
        q, k, v = (pad_to_blocks(x, size) for x in (q, k, v))
        cluster = pad_to_blocks((cluster - m)[..., None], size)[..., 0] + m
        return Tokens(q, k, v, real if options.num_selected else None, Chosen(heavy, found, cluster), None)
    row = torch.arange(b * h, device=q.device) // h
    positions, real, first, _ = (x[row] for x in from_first_real(keep, size))
    q, k, v = (torch.where(real[..., None], take_rows(x, positions), 0.0) for x in (q, k, v))
    cluster = torch.where(real, cluster.gather(1, positions), m)
    heavy = (heavy - first[:, None]).clamp(min=0, max=n - 1)
    return Tokens(q, k, v, real, Chosen(heavy, found, cluster), first)
