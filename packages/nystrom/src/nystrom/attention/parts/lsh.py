r"""Locality-sensitive hashing of tokens in rounds, and which keys a query may attend to in each round.

With a random Gaussian matrix $R$ (d x B/2), a token's bucket is $h(x) = \arg\max\,[xR; -xR]$, one of B: the closer the
directions of two tokens, the more likely they share a bucket. In each round, the real tokens are sorted by bucket, then
by position, and cut into chunks of m. A query has 2 m keys in reach, and may attend to those in its own bucket. Among
the sorted keys, a bucket is an interval, and so is the reach; so a query may attend to one interval of places, from
`low` to `high`.

Masked tokens are in no bucket and are sorted after all others, so chunks depend only on the ranks of real tokens.

Source: Andoni et al. (2015), arXiv:1509.02897; used for attention by Kitaev et al. (2020), arXiv:2001.04451.
"""

from statistics import NormalDist
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nystrom.landmarks import GOLDEN_RATIO, insertion_points
from nystrom.precision import at_least_float32
from nystrom.shapes import cut_blocks, is_number

# Directions compared with the tokens at a time; all together would take n x B/2 numbers.
_COLUMNS = 16


class HashRounds(NamedTuple):
    """Which keys each query may attend to in r rounds.

    A row is one of the t tokens of all sequences and heads, which are cut into g chunks.
    """

    queries: Int[Tensor, "r g m"]  # Row of each query of a chunk; places past the end repeat some row
    keys: Int[Tensor, "r g w"]  # Row of each key in reach of a chunk; places outside the sequence repeat some row
    # Place of the first key in reach among the sorted keys of its sequence; negative before the first key
    first: Int[Tensor, "r g"]
    low: Int[Tensor, "r g m"]  # First place that a query may attend to
    high: Int[Tensor, "r g m"]  # The place after the last; `low` or less if there is none
    spots: Int[Tensor, "r t"]  # Index of a row's query among the queries of all chunks
    places: Int[Tensor, "r t"]  # Place of a row's key among the sorted keys of its sequence

    def allowed(self, r: int, part: slice) -> Bool[Tensor, "p m w"]:
        """Which keys in reach a query may attend to in round r but in no earlier round."""
        rows, keys = self.queries[r, part], self.keys[r, part]
        places = self.first[r, part, None] + torch.arange(keys.shape[-1], device=keys.device)
        allowed = _within(places, self.low[r, part], self.high[r, part])
        for earlier in range(r):
            spots = self.spots[earlier][rows]
            low, high = (x[earlier].flatten()[spots] for x in (self.low, self.high))
            allowed = allowed & ~_within(self.places[earlier][keys], low, high)
        return allowed


def hash_buckets(
    x: Float[Tensor, "b h n d"], rotation: Float[Tensor, "h d half"], keep: Bool[Tensor, "b n"] | None
) -> Int[Tensor, "b h n"]:
    """Bucket of each token, one of 2 * half, or 0 if half is 0; masked tokens have the number after the last."""
    half = rotation.shape[-1]
    number = torch.zeros(x.shape[:3], dtype=torch.long, device=x.device)
    x = at_least_float32(x)
    largest = torch.full_like(x[..., 0], -1.0)
    for start in range(0, half, _COLUMNS):
        turned = x @ rotation[..., start : start + _COLUMNS].to(x.dtype)
        place = turned.abs().argmax(dim=-1, keepdim=True)
        value = turned.gather(-1, place)[..., 0]
        place = place[..., 0] + torch.where(value < 0, start + half, start)
        number = torch.where(value.abs() > largest, place, number)
        largest = torch.maximum(value.abs(), largest)
    return number if keep is None else torch.where(keep[:, None], number, max(2 * half, 1))


def even_rotations(shape: tuple[int, int, int, int], device: torch.device) -> Float[Tensor, "r h d half"]:
    """Gaussian numbers that are not random, used if no random rotations are given.

    They are the quantiles at the fractional parts of i^2 times the golden ratio; with i instead of i^2, rows would be
    similar.
    """
    count = shape[0] * shape[1] * shape[2] * shape[3]
    if torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling():
        # Write the numbers as constants: ONNX has no quantile function.
        quantile = NormalDist().inv_cdf
        numbers = [min(max(quantile(i * (i * GOLDEN_RATIO % 1) % 1), -8), 8) for i in range(1, count + 1)]
        return torch.tensor(numbers, dtype=torch.float32, device=device).reshape(shape)
    i = torch.arange(1, count + 1, device=device, dtype=torch.float64)
    return torch.special.ndtri(i * (i * GOLDEN_RATIO % 1) % 1).clamp(-8, 8).float().reshape(shape)


