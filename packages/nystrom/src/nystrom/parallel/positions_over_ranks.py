"""Positions of a rank's tokens among those of all ranks.

Each rank holds a piece of every sequence: the pieces follow one another in the order of the ranks, and may have any
size, including zero. Only the order of real tokens matters, as in `nystrom.landmarks`: their numbering (`order`)
continues from one piece to the next.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nystrom.landmarks import group_sums
from nystrom.parallel.communication import Ranks
from nystrom.precision import accumulator


@dataclass(frozen=True, eq=False)
class Tokens:
    """The queries or keys of all ranks, as this one sees them.

    A rank without tokens gets one padding token, so that no operation meets an empty axis.
    """

    lengths: tuple[int, ...]  # Tokens of each rank
    start: int  # Position of this rank's first token
    keep: Bool[Tensor, "b n"]  # Real tokens of this rank
    # Number of real tokens before each token in its sequence, across all ranks; meaningless for padding
    order: Int[Tensor, "b n"]
    count: Int[Tensor, " b"]  # Real tokens of each sequence, on all ranks
    first: Int[Tensor, " b"]  # Position of the first real token; the total number of tokens if there is none
    whole: bool  # Whether every token of every rank is real

    @property
    def total(self) -> int:
        """Tokens of all ranks."""
        return sum(self.lengths)


def find_tokens(
    ranks: Ranks, lengths: Sequence[int], keep: Bool[Tensor, "b n"] | None, batch: int, device: torch.device
) -> Tokens:
    """Find the positions of this rank's tokens, by the tokens of each and their mask, given on all ranks or on none."""
    start, n, total = sum(lengths[: ranks.rank]), lengths[ranks.rank], sum(lengths)
    here = torch.arange(max(n, 1), device=device)
    real = (here < n).expand(batch, -1)
    if keep is None:
        count = torch.full((batch,), total, device=device)
        order = (start + here).expand(batch, -1).contiguous()
        return Tokens(tuple(lengths), start, real, order, count, torch.zeros_like(count), True)
    real = keep if n else real
    first = torch.where(real, start + here, total).amin(dim=-1)
    counts, firsts = ranks.gather(torch.stack([real.sum(dim=-1), first])).unbind(1)
    order = counts[: ranks.rank].sum(dim=0)[:, None] + real.cumsum(dim=-1) - 1
    return Tokens(tuple(lengths), start, real, order, counts.sum(dim=0), firsts.amin(dim=0), False)


def take(
    ranks: Ranks, tokens: Tokens, x: Float[Tensor, "b h n d"], wanted: Int[Tensor, "b r"]
) -> Float[Tensor, "b h r d"]:
    """The real tokens whose order is `wanted`, from all ranks; zeros if there are not that many."""
    place, exists = find(tokens, wanted)
    index = place[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[-1])
    return ranks.sum(torch.where(exists[:, None, :, None], x.gather(2, index), 0.0))


def find(tokens: Tokens, wanted: Int[Tensor, "b r"]) -> tuple[Int[Tensor, "b r"], Bool[Tensor, "b r"]]:
    """Local positions of real tokens, by their order, and which of them this rank holds."""
    # The order never decreases, and the first token with a given order is the real one.
    place = torch.searchsorted(tokens.order, wanted.contiguous()).clamp(max=tokens.order.shape[1] - 1)
    return place, (tokens.order.gather(1, place) == wanted) & tokens.keep.gather(1, place)


def take_first(ranks: Ranks, tokens: Tokens, x: Float[Tensor, "b h n d"], m: int) -> Float[Tensor, "b h m d"]:
    """The first m real tokens, and zeros after the last."""
    return take(ranks, tokens, x, torch.arange(m, device=x.device).expand(len(x), -1))


def segment_means(ranks: Ranks, tokens: Tokens, x: Float[Tensor, "b h n d"], m: int) -> Float[Tensor, "b h m d"]:
    """`nystrom.landmarks.segment_means` of the real tokens of all ranks; at most m tokens are their own means."""
    if tokens.whole and tokens.total % m == 0 and tokens.lengths[ranks.rank]:
        # Both ways exchange the same tensors, so ranks may choose differently.
        return _joined_means(ranks, *_equal_segments(x, tokens.start, tokens.total // m, m))[0]
    count = tokens.count[:, None]
    segment = torch.where(tokens.keep, tokens.order * count.clamp(max=m) // count.clamp(min=1), m)
    return means_of(ranks, x, segment, m)[0]


def means_of(
    ranks: Ranks, x: Float[Tensor, "b h n d"], groups: Int[Tensor, "b n"], m: int
) -> tuple[Float[Tensor, "b h m d"], Float[Tensor, "b m"]]:
    """Mean of the tokens of each group across all ranks, zero for an empty group, and how many tokens it has."""
    return _joined_means(ranks, *group_sums(x, groups, m))


def _joined_means(
    ranks: Ranks, sums: Float[Tensor, "b h m d"], sizes: Float[Tensor, "b m"]
) -> tuple[Float[Tensor, "b h m d"], Float[Tensor, "b m"]]:
    wide = sizes[:, None, :, None].expand(-1, sums.shape[1], -1, 1)
    sums = ranks.sum(torch.cat([sums, wide], dim=-1))
    sizes = sums[:, 0, :, -1].detach()
    return sums[..., :-1] / sizes.clamp(min=1)[:, None, :, None], sizes


def _equal_segments(
    x: Float[Tensor, "b h n d"], start: int, length: int, m: int
) -> tuple[Float[Tensor, "b h m d"], Float[Tensor, "b m"]]:
    """`group_sums` of tokens from position `start` on, for segments of equal length, without slow indexing."""
    n, dtype = x.shape[2], accumulator(x.dtype)
    head = min(n, -start % length)
    whole = (n - head) // length
    begun, middle, rest = x.split([head, whole * length, n - head - whole * length], dim=2)
    parts = [part.sum(dim=2, keepdim=True, dtype=dtype) for part in (begun, rest) if part.shape[2]]
    parts.insert(bool(head), middle.unflatten(2, (whole, length)).sum(dim=3, dtype=dtype))
    sums = torch.cat(parts, dim=2)
    before = start // length
    edges = torch.arange(m, device=x.device) * length
    sizes = ((edges + length).clamp(max=start + n) - edges.clamp(min=start)).clamp(min=0)
    return F.pad(sums, (0, 0, before, m - before - sums.shape[2])), sizes.to(dtype).expand(len(x), -1)
