r"""Attention of queries to the keys near them in a common text, to heavy keys and to clusters of the rest.

Queries and keys have positions in one text. With $p_0$ that of the first real key, the block of a query at x begins at
$p_0 + \lfloor (x - p_0) / \text{size} \rfloor\, \text{size}$, and its near keys are the real ones from `reach` before
the block to `reach` after it. Real keys have distinct positions in their order, so that at most w = size + 2 reach of
them are near, which are neighbours and are found by a binary search: any gaps cost nothing.

Each query has w keys of its own, which are copied, so that time is linear in n and s; the copies exist for a stretch of
queries at a time, and for the gradient they are made once more. With $u_j = p_j / c_j$, the weight of cluster j over
the number of its far keys, and $S_j$ the sum of its values, its part in the output is
$$p_j \bar v_j = u_j S_j - \sum_{t \in j \text{ near}} u_j v_t,$$
so that near values are summed once, with the weights $p_t - u_{j(t)}$.
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
from nystrom.landmarks import first_tokens
from nystrom.shapes import score_scale

# Numbers of copied keys that are held at a time: these, or as many as all keys have.
_NUMBERS = 2**19


class Positions(NamedTuple):
    """Places of queries and keys in one text.

    Attributes:
        queries: Of the queries, in any order.
        keys: Of the keys; strictly increasing over the real ones.
    """

    queries: Int[Tensor, "b n"]
    keys: Int[Tensor, "b s"]


def check_places(
    query_positions: Tensor | None, key_positions: Tensor | None, q: Tensor, k: Tensor, keep: Tensor | None
) -> Positions | None:
    """Check the positions of queries and keys; None where there are none.

    Raises:
        ValueError: One of the two alone, a shape, dtype or device that does not fit, or positions of real keys that do
            not increase.
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
        # A key that is not real takes the last real position before it.
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
    """Which keys are near some queries, by the definition: r x s numbers."""
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
        keep: Real keys; None where all are.
        positions: Places of queries and keys.
        chosen: Heavy keys and clusters of each head.
        options: The sizes.
    """
    (b, h, n), s, m = q.shape[:3], k.shape[2], options.num_clusters
    windows = _find(positions, keep, options)
    count = open_sizes(k, chosen, m)
    means = cluster_sums(k, chosen.cluster, m) / count.clamp(min=1)[..., None]
    keys = torch.cat([take_rows(k, chosen.heavy), means], dim=2)
    values = torch.cat([take_rows(v, chosen.heavy), cluster_sums(v, chosen.cluster, m)], dim=2)
    bias, scale = bias_of(chosen.found, k.dtype)[:, :, None], score_scale(q, options.scale)
    tensors = (k, v, keys, values, bias, count, chosen.cluster)
    width = windows.place.shape[2] * (k.shape[-1] + v.shape[-1]) * b * h
    # A compiler takes the whole: the number of stretches would be part of its graph.
    whole = torch.compiler.is_compiling() or not (isinstance(n, int) and isinstance(s, int))
    again = torch.is_grad_enabled() and (
        torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active()
    )

    def attend(some: slice) -> Float[Tensor, "b h c e"]:
        inputs = (q[:, :, some], windows.place[:, some], windows.near[:, some], *tensors, scale)
        if again:
            return checkpoint(_attend, *inputs, use_reentrant=False, preserve_rng_state=False)
        return _attend(*inputs)

    if whole:
        return attend(slice(None))
    length = max(1, _NUMBERS // width, s // windows.place.shape[2])
    out = [attend(slice(start, start + length)) for start in range(0, n, length)]
    return out[0] if len(out) == 1 else torch.cat(out, dim=2)


class _Windows(NamedTuple):
    """The keys that may be near each query, and which are."""

    place: Int[Tensor, "b n w"]
    near: Bool[Tensor, "b n w"]


def _find(positions: Positions, keep: Bool[Tensor, "b s"] | None, options: NearFarOptions) -> _Windows:
    held, s, size, reach = positions.keys, positions.keys.shape[1], options.block_size, options.reach
    order = exists = None
    if keep is not None:
        # Real keys side by side, and after them none.
        order, exists = first_tokens(keep, s)
        held = torch.where(exists, held.gather(1, order), torch.iinfo(held.dtype).max)
    start = _block_start(positions.queries, held[:, :1], size)
    first = torch.searchsorted(held.contiguous(), start - reach)
    place = first[:, :, None] + torch.arange(size + 2 * reach, device=held.device)
    near, place = place < s, place.clamp(max=s - 1)
    flat = place.flatten(1)
    near = near & (held.gather(1, flat).view(place.shape) < start[:, :, None] + size + reach)
    if order is not None and exists is not None:
        near = near & exists.gather(1, flat).view(place.shape)
        place = order.gather(1, flat).view(place.shape)
    return _Windows(place, near)


def _block_start(x: Int[Tensor, "b n"], origin: Int[Tensor, "b 1"], size: int) -> Int[Tensor, "b n"]:
    return origin + (x - origin).div(size, rounding_mode="floor") * size


def _attend(
    q: Float[Tensor, "b h c d"],
    place: Int[Tensor, "b c w"],
    near: Bool[Tensor, "b c w"],
    k: Float[Tensor, "b h s d"],
    v: Float[Tensor, "b h s e"],
    keys: Float[Tensor, "b h g_and_m d"],
    values: Float[Tensor, "b h g_and_m e"],
    bias: Float[Tensor, "b h 1 g"],
    count: Float[Tensor, "b h m"],
    cluster: Int[Tensor, "b h s"],
    scale: float,
) -> Float[Tensor, "b h c e"]:
    """A stretch of queries."""
    (b, h, c), w, m, g = q.shape[:3], place.shape[2], count.shape[2], bias.shape[3]
    rows = place.flatten(1)[:, None].expand(b, h, c * w)
    near_k, near_v = (take_rows(x, rows).unflatten(2, (c, w)) for x in (k, v))
    # A near key of no cluster is heavy, and counts there.
    inside = torch.where(near[:, None], cluster.gather(2, rows).unflatten(2, (c, w)), m)
    taken = count.new_zeros(b, h, c, m + 1).scatter_add(3, inside, torch.ones_like(near_k[..., 0]))[..., :m]
    left = count[:, :, None] - taken
    scores = scale * (near_k @ q[..., None])[..., 0]
    shared = scale * (q @ keys.mT) + torch.cat([bias.expand(b, h, c, g), left.log()], dim=3)
    scores = torch.cat([scores.masked_fill(inside == m, -torch.inf), shared], dim=3)
    near_weights, heavy, far = scores.softmax(dim=-1).split([w, g, m], dim=3)
    far = far / left.clamp(min=1)
    near_weights = near_weights - F.pad(far, (0, 1)).gather(3, inside)
    return (near_weights[..., None, :] @ near_v)[..., 0, :] + torch.cat([heavy, far], dim=3) @ values