def plan_rounds(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h n d"] | None,
    rotations: Float[Tensor, "r h d half"],
    *,
    keep: Bool[Tensor, "b n"] | None,
    chunk_size: int,
    across_buckets: bool,
) -> HashRounds:
    """Hash, sort and cut into chunks of m tokens, once for each rotation, one for each round and head.

    Keys are sorted separately from the queries, unless they are None. With `across_buckets` a query may attend to all
    of its reach.
    """
    rounds = []
    for rotation in rotations:
        queries = _sort(hash_buckets(q, rotation, keep), 2 * rotation.shape[-1])
        keys = queries if k is None else _sort(hash_buckets(k, rotation, keep), 2 * rotation.shape[-1])
        rounds.append(_plan_round(queries, keys, chunk_size, across_buckets))
    return HashRounds(*(torch.stack(x) for x in zip(*rounds, strict=True)))


class _Sorted(NamedTuple):
    buckets: Int[Tensor, "l n"]
    order: Int[Tensor, "l n"]
    edges: Int[Tensor, "l edges"]  # the first place of each bucket; the last one is the number of real tokens


def _sort(number: Int[Tensor, "b h n"], count: int) -> _Sorted:
    buckets, order = number.flatten(0, 1).sort(dim=-1, stable=True)
    # Added rather than expanded: the search needs contiguous rows, also under torch.func.vmap.
    wanted = torch.zeros_like(buckets[:, :1]) + torch.arange(max(count, 1) + 1, device=number.device)
    return _Sorted(buckets, order, insertion_points(buckets, wanted))


def _plan_round(queries: _Sorted, keys: _Sorted, m: int, across_buckets: bool) -> tuple[Tensor, ...]:
    lines, n = queries.order.shape
    device, last = queries.order.device, queries.edges.shape[1] - 1
    # An export branches on whether there is more than one chunk; an extra empty one makes it true for any n.
    chunks = (n + m - 1) // m + (0 if is_number(n) else 1)
    line = torch.arange(lines, device=device)[:, None]
    order = F.pad(queries.order, (0, chunks * m - n))
    bucket = F.pad(queries.buckets, (0, chunks * m - n), value=last)
    own = bucket.clamp(max=last - 1)
    # The place of a chunk among the keys: the place of its first query within its bucket.
    head, start = own[:, ::m], torch.arange(chunks, device=device) * m
    if keys is queries:
        anchor = start.expand(lines, -1)
    else:
        base, behind = keys.edges.gather(1, head), keys.edges.gather(1, head + 1)
        anchor = torch.minimum(base + start - queries.edges.gather(1, head), behind)
    first = anchor - m
    reach = first[..., None] + torch.arange(2 * m, device=device)
    key_rows = keys.order.gather(1, reach.flatten(1).clamp(0, n - 1)) + line * n
    low, high = (cut_blocks(keys.edges.gather(1, own + i), m) for i in (0, 1))
    if across_buckets:
        low, high = torch.zeros_like(low), keys.edges[:, -1:, None].expand_as(high)
    low, high = torch.maximum(low, first[..., None]), torch.minimum(high, first[..., None] + 2 * m)
    high = torch.where(cut_blocks(bucket < last, m), high, 0)
    here = torch.arange(n, device=device).expand(lines, -1)
    spots = torch.empty_like(here).scatter(1, queries.order, here) + line * (chunks * m)
    places = torch.empty_like(here).scatter(1, keys.order, here)
    rows = cut_blocks(order + line * n, m).flatten(0, 1)
    key_rows = cut_blocks(key_rows, 2 * m).flatten(0, 1)
    return rows, key_rows, first.flatten(), low.flatten(0, 1), high.flatten(0, 1), spots.flatten(), places.flatten()


def _within(places: Int[Tensor, "p w"], low: Int[Tensor, "p m"], high: Int[Tensor, "p m"]) -> Bool[Tensor, "p m w"]:
    return (places[:, None] >= low[..., None]) & (places[:, None] < high[..., None])
