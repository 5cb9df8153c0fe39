r"""A causal form of near_far by levels, as a comparison for the library's own, which scans the blocks.

A query sees its own block of B tokens and the block before it exactly. All earlier blocks are divided into runs of
$2^l$ blocks, at most $\log_2 (n / B)$ runs. Of each run the query sees m clusters, each by the mean of its keys, with
the logarithm of their number added to the score, and the mean of its values.

The clusters of a run are made from those of its two halves, so all runs of a level are computed at once, in linear
time and without a scan. What is kept for the next token grows with the logarithm of n, whereas the cache of the scan
has a fixed size.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

_STEPS = 2


def attend_by_levels(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h n d"],
    v: Float[Tensor, "b h n e"],
    *,
    block_size: int = 64,
    num_clusters: int = 16,
) -> Float[Tensor, "b h n e"]:
    """Causal self-attention of real tokens: each to its near tokens, and to clusters of runs of the earlier ones."""
    n, size = q.shape[2], block_size
    q, k, v = (F.pad(x, (0, 0, 0, -n % size)).unflatten(2, (-1, size)) for x in (q, k, v))
    blocks = q.shape[2]
    levels = _levels(k, v, num_clusters)
    # Block i is far from the blocks before i - 1.
    far = (torch.arange(blocks, device=q.device) - 1).clamp(min=0)
    keys, values, biases = [_with_previous(k)], [_with_previous(v)], []
    for level, (means, sums, count) in enumerate(levels):
        run = (far >> (level + 1) << 1).clamp(max=means.shape[2] - 1)
        keys.append(means[:, :, run])
        values.append(sums[:, :, run] / count[:, :, run].clamp(min=1)[..., None])
        has = (far >> level & 1).bool()[:, None]
        biases.append(torch.where(has, count[:, :, run].log(), -torch.inf))
    place = torch.arange(2 * size, device=q.device) - size
    near = torch.zeros(blocks, size, 2 * size, dtype=q.dtype, device=q.device)
    near.masked_fill_(place > torch.arange(size, device=q.device)[:, None], -torch.inf)
    # The first block has none before it.
    near[0, :, :size] = -torch.inf
    shape = (*q.shape[:3], size, -1)
    bias = torch.cat([near.expand(shape), *(each[:, :, :, None].expand(shape) for each in biases)], dim=-1)
    joined = (torch.cat(each, dim=3).flatten(0, 2)[:, None] for each in (keys, values))
    out = F.scaled_dot_product_attention(q.flatten(0, 2)[:, None], *joined, attn_mask=bias.flatten(0, 2)[:, None])
    return out[:, 0].unflatten(0, q.shape[:3]).flatten(2, 3)[:, :, :n]


def _with_previous(x: Float[Tensor, "b h blocks size d"]) -> Float[Tensor, "b h blocks two_sizes d"]:
    """Each block, preceded by the block before it."""
    return torch.cat([F.pad(x, (0, 0, 0, 0, 1, -1)), x], dim=3)


def _levels(
    k: Float[Tensor, "b h blocks size d"], v: Float[Tensor, "b h blocks size e"], m: int
) -> Sequence[tuple[Tensor, Tensor, Tensor]]:
    """The clusters of the runs of each level: means of keys, sums of values, and numbers of tokens."""
    ones = torch.ones_like(k[..., 0])
    levels = [_clustered(k, v, ones, m)]
    while levels[-1][0].shape[2] > 1:
        # A run without a second half is never seen.
        pairs = levels[-1][0].shape[2] // 2
        means, sums, count = (x[:, :, : 2 * pairs].unflatten(2, (pairs, 2)).flatten(3, 4) for x in levels[-1])
        levels.append(_clustered(means, sums, count, m))
    return levels


def _clustered(
    keys: Float[Tensor, "b h runs r d"],
    values: Float[Tensor, "b h runs r e"],
    count: Float[Tensor, "b h runs r"],
    m: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """k-means of the keys of each run, each of which stands for `count` tokens; values are sums."""
    if keys.shape[3] <= m:
        return keys, values, count
    taken = count
    with torch.no_grad():
        weighted = count[..., None] * keys
        centers = keys[:, :, :, :: -(-keys.shape[3] // m)]
        for _ in range(_STEPS):
            scores = keys @ centers.mT - centers.square().sum(dim=-1)[..., None, :] / 2
            taken = F.one_hot(scores.argmax(dim=-1), centers.shape[3]).to(keys.dtype).mT
            size = (taken @ count[..., None]).clamp(min=1e-9)
            centers = (taken @ weighted) / size
    number = (taken @ count[..., None])[..., 0]
    means = (taken @ (count[..., None] * keys)) / number.clamp(min=1e-9)[..., None]
    return means, taken @ values, number
