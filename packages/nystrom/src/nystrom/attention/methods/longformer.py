r"""Longformer: softmax attention within a sliding window, with a few global tokens.

With $w = (\text{window} - 1) / 2$ and the set G of global tokens, query i attends to
$$\{\, j : |i - j| \le w \,\} \cup G \quad (i \notin G), \qquad \text{all } j \quad (i \in G),$$
real tokens only, each once, under one softmax. Positions are relative, so padding at either end changes nothing; holes
inside count as positions. The global tokens are the first `num_global` real ones of each sequence.

Blocks of queries attend to the tokens around them in one fused call per head, masked to the band: no score is stored,
and without global tokens no key is copied. The bias of the band, which heads share, takes about `window` numbers per
token. If that is more than the tokens themselves take, and all are real, the blocks away from both ends share one bias.

**Exact limit.** With a window of 2 n - 1 or more, or n global tokens, this is exact attention.

Source: Beltagy et al. (2020), arXiv:2004.05150, section 3.1.
Departs from the authors' code: `window` is the full odd width (their `attention_window` is window - 1), n need not
be a multiple of it, dilation is left out, and global tokens use the same queries, keys and values as the others: a
second set of projections would belong to the layer that projects.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nystrom.attention.entry import SELF_ATTENTION, attend
from nystrom.attention.fused import bias_of, fused_softmax
from nystrom.attention.options import LongformerOptions, documented
from nystrom.attention.parts.band import (
    attend_blocks,
    attend_globally,
    pad_to_blocks,
    windows,
    without_padding,
)
from nystrom.landmarks import first_tokens, real_index
from nystrom.shapes import Group, Masks, is_number, score_scale

# Queries of a block: more of them waste more keys outside the band, fewer make matrix products small.
_MOST, _LEAST = 64, 8


@documented(LongformerOptions)
def longformer_attention(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    v: Float[Tensor, "b h s e"],
    *,
    window: int = 257,
    num_global: int = 0,
    scale: float | None = None,
    keep: Bool[Tensor, "b n"] | None = None,
    cu_seqlens: Int[Tensor, " ends"] | None = None,
    group: Group = None,
) -> Float[Tensor, "b h n e"]:
    """Attend within a sliding window and to global tokens, in time and memory linear in n. Self-attention only.

    Args:
        **usual: Tensors, masks, group and `LongformerOptions`.
    """
    options = LongformerOptions(window=window, num_global=num_global, scale=scale)
    return attend(
        _longformer,
        q,
        k,
        v,
        Masks(keep, cu_seqlens=cu_seqlens),
        options,
        same_tokens=f"longformer is {SELF_ATTENTION}",
        group=group,
    )


def _longformer(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h n d"],
    v: Float[Tensor, "b h n e"],
    keep: Bool[Tensor, "b n"] | None,
    query_keep: Bool[Tensor, "b n"] | None,
    options: LongformerOptions,
) -> Float[Tensor, "b h n e"]:
    n, g, half = q.shape[2], options.num_global, options.window // 2
    if is_number(n) and (half >= n - 1 or g >= n):
        return fused_softmax(q, k, v, keep=keep, scale=options.scale)
    scale, size = score_scale(q, options.scale), block_size_of(half)
    # One bias for most windows takes two more calls a head: worth it where all biases are more than the tokens.
    known = keep is None and not g and all(is_number(axis) for axis in k.shape)
    if known and size + 2 * half > k.shape[0] * k.shape[1] * k.shape[3]:
        return _attend_to_windows(q, k, v, half, size, scale)
    real = torch.ones(1, n, dtype=torch.bool, device=q.device) if keep is None else keep
    positions, present = first_tokens(real, g)
    positions, present = (x.expand(q.shape[0], -1) for x in (positions, present))

    def reach(x: Tensor, head: int, positions: Tensor) -> Tensor:
        return keys_around(x, positions, size, half)

    bias = band_of(real & (real_index(real)[0] >= g), g, size, half, q.dtype)
    padded_q, padded_k, padded_v = (pad_to_blocks(x, size) for x in (q, k, v))
    out = attend_blocks(padded_q, padded_k, padded_v, reach, bias, positions, size=size, scale=scale, copies=g > 0)
    out = without_padding(out, n)
    if g:
        out = attend_globally(out, q, k, v, positions, present, keep=keep, scale=scale)
    return out


def _attend_to_windows(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h n d"],
    v: Float[Tensor, "b h n e"],
    half: int,
    size: int,
    scale: float,
) -> Float[Tensor, "b h n e"]:
    """Attention if all tokens are real and none is global: all windows except those at the ends share one bias."""
    n, wide = q.shape[2], size + 2 * half
    q = pad_to_blocks(q, size)
    blocks = q.shape[2] // size
    # The blocks from `first` to before `last` see no end.
    first = min(-(-half // size), blocks)
    last = max(first, (n - half) // size)
    around = half, half + q.shape[2] - n
    k, v = (F.pad(x, (0, 0, *around)) for x in (k, v))
    real = F.pad(torch.ones(1, n, dtype=torch.bool, device=q.device), around)

    def reach(x: Tensor, head: int) -> Tensor:
        return x.unfold(1, wide, size).mT

    out = []
    for start, stop in ((0, first), (first, last), (last, blocks)):
        if start < stop:
            some, shown = (slice(start * size, (end - 1) * size + wide) for end in (stop, start + 1))
            bias = _bias(
                real[:, shown if (start, stop) == (first, last) else some, None].unfold(1, wide, size),
                size,
                half,
                q.dtype,
            )
            queries = q[:, :, start * size : stop * size]
            tokens = queries, k[:, :, some], v[:, :, some]
            out.append(attend_blocks(*tokens, reach, bias[:, None], size=size, scale=scale, copies=False))
    return torch.cat(out, dim=2)[:, :, :n]


def block_size_of(half: int) -> int:
    """Queries of a block, for half a window."""
    return max(_LEAST, min(half, _MOST))


def keys_around(
    x: Float[Tensor, "b t d"], positions: Int[Tensor, "b g"], size: int, half: int
) -> Float[Tensor, "b l k d"]:
    """The global tokens, then the tokens around each block."""
    around = windows(x, size, half)
    if not positions.shape[1]:
        return around
    chosen = x.gather(1, positions[..., None].expand(-1, -1, x.shape[-1]))
    return torch.cat([chosen[:, None].expand(-1, around.shape[1], -1, -1), around], dim=2)


def band_of(
    others: Bool[Tensor, "b n"], g: int, size: int, half: int, dtype: torch.dtype
) -> Float[Tensor, "b 1 l c k"]:
    """The bias of each query of a block on `keys_around`: 0 for g global tokens and for the others of its window."""
    bias = _bias(windows(pad_to_blocks(others[..., None], size), size, half).mT, size, half, dtype)
    # With fewer than g real tokens all of them are global, and all of these results are replaced.
    return F.pad(bias, (g, 0))[:, None] if g else bias[:, None]


def _bias(others: Bool[Tensor, "b l 1 k"], size: int, half: int, dtype: torch.dtype) -> Float[Tensor, "b l c k"]:
    offset = torch.arange(size + 2 * half, device=others.device) - torch.arange(size, device=others.device)[:, None]
    # The sum alone has n k numbers: masks of that size would take more than the bias itself.
    bias = bias_of(others, dtype) + bias_of((offset >= 0) & (offset <= 2 * half), dtype)
    # A query always attends to itself: one that is not real may have no other key, and softmax over none may be NaN.
    return bias.masked_fill_(offset == half, 0)
