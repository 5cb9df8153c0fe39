r"""Attention of queries to the keys near them in a common text, to heavy keys, and to clusters of the other keys.

Queries and keys have positions in one text. Let $p_0$ be the position of the first real key. The block of a query at
position x begins at $p_0 + \lfloor (x - p_0) / \text{size} \rfloor\, \text{size}$, and its near keys are the real ones
from `reach` before the block to `reach` after it. Positions strictly increase over the real keys. So at most
w = size + 2 reach keys are near; they are consecutive, and a binary search finds them. Gaps cost nothing.

The near keys of each query are copied, so time is linear in n and s. The copies exist for one stretch of queries at a
time, and the backward pass makes them again. The real keys, in order, are cut into pieces of L, and a query copies the
pieces that may hold its near keys. Let $u_j = p_j / c_j$ be the weight of cluster j divided by the number of its far
keys, and $S_j$ the sum of its values outside these pieces. The contribution of the cluster to the output is
$$p_j \bar v_j = u_j S_j + \sum_{t \in j \text{ copied, far}} u_j v_t.$$
The $S_j$ are sums over the pieces before and after: nothing is added that would have to be subtracted again.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nystrom.attention.options import NearFarOptions
from nystrom.attention.parts.band import bias_of
from nystrom.attention.parts.clusters import Chosen, cluster_sums, open_sizes, take_rows
from nystrom.landmarks import first_tokens, insertion_points, ranks
from nystrom.shapes import is_number, score_scale

# Numbers held at a time in copied keys and values: this many, or twice as many as all keys and values hold, if more.
_NUMBERS = 2**19


class Positions(NamedTuple):
    """Positions of queries and keys in one text.

    Attributes:
        queries: Positions of the queries, in any order.
        keys: Positions of the keys; strictly increasing over the real ones.
    """

    queries: Int[Tensor, "b n"]
    keys: Int[Tensor, "b s"]


def check_places(
    query_positions: Tensor | None, key_positions: Tensor | None, q: Tensor, k: Tensor, keep: Tensor | None
) -> Positions | None:
    """Check the positions of queries and keys; returns None if there are none.

    Raises:
        ValueError: Only one of the two, a wrong shape, dtype or device, or positions of real keys that do not increase.
    """
    if query_positions is None and key_positions is None:
        return None
    found = []
    for name, x, of, tokens in (
        ("query_positions", query_positions, "q", q), ("key_positions", key_positions, "k", k),
    ):  # fmt: skip
        if not isinstance(x, Tensor):
            raise ValueError(
                f"{name} is a {type(x).__name__}; expected a tensor: pass positions of queries and of keys, or neither."
            )
        if x.dtype not in (torch.int32, torch.int64) or x.shape != (tokens.shape[0], tokens.shape[2]):
            raise ValueError(
                f"{name} is {tuple(x.shape)} of {x.dtype}; expected int64 or int32 of shape "
                f"{(tokens.shape[0], tokens.shape[2])}, one position per token of {of}."
            )
        if x.device != tokens.device:
            raise ValueError(f"{name} is on {x.device} but {of} is on {tokens.device}: move it there.")
        found.append(x.long())
    positions = Positions(*found)
    if not tokens.shape[2]:
        return positions
    held = positions.keys
    if keep is not None:
        # Keys that are not real do not count: the maximum skips them.
        held = torch.where(keep, held, torch.iinfo(held.dtype).min)
    before = held.cummax(dim=1).values[:, :-1]
    rises = held[:, 1:] > before
    rises = (rises if keep is None else rises | ~keep[:, 1:]).all()
    message = (
        "key_positions do not increase from one real key to the next: sort the keys, each with a position of its own."
    )
    if torch.compiler.is_compiling():
        # A compiled graph cannot branch on values: it raises this as a RuntimeError when it runs.
        torch._assert_async(rises, message)  # pyright: ignore[reportPrivateImportUsage]
    elif not rises:
        raise ValueError(message)
    return positions


def near_keys(
    positions: Positions, keep: Bool[Tensor, "b s"], queries: Int[Tensor, " r"], options: NearFarOptions
) -> Bool[Tensor, "b r s"]:
    """Which keys are near each of some queries, directly from the definition: r x s booleans."""
    origin = positions.keys.gather(1, keep.long().argmax(dim=1, keepdim=True))
    start = _block_start(positions.queries[:, queries], origin, options.block_size)
    offset = positions.keys[:, None] - start[:, :, None]
    return keep[:, None] & (offset >= -options.reach) & (offset < options.block_size + options.reach)


def attend_at_positions(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    v: Float[Tensor, "b h s e"],
    keep: Bool[Tensor, "b s"] | None,
    positions: Positions,
    chosen: Chosen,
    options: NearFarOptions,
) -> Float[Tensor, "b h n e"]:
    """Attend.

    Args:
        q: Queries, in float32 or float64; zeros where they are not real, as for keys and values.
        k: Keys.
        v: Values.
        keep: Real keys; None if all are.
        positions: Positions of queries and keys.
        chosen: Heavy keys and clusters of each head.
        options: The sizes.
    """
    (b, h, n), s, m = q.shape[:3], k.shape[2], options.num_clusters
    windows = _find(positions, keep, options)
    count = open_sizes(k, chosen, m)
    means = cluster_sums(k, chosen.cluster, m) / count.clamp(min=1)[..., None]
    keys, heavy = torch.cat([take_rows(k, chosen.heavy), means], dim=2), take_rows(v, chosen.heavy)
    beyond = _sums_beyond(v, keep, chosen.cluster, windows.place.shape[2], options)
    bias, scale = bias_of(chosen.found, k.dtype)[:, :, None], score_scale(q, options.scale)
    tensors = (k, v, keys, heavy, beyond, bias, count, chosen.cluster)
    width = windows.place.shape[2] * (k.shape[-1] + v.shape[-1]) * b * h
    # In a compiler there is a single stretch: the number of stretches would become part of its graph.
    whole = torch.compiler.is_compiling() or not (is_number(n) and is_number(s))
    again = torch.is_grad_enabled() and (
        torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active()
    )

    def attend(some: slice) -> Float[Tensor, "b h c e"]:
        inputs = (q[:, :, some], _Windows(*(x[:, some] for x in windows)), *tensors, scale)
        if again:
            return checkpoint(_attend, *inputs, use_reentrant=False, preserve_rng_state=False)
        return _attend(*inputs)

    if whole:
        return attend(slice(None))
    length = max(1, _NUMBERS // width, 2 * s // windows.place.shape[2])
    out = [attend(slice(start, start + length)) for start in range(0, n, length)]
    return out[0] if len(out) == 1 else torch.cat(out, dim=2)


class _Windows(NamedTuple):
    """For each query: the first piece that it copies, the places of the copied keys, and which are near and real."""

    piece: Int[Tensor, "b n"]
    place: Int[Tensor, "b n w"]
    near: Bool[Tensor, "b n w"]
    real: Bool[Tensor, "b n w"]


def _piece_length(options: NearFarOptions) -> int:
    """Keys per piece: all sums together then hold twice as many numbers as the values; few extra keys are copied."""
    return max(1, options.num_clusters // 2)


def _find(positions: Positions, keep: Bool[Tensor, "b s"] | None, options: NearFarOptions) -> _Windows:
    held, s, size, reach = positions.keys, positions.keys.shape[1], options.block_size, options.reach
    order = exists = None
    if keep is not None:
        # Real keys come first; the places after them hold no key.
        order, exists = first_tokens(keep, s)
        held = torch.where(exists, held.gather(1, order), torch.iinfo(held.dtype).max)
    start = _block_start(positions.queries, held[:, :1], size)
    length = _piece_length(options)
    piece = insertion_points(held.contiguous(), start - reach) // length
    # The first near key may be the last of its piece.
    copied = (-(-(size + 2 * reach) // length) + 1) * length
    place = piece[:, :, None] * length + torch.arange(copied, device=held.device)
    real, place = place < s, place.clamp(max=s - 1)
    flat = place.flatten(1)
    offset = held.gather(1, flat).view(place.shape) - start[:, :, None]
    if order is not None and exists is not None:
        real = real & exists.gather(1, flat).view(place.shape)
        place = order.gather(1, flat).view(place.shape)
    return _Windows(piece, place, real & (offset >= -reach) & (offset < size + reach), real)


def _sums_beyond(
    v: Float[Tensor, "b h s e"],
    keep: Bool[Tensor, "b s"] | None,
    cluster: Int[Tensor, "b h s"],
    copied: int,
    options: NearFarOptions,
) -> Float[Tensor, "b h pieces m e"]:
    """For each first piece, the sums of the values of each cluster outside the pieces that are then copied."""
    m, length, s = options.num_clusters, _piece_length(options), v.shape[2]
    pieces = s // length + 1
    rank = torch.arange(s, device=v.device)[None] if keep is None else ranks(keep)[0]
    place = torch.where(cluster < m, cluster * pieces + (rank // length)[:, None], m * pieces)
    # The axis of the clusters comes first: their number is fixed, that of the pieces may be symbolic in an export.
    sums = cluster_sums(v, place, m * pieces).unflatten(2, (m, -1)).movedim(3, 2)
    before = F.pad(sums, (0, 0, 0, 0, 1, -1)).cumsum(dim=2)
    after = F.pad(sums, (0, 0, 0, 0, 0, copied // length)).flip(2).cumsum(dim=2).flip(2)[:, :, copied // length :]
    return before + after


def _block_start(x: Int[Tensor, "b n"], origin: Int[Tensor, "b 1"], size: int) -> Int[Tensor, "b n"]:
    return origin + (x - origin).div(size, rounding_mode="floor") * size


def _attend(
    q: Float[Tensor, "b h c d"],
    windows: _Windows,
    k: Float[Tensor, "b h s d"],
    v: Float[Tensor, "b h s e"],
    keys: Float[Tensor, "b h g_and_m d"],
    heavy_values: Float[Tensor, "b h g e"],
    beyond: Float[Tensor, "b h pieces m e"],
    bias: Float[Tensor, "b h 1 g"],
    count: Float[Tensor, "b h m"],
    cluster: Int[Tensor, "b h s"],
    scale: float,
) -> Float[Tensor, "b h c e"]:
    """Attend for one stretch of queries."""
    piece, place, near, real = windows
    (b, h, c), w, m, g = q.shape[:3], place.shape[2], count.shape[2], bias.shape[3]
    rows = place.flatten(1)[:, None].expand(b, h, c * w)
    near_k, near_v = (take_rows(x, rows).unflatten(2, (c, w)) for x in (k, v))
    # A real key without a cluster is heavy, and counts among the heavy keys.
    own = torch.where(real[:, None], cluster.gather(2, rows).unflatten(2, (c, w)), m)
    inside = torch.where(near[:, None], own, m)
    taken = count.new_zeros(b, h, c, m + 1).scatter_add(3, inside, torch.ones_like(near_k[..., 0]))[..., :m]
    left = count[:, :, None] - taken
    scores = scale * (near_k @ q[..., None])[..., 0]
    shared = scale * (q @ keys.mT) + torch.cat([bias.expand(b, h, c, g), left.log()], dim=3)
    scores = torch.cat([scores.masked_fill(inside == m, -torch.inf), shared], dim=3)
    near_weights, heavy, far = scores.softmax(dim=-1).split([w, g, m], dim=3)
    far = far / left.clamp(min=1)
    near_weights = torch.where(near[:, None], near_weights, F.pad(far, (0, 1)).gather(3, own))
    sums = take_rows(beyond.flatten(3), piece[:, None].expand(b, h, c)).unflatten(3, (m, v.shape[3]))
    return ((near_weights[..., None, :] @ near_v) + far[..., None, :] @ sums)[..., 0, :] + heavy @ heavy_values
