r"""Keys that a block of queries selects: those whose cluster would cost it most.

A block b of B queries is cut into stretches of 16, with the means $\bar q_t$ of their real queries. For a key j in the
cluster a, with the mean key $\mu_a$ and the mean value $\nu_a$ of the cluster,
$$w_b(j) = p_b(j)\, \|v_j - \nu_a\|_1, \qquad p_b(j) = \max_{t \in b} e^{c\, \bar q_t^\top k_j} / Z_t$$
is about what the output of b loses if j is part of its cluster: the attention to j times how far its value is from
that of the cluster. $Z_t$ is the sum of the softmax over heavy keys and clusters. The block selects the r keys with the
largest w that are neither in its window nor heavy.

They are chosen among 4 r candidates, so that the choice costs a block the same for any length: the keys of the clusters
with the largest $\max_t e^{c\, \bar q_t^\top \mu_a} / Z_t$ times the mean of $\|v_j - \nu_a\|_1$ over the cluster, one
cluster after the other. Among losses that are equal to about a thousandth, the first cluster and the first key win, as
in `order`. The choice has no gradient.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nystrom.attention.fused import bias_of
from nystrom.attention.options import NearFarOptions
from nystrom.attention.parts.block_stretches import sizes_of
from nystrom.attention.parts.clusters import Chosen, cluster_sizes, cluster_sums, take_rows
from nystrom.attention.parts.far_keys import FarKeys, far_keys
from nystrom.attention.parts.order import first_in_order, in_order
from nystrom.native import run_blocks, runs_in_stretches, runs_natively
from nystrom.shapes import cut_blocks, score_scale

# Queries whose mean stands for them, and candidates for each key that is selected.
STRETCH, CANDIDATES = 16, 4
# Numbers in the candidates of the blocks that choose at a time on a CPU: fewer than the keys have, but at least
# _FEWEST, and no more than fit into a cache.
_FEWEST, _MOST = 2**12, 2**19


class _Keys(NamedTuple):
    """The keys that all blocks of a row choose from."""

    far: FarKeys
    sizes: Int[Tensor, "b m"]  # Tokens of each cluster
    in_clusters: Int[Tensor, "b t"]  # The tokens, cluster by cluster
    distance: Float[Tensor, "b t"]  # The logarithm of the distance of each value from the mean of its cluster
    spread: Float[Tensor, "b m"]  # The logarithm of the mean distance in each cluster


@torch.no_grad()
def select_keys(
    q: Float[Tensor, "b t d"],
    k: Float[Tensor, "b t d"],
    v: Float[Tensor, "b t e"],
    real: Bool[Tensor, "b t"],
    chosen: Chosen,
    options: NearFarOptions,
) -> Int[Tensor, "b l r"]:
    """Places of the keys that each block selects, -1 where it finds no more.

    The tokens are those of `far_keys.attend_blocks`; `real` says which of them are.
    """
    if runs_natively(q, k, v):
        selected = q.new_empty(len(q), q.shape[1] // options.block_size, options.num_selected, dtype=torch.long)
        run_blocks("blocks_select", chosen, *sizes_of(q, options), selected=selected, real=real, q=q, k=k, v=v)
        return selected
    keys, (means, counted) = _keys(k, v, chosen, options), _means(q, real, options)
    if not runs_in_stretches(q, k, v):
        return _select(k, keys, means, counted, 0, options)
    widest = max(CANDIDATES * options.num_selected * k.shape[2], options.num_heavy + options.num_clusters)
    step = max(1, max(_FEWEST, min(k.numel() // 2, _MOST)) // (len(k) * widest))
    parts = [
        _select(k, keys, means[:, first : first + step], counted[:, first : first + step], first, options)
        for first in range(0, means.shape[1], step)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _keys(k: Tensor, v: Tensor, chosen: Chosen, options: NearFarOptions) -> _Keys:
    m, far, limits = options.num_clusters, far_keys(k, v, chosen, options), torch.finfo(v.dtype)
    sizes = cluster_sizes(k, chosen.cluster, m)
    number = sizes.clamp(min=1)[..., None]
    means = F.pad(far.sums / number, (0, 0, 0, 1))
    distance = (v - take_rows(means, chosen.cluster)).abs().sum(dim=-1)
    spread = cluster_sums(distance[..., None], chosen.cluster, m) / number
    distance, spread = (x.clamp(limits.tiny, limits.max).log() for x in (distance, spread[..., 0]))
    return _Keys(far, sizes.long(), chosen.cluster.argsort(dim=-1, stable=True), distance, spread)


def _means(
    q: Float[Tensor, "b t d"], real: Bool[Tensor, "b t"], options: NearFarOptions
) -> tuple[Float[Tensor, "b l p d"], Bool[Tensor, "b l p"]]:
    """The means of the real queries of each stretch, times the scale of scores, and which stretches have any."""
    size = options.block_size
    more = -size % STRETCH
    queries, counted = (cut_blocks(x, size) for x in (q, real.to(q.dtype)))
    queries = F.pad(queries, (0, 0, 0, more)).unflatten(2, (-1, STRETCH)).sum(dim=3)
    counted = F.pad(counted, (0, more)).unflatten(2, (-1, STRETCH)).sum(dim=3)
    return score_scale(q, options.scale) * queries / counted.clamp(min=1)[..., None], counted > 0


def _select(
    k: Float[Tensor, "b t d"],
    keys: _Keys,
    means: Float[Tensor, "b l p d"],
    counted: Bool[Tensor, "b l p"],
    first: int,
    options: NearFarOptions,
) -> Int[Tensor, "b l r"]:
    """The keys that some blocks select, the first of which is block `first`."""
    far, number, size, m = keys.far, CANDIDATES * options.num_selected, options.block_size, options.num_clusters
    of_clusters = means @ far.means[:, None].mT
    of_heavy = means @ far.keys[:, None].mT + bias_of(far.exists, k.dtype)[:, None, None]
    total = torch.cat([of_clusters + far.sizes.log()[:, None, None], of_heavy], dim=-1).logsumexp(dim=-1, keepdim=True)
    # A stretch without a real query asks for nothing.
    total = torch.where(counted[..., None], total, torch.inf)

    # The clusters in the order of their losses, and the candidates, one cluster after the other.
    loss = (of_clusters - total).amax(dim=2) + keys.spread[:, None]
    number_of = torch.arange(m, device=k.device)
    order, filled = first_in_order(in_order(loss, number_of, (keys.sizes > 0)[:, None]), m)
    sizes = torch.where(filled, keys.sizes[:, None].expand_as(order).gather(2, order), 0)
    ends, starts = sizes.cumsum(dim=2), (keys.sizes.cumsum(dim=1) - keys.sizes)[:, None].expand_as(order)
    ended = torch.zeros_like(ends[:, :, :1]).expand(-1, -1, number + 1)
    ended = ended.scatter_add(2, ends.clamp(max=number), torch.ones_like(ends)).cumsum(dim=2)[:, :, :number]
    exists, which = ended < filled.sum(dim=2, keepdim=True), ended.clamp(max=m - 1)
    slot = torch.arange(number, device=k.device) - (ends - sizes).gather(2, which)
    place = (starts.gather(2, order.gather(2, which)) + slot).clamp(0, k.shape[1] - 1)
    place = keys.in_clusters[:, None].expand(-1, place.shape[1], -1).gather(2, place)

    flat = place.flatten(1)
    scores = (means @ cut_blocks(take_rows(k, flat), number).mT - total).amax(dim=2)
    scores = scores + cut_blocks(keys.distance.gather(1, flat), number)
    begin = (first + torch.arange(place.shape[1], device=k.device))[:, None] * size
    near = (place >= begin - options.reach) & (place < begin + size + options.reach)
    selected, exists = first_in_order(in_order(scores, place, exists & ~near), options.num_selected)
    return torch.where(exists, selected, -1)
