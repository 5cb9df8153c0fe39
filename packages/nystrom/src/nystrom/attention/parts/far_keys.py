r"""Attention of blocks of queries to the tokens around them, heavy keys and clusters of the rest.

A cluster acts as one key: the mean of its keys, with the mean of the values of its far tokens, and the logarithm of
their number as a bias. So no token counts twice. `outside_sums` computes the sums over tokens outside a block's window,
`sums_without` those over tokens that a block neither has in its window nor selects.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nystrom.attention.fused import bias_of
from nystrom.attention.options import NearFarOptions
from nystrom.attention.parts.band import windows
from nystrom.attention.parts.clusters import Chosen, cluster_sizes, cluster_sums, open_sizes, take_rows
from nystrom.attention.parts.outside_sums import sums_outside
from nystrom.attention.parts.sums_without import sums_without
from nystrom.shapes import cut_blocks, score_scale


class SeenKeys(NamedTuple):
    """The keys that blocks of queries attend to, their values, and a bias of their scores, -inf where none counts."""

    keys: Float[Tensor, "b l k d"]
    values: Float[Tensor, "b l k e"]
    bias: Float[Tensor, "b l k"] | Float[Tensor, "b l c k"]  # One for all queries of a block, or one for each


class FarKeys(NamedTuple):
    """Heavy keys and clusters of each row."""

    keys: Float[Tensor, "*b g d"]  # Heavy keys
    values: Float[Tensor, "*b g e"]  # Their values
    exists: Bool[Tensor, "*b g"]  # Which of them exist
    sizes: Float[Tensor, "*b m"]  # Tokens of each cluster; a row without any token has one in its first cluster
    means: Float[Tensor, "*b m d"]  # Mean key of each cluster
    sums: Float[Tensor, "*b m e"]  # Sum of the values of each cluster


def attend_blocks(
    q: Float[Tensor, "b t d"],
    k: Float[Tensor, "b t d"],
    v: Float[Tensor, "b t e"],
    chosen: Chosen,
    options: NearFarOptions,
    selected: Int[Tensor, "b l r"] | None = None,
) -> Float[Tensor, "b t e"]:
    """Self-attention of a whole number of blocks, one head per row, in float32 or float64.

    The first real token is at place 0; queries, keys and values are zeros where they are not real. `selected` are the
    places of the keys that each block selects, -1 for none.
    """
    far = far_keys(k, v, chosen, options)
    if selected is None:
        keys = keys_of_blocks(k, v, chosen.cluster, far, options)
    else:
        keys = keys_of_selecting_blocks(k, v, chosen.cluster, far, selected, 0, options)
    return attend_with_bias(cut_blocks(q, options.block_size), keys, score_scale(q, options.scale)).flatten(1, 2)


def attend_everywhere(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    v: Float[Tensor, "b h s e"],
    chosen: Chosen,
    options: NearFarOptions,
) -> Float[Tensor, "b h n e"]:
    """Attention of all queries to the same keys, the heavy ones and all clusters of each head, in float32 or float64.

    Keys and values are zeros where they are not real.
    """
    return attend_far(q, far_keys(k, v, chosen, options), options)


def far_keys(
    k: Float[Tensor, "*b s d"], v: Float[Tensor, "*b s e"], chosen: Chosen, options: NearFarOptions
) -> FarKeys:
    """Heavy keys, and sizes, mean keys and sums of values of the clusters.

    Keys and values are zeros where they are not real.
    """
    m, sizes = options.num_clusters, open_sizes(k, chosen, options.num_clusters)
    means = cluster_sums(k, chosen.cluster, m) / sizes.clamp(min=1)[..., None]
    heavy, values = (take_rows(x, chosen.heavy) for x in (k, v))
    return FarKeys(heavy, values, chosen.exists, sizes, means, cluster_sums(v, chosen.cluster, m))


def attend_far(q: Float[Tensor, "b h n d"], far: FarKeys, options: NearFarOptions) -> Float[Tensor, "b h n e"]:
    """Attention to heavy keys and clusters only."""
    keys = torch.cat([far.keys, far.means], dim=2)
    values = torch.cat([far.values, far.sums / far.sizes.clamp(min=1)[..., None]], dim=2)
    bias = torch.cat([bias_of(far.exists, q.dtype), far.sizes.log()], dim=2)
    return attend_with_bias(q, SeenKeys(keys, values, bias), score_scale(q, options.scale))


def keys_of_blocks(
    k: Float[Tensor, "b t d"],
    v: Float[Tensor, "b t e"],
    cluster: Int[Tensor, "b t"],
    far: FarKeys,
    options: NearFarOptions,
    beyond: Float[Tensor, "b m e"] | None = None,
) -> SeenKeys:
    """The tokens around each block, the heavy keys, and the clusters without the tokens around the block.

    Args:
        k: Keys of a whole number of blocks, one head per row.
        cluster: The cluster of each key.
        beyond: Sums of the values of each cluster over far tokens that are not in `v`; None if there are none.
    """
    size, reach, m = options.block_size, options.reach, options.num_clusters
    near_k, near_v = (windows(x, size, reach) for x in (k, v))
    # `windows` pads with zeros, which after the shift mean m: no cluster.
    inside = windows((cluster - m)[..., None], size, reach)[..., 0] + m
    left = far.sizes[:, None] - cluster_sizes(near_k, inside, m)
    values = sums_outside(near_v, inside, size, m)
    values = values if beyond is None else values + beyond[:, None]
    return _with_far(near_k, near_v, inside < m, far, left, values)


def keys_of_selecting_blocks(
    k: Float[Tensor, "b t d"],
    v: Float[Tensor, "b t e"],
    cluster: Int[Tensor, "b t"],
    far: FarKeys,
    selected: Int[Tensor, "b l r"],
    first: int,
    options: NearFarOptions,
) -> SeenKeys:
    """`keys_of_blocks` of the blocks from `first` on, and the keys that they select, without these in their clusters.

    A selected key is neither near nor heavy; -1 stands for none.
    """
    size, reach, m, t = options.block_size, options.reach, options.num_clusters, k.shape[1]
    begin = (first + torch.arange(selected.shape[1], device=k.device)) * size
    near = begin[:, None] + torch.arange(-reach, size + reach, device=k.device)
    places = torch.cat([near.expand(len(k), -1, -1), selected], dim=2)
    there = (places >= 0) & (places < t)
    flat, each = places.clamp(0, t - 1).flatten(1), places.shape[2]
    inside = torch.where(there, cut_blocks(cluster.gather(1, flat), each), m)
    keys, values = (cut_blocks(take_rows(x, flat), each) for x in (k, v))
    left = far.sizes[:, None] - cluster_sizes(keys, inside, m)
    sums = sums_without(v, cluster, torch.where(there, places, t), m)
    return _with_far(keys, values, inside < m, far, left, sums)


def _with_far(
    keys: Float[Tensor, "b l x d"],
    values: Float[Tensor, "b l x e"],
    counts: Bool[Tensor, "b l x"],
    far: FarKeys,
    left: Float[Tensor, "b l m"],
    sums: Float[Tensor, "b l m e"],
) -> SeenKeys:
    """Keys of each block and the far ones, of which the block sees `left` tokens with these sums of values.

    A token without a cluster does not count: it is either heavy, and counts among the heavy keys, or not real.
    """
    blocks = (-1, keys.shape[1], -1, -1)
    shared = torch.cat([far.keys, far.means], dim=1)[:, None].expand(blocks)
    heavy, means = far.values[:, None].expand(blocks), sums / left.clamp(min=1)[..., None]
    bias, heavy_bias = bias_of(counts, keys.dtype), bias_of(far.exists, keys.dtype)[:, None].expand(blocks[:3])
    return SeenKeys(
        torch.cat([keys, shared], dim=2),
        torch.cat([values, heavy, means], dim=2),
        torch.cat([bias, heavy_bias, left.log()], dim=2),
    )


def attend_with_bias(q: Float[Tensor, "b l c d"], keys: SeenKeys, scale: float) -> Float[Tensor, "b l c e"]:
    """One fused call, for any widths of keys and values."""
    d, e = q.shape[-1], keys.values.shape[-1]
    q, k, v = (F.pad(x, (0, max(d, e) - x.shape[-1])) if d != e else x for x in (q, keys.keys, keys.values))
    bias = keys.bias if keys.bias.ndim == 4 else keys.bias[:, :, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)[..., :e]
