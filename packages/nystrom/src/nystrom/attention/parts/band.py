r"""Attention of each query to a few keys around it and a few chosen ones, in memory linear in n.

Queries are cut into blocks of `size` tokens. Block l attends to K keys: the same ones for all of its queries, apart
from a bias of 0 or -inf.

- `moved_tokens` lets the first real token of each sequence begin a block.
- `windows` gives each block the tokens around it without copying them.
- `attend_blocks` attends to the keys that a method gathers.
- `attend_globally` lets some queries attend to all keys, and inserts their results among the others.

Scores exist only inside a fused call. Copies of keys, several times n of them, exist for one head of each thread at a
time; they are not kept for the backward pass, which copies the keys and attends again.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils.checkpoint import checkpoint

from nystrom.attention.fused import fused_softmax
from nystrom.attention.options import NearFarOptions
from nystrom.attention.parts.by_heads import by_heads
from nystrom.attention.parts.clusters import Chosen, take_rows
from nystrom.autograd_modes import pull_back
from nystrom.landmarks import take
from nystrom.shapes import cut_blocks, is_number

Reach = Callable[..., Tensor]


def pad_to_blocks(x: Shaped[Tensor, "*b n d"], size: int) -> Shaped[Tensor, "*b t d"]:
    """Add zeros after the tokens, up to a whole number of blocks.

    A symbolic length gets up to two blocks more than it needs: the exact number would depend on the length, which an
    exported program cannot branch on.
    """
    n = x.shape[-2]
    if statically_known_true(n % size == 0):
        return x
    blocks = -(-n // size) if is_number(n) else n // size + 2
    return F.pad(x, (0, 0, 0, blocks * size - n))


def without_padding(x: Shaped[Tensor, "b h t d"], n: int) -> Shaped[Tensor, "b h n d"]:
    """The first n tokens; unlike a slice, this does not compare a symbolic length with the number of tokens."""
    return x[:, :, :n] if is_number(n) else x.index_select(2, torch.arange(n, device=x.device))


def from_first_real(
    keep: Bool[Tensor, "b n"], size: int
) -> tuple[Int[Tensor, "b t"], Bool[Tensor, "b t"], Int[Tensor, " b"], Int[Tensor, " b"]]:
    """Positions that move the first real token to the front, which of them are real, its position, and the span."""
    n = keep.shape[1]
    here = torch.arange(n, device=keep.device)
    first = torch.where(keep, here, n).amin(-1)
    span = (torch.where(keep, here, -1).amax(-1) + 1 - first).clamp(min=0)
    place = torch.arange(pad_to_blocks(keep[..., None], size).shape[1], device=keep.device)
    positions = (first[:, None] + place).clamp(max=n - 1)
    return positions, keep.gather(1, positions) & (place < span[:, None]), first, span


class MovedTokens(NamedTuple):
    """Tokens of self-attention, one head per row, the first real one at the begin of a block, in whole blocks."""

    q: Float[Tensor, "r t d"]
    k: Float[Tensor, "r t d"]
    v: Float[Tensor, "r t e"]
    real: Bool[Tensor, "r t"] | None  # True for a real query; None if the caller does not need it
    chosen: Chosen
    first: Int[Tensor, " r"] | None  # The first real token of each row; None if no token has moved


def moved_tokens(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h n d"],
    v: Float[Tensor, "b h n e"],
    keep: Bool[Tensor, "b n"] | None,
    chosen: Chosen,
    options: NearFarOptions,
) -> MovedTokens:
    """Move the tokens; queries, keys and values are zeros where they are not real."""
    (b, h, n), size, m = q.shape[:3], options.block_size, options.num_clusters
    q, k, v, heavy, exists, cluster = (x.flatten(0, 1) for x in (q, k, v, *chosen))
    if keep is None:
        real = pad_to_blocks(torch.ones_like(cluster, dtype=torch.bool)[..., None], size)[..., 0]
        q, k, v = (pad_to_blocks(x, size) for x in (q, k, v))
        cluster = pad_to_blocks((cluster - m)[..., None], size)[..., 0] + m
        return MovedTokens(q, k, v, real if options.num_selected else None, Chosen(heavy, exists, cluster), None)
    row = torch.arange(b * h, device=q.device) // h
    positions, real, first, _ = (x[row] for x in from_first_real(keep, size))
    q, k, v = (torch.where(real[..., None], take_rows(x, positions), 0.0) for x in (q, k, v))
    cluster = torch.where(real, cluster.gather(1, positions), m)
    heavy = (heavy - first[:, None]).clamp(min=0, max=n - 1)
    return MovedTokens(q, k, v, real, Chosen(heavy, exists, cluster), first)


def windows(x: Shaped[Tensor, "b t d"], size: int, half: int) -> Shaped[Tensor, "b l k d"]:
    """For each block of `size` tokens, those from `half` before it to `half` after it, a view of tokens padded by
    zeros.
    """
    return F.pad(x, (0, 0, half, half)).unfold(1, size + 2 * half, size).mT


def some_windows(x: Shaped[Tensor, "b t d"], first: int, last: int, size: int, half: int) -> Shaped[Tensor, "b l k d"]:
    """The windows of the blocks between two tokens: a whole number of blocks, which may end after the last token."""
    first, last = first - half, last + half
    piece = x[:, max(0, first) : min(x.shape[1], last)]
    if first < 0 or last > x.shape[1]:
        piece = F.pad(piece, (0, 0, max(0, -first), max(0, last - x.shape[1])))
    return piece.unfold(1, size + 2 * half, size).mT


def add_windows(whole: Shaped[Tensor, "b t d"], part: Shaped[Tensor, "b l k d"], size: int) -> None:
    """Add windows of blocks to the tokens that they cover, in place; `whole` begins where the first window does."""
    blocks, width = part.shape[1:3]
    if blocks < -(-width // size):
        for block, window in enumerate(part.unbind(1)):
            whole[:, block * size : block * size + width] += window
        return
    for start in range(0, width, size):
        # Pieces of at most a block do not overlap.
        piece = part[:, :, start : start + size]
        end = start + (blocks - 1) * size + piece.shape[2]
        whole[:, start:end].unfold(1, piece.shape[2], size).mT.add_(piece)


def attend_blocks(
    q: Float[Tensor, "b h t d"],
    k: Float[Tensor, "b h s d"],
    v: Float[Tensor, "b h s e"],
    reach: Reach,
    bias: Float[Tensor, "#b #h l #c k"],
    *tables: Shaped[Tensor, "..."],
    size: int,
    scale: float,
    copies: bool,
) -> Float[Tensor, "b h t e"]:
    """Softmax attention of each block of queries to the keys that it sees.

    Args:
        q: Queries, a whole number of blocks.
        k: Keys of the same tokens as the queries, or of more tokens on either side.
        reach: Gathers the keys or values that each block attends to (b, l, k, d), from those of one head (b, s, d), the
            number of the head, and `tables`.
        bias: 0 for the keys that a query may attend to, at least one per query, and -inf for the others; c is the
            block size, or 1 if the bias is the same for all queries of a block.
        tables: Tensors that `reach` reads, without a gradient; torch.func would not see tensors in a closure.
        copies: Whether `reach` returns a copy; the backward pass then copies again, so that no copy is kept.
    """
    d, e = q.shape[-1], v.shape[-1]
    # Fused kernels need equal widths; zeros change neither the scores nor the values.
    q, k, v = (F.pad(x, (0, max(d, e) - x.shape[-1])) if d != e else x for x in (q, k, v))
    bias = bias.expand(-1, q.shape[1], -1, -1, -1)
    if not copies or torch.compiler.is_exporting():
        attend = _attend_head
    elif torch.compiler.is_compiling():
        # A compiler traces through a checkpoint, but without gradients it rejects one around fused attention.
        attend = _attend_head_again if any(x.requires_grad for x in (q, k, v)) else _attend_head
    else:
        # torch.func does not support checkpoints, but does support an autograd Function.
        attend = _AttendHead.apply

    def some(heads: slice, *tensors: Tensor) -> Tensor:
        tokens = zip(*(x.unbind(1) for x in (*tensors, bias[:, heads])), strict=True)
        first = heads.start or 0
        return torch.stack(
            [attend(reach, head, size, scale, *each, *tables) for head, each in enumerate(tokens, first)], dim=1
        )

    return by_heads(some, q, k, v)[..., :e]


def _attend_head(
    reach: Reach,
    head: int,
    size: int,
    scale: float,
    q: Float[Tensor, "b t d"],
    k: Float[Tensor, "b s d"],
    v: Float[Tensor, "b s d"],
    bias: Float[Tensor, "#b l #c k"],
    *tables: Shaped[Tensor, "..."],
) -> Float[Tensor, "b t d"]:
    blocks = cut_blocks(q, size)
    keys, values = (reach(x, head, *tables) for x in (k, v))
    return F.scaled_dot_product_attention(blocks, keys, values, attn_mask=bias, scale=scale).flatten(1, 2)


def _attend_head_again(*args: object) -> Tensor:
    return checkpoint(_attend_head, *args, use_reentrant=False, preserve_rng_state=False)


class _AttendHead(torch.autograd.Function):
    """`_attend_head` whose backward pass copies the keys and attends again, so that nothing of these is kept."""

    generate_vmap_rule = True

    @staticmethod
    def forward(reach: Reach, head: int, size: int, scale: float, *tensors: Tensor) -> Tensor:
        return _attend_head(reach, head, size, scale, *tensors)

    @staticmethod
    def setup_context(ctx, inputs, output: Tensor) -> None:
        ctx.numbers, tensors = inputs[:4], inputs[4:]
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx, *grads: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, *fixed = ctx.saved_tensors

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return _attend_head(*ctx.numbers, q, k, v, *fixed)

        return *(None,) * 4, *pull_back(attend, (q, k, v), *grads), *(None for _ in fixed)


def attend_globally(
    out: Float[Tensor, "b h n e"],
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h n d"],
    v: Float[Tensor, "b h n e"],
    positions: Int[Tensor, "b g"],
    real: Bool[Tensor, "b g"],
    *,
    keep: Bool[Tensor, "b n"] | None,
    scale: float,
) -> Float[Tensor, "b h n e"]:
    """Replace the results of the queries at g positions, those marked `real`, with their attention to all real keys.

    No position may be marked twice; masked values are zero.
    """
    n = out.shape[2]
    rows = fused_softmax(take(q, positions), k, v, keep=keep, scale=scale)
    # Results that replace nothing are written to an extra row after the last, which is dropped.
    index = torch.where(real, positions, n)[:, None, :, None].expand_as(rows)
    return without_padding(F.pad(out, (0, 0, 0, 1)).scatter(2, index, rows), n)
