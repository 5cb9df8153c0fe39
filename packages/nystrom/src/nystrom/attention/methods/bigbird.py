r"""BigBird: block-sparse softmax attention to a window, random blocks and two global blocks.

The tokens from the first real one to the last are cut into L blocks of `block_size`; the last may be partly filled.
Blocks 0 and L - 1 are global. A query of block i attends to the real keys of the blocks
$$\{i - 1, i, i + 1\} \cup \{0, L - 1\} \cup R_i \quad (0 < i < L - 1), \qquad \text{all} \quad (i = 0, L - 1),$$
each once, under one softmax. Padding at either end changes nothing; holes inside count as positions.

**Random blocks.** The a blocks that are neither global nor in the window of block i are cut, in order, into r =
`num_random_blocks` segments $[\lceil t a / r \rceil, \lceil (t + 1) a / r \rceil)$ whose lengths differ by one at most,
and $R_i$ takes one block of each, at position $\lfloor u\, \mathrm{length} \rfloor$: no block is drawn twice, and with
$a \le r$ all are taken. The number u in [0, 1) is
$$u = 2^{-32}\, \mathrm{mix}(\mathrm{mix}(\lfloor 2^{24} D \rfloor) \oplus i),$$
D being the draw of this head and segment, and mix the 32-bit hash in `_mix`. So there are h r draws for any n, and
each block has its own random blocks.

**Exact limit.** With $L \le r + 4$ blocks every query attends to all of them: exact attention.

Source: Zaheer et al. (2020), arXiv:2007.14062, section 2 and appendix D (the ITC form).
Departs from the authors' code: random blocks depend on L alone, not on tables made for certain lengths; they are random
in evaluation as well, where theirs are all block 0; n need not be a multiple of the block size and has no minimum;
blocks count from the first real token to the last, so that the last global block is never padding.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nystrom.attention.entry import SELF_ATTENTION, attend
from nystrom.attention.fused import bias_of, fused_softmax
from nystrom.attention.options import BigBirdOptions, documented
from nystrom.attention.parts.band import (
    attend_blocks,
    attend_globally,
    from_first_real,
    pad_to_blocks,
    windows,
    without_padding,
)
from nystrom.landmarks import draw, take
from nystrom.shapes import Generator, Group, Masks, check_generator, cut_blocks, is_number, score_scale, zero_masked


@documented(BigBirdOptions)
def bigbird_attention(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    v: Float[Tensor, "b h s e"],
    *,
    block_size: int = 64,
    num_random_blocks: int = 3,
    scale: float | None = None,
    keep: Bool[Tensor, "b n"] | None = None,
    cu_seqlens: Int[Tensor, " ends"] | None = None,
    generator: Generator = None,
    group: Group = None,
) -> Float[Tensor, "b h n e"]:
    """Attend to a window, random and global blocks, in time and memory linear in n. Self-attention only.

    Args:
        **usual: Tensors, masks, generator, group and `BigBirdOptions`.
    """
    check_generator(generator)
    options = BigBirdOptions(block_size=block_size, num_random_blocks=num_random_blocks, scale=scale)
    return attend(
        _bigbird,
        q,
        k,
        v,
        Masks(keep, cu_seqlens=cu_seqlens),
        options,
        generator,
        same_tokens=f"bigbird is {SELF_ATTENTION}",
        group=group,
    )


def _bigbird(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h n d"],
    v: Float[Tensor, "b h n e"],
    keep: Bool[Tensor, "b n"] | None,
    query_keep: Bool[Tensor, "b n"] | None,
    options: BigBirdOptions,
    generator: Generator,
) -> Float[Tensor, "b h n e"]:
    (h, n), size, r = q.shape[1:3], options.block_size, options.num_random_blocks
    if is_number(n) and n <= (r + 4) * size:
        return fused_softmax(q, k, v, keep=keep, scale=options.scale)
    draws = draw(h * r, generator, q.device)
    scale = score_scale(q, options.scale)
    if keep is None:
        q, k, v = (pad_to_blocks(x, size) for x in (q, k, v))
        real = (torch.arange(q.shape[2], device=q.device) < n)[None].expand(q.shape[0], -1)
        first, span = None, real.sum(-1)
    else:
        positions, real, first, span = from_first_real(keep, size)
        q, k, v = (zero_masked(take(x, positions), real) for x in (q, k, v))
    count = (span + size - 1) // size
    drawn, exists = _random_blocks(draws.view(h, r), count, torch.arange(q.shape[2] // size, device=q.device))

    def reach(x: Tensor, head: int, drawn: Tensor, count: Tensor) -> Tensor:
        return _keys(x, drawn[:, head], count, size)

    bias = bias_of(_may(real, drawn, exists, count, size), q.dtype)
    out = attend_blocks(q, k, v, reach, bias, drawn, count, size=size, scale=scale, copies=True)
    place, named = _global_tokens(count, size)
    out = attend_globally(out, q, k, v, place, named, keep=real, scale=scale)
    if keep is None or first is None:
        return without_padding(out, n)
    back = (torch.arange(n, device=q.device) - first[:, None]).clamp(min=0)
    return take(out, back)


def _random_blocks(
    draws: Float[Tensor, "h r"], count: Int[Tensor, " b"], row: Int[Tensor, " l"]
) -> tuple[Int[Tensor, "b h l r"], Bool[Tensor, "b h l r"]]:
    """The random blocks of each block (row), and which of them exist; those of global blocks are meaningless."""
    r = draws.shape[1]
    hashed = _mix(_mix((draws * 2**24).long())[:, None] ^ row[:, None])
    low = (row - 1).clamp(min=1)
    high = torch.minimum(row + 1, count[:, None] - 2)
    inside = high - low + 1
    free = (count[:, None] - 2 - inside).clamp(min=0)[:, None, :, None]
    edge = torch.arange(r + 1, device=draws.device) * free
    edge = (edge + r - 1) // max(r, 1)
    length = edge.diff(dim=-1)
    rank = 1 + edge[..., :-1] + (hashed * length >> 32)
    # The window lies between the free blocks.
    chosen = rank + torch.where(rank >= low[:, None], inside[:, None, :, None], 0)
    return chosen.clamp(min=0, max=row.shape[0] - 1), (length > 0).expand_as(chosen)


def _mix(x: Int[Tensor, "*a"]) -> Int[Tensor, "*a"]:
    """Hash 32-bit numbers to 32-bit numbers; no product exceeds 2^63."""
    for _ in range(2):
        x = ((x >> 16) ^ x) * 0x45D9F3B & 0xFFFFFFFF
    return (x >> 16) ^ x


def _keys(
    x: Float[Tensor, "b t d"], drawn: Int[Tensor, "b l r"], count: Int[Tensor, " b"], size: int
) -> Float[Tensor, "b l k d"]:
    """The first block, the last, the window and the random ones of each block."""
    b, t, d = x.shape
    blocks = cut_blocks(x, size)
    last = (count - 1).clamp(min=0)[:, None, None, None].expand(-1, 1, size, d)
    ends = torch.cat([blocks[:, :1], blocks.gather(1, last)], dim=1).flatten(1, 2)
    parts = [ends[:, None].expand(-1, t // size, -1, -1), windows(x, size, size)]
    if drawn.shape[2]:
        row = torch.arange(b, device=x.device)[:, None, None]
        if is_number(t):
            # Faster than indexing on a CPU, but such a view does not accept a symbolic length.
            index = (drawn + row * (t // size)).flatten()
            parts.append(blocks.flatten(2).flatten(0, 1).index_select(0, index).view(b, t // size, -1, d))
        else:
            parts.append(blocks[row, drawn].flatten(2, 3))
    return torch.cat(parts, dim=2)


def _may(
    real: Bool[Tensor, "b t"],
    drawn: Int[Tensor, "b h l r"],
    exists: Bool[Tensor, "b h l r"],
    count: Int[Tensor, " b"],
    size: int,
) -> Bool[Tensor, "b h l 1 k"]:
    """Which of `_keys` a block may attend to: real keys, each once."""
    b, h, length = drawn.shape[:3]
    row = torch.arange(length, device=real.device)
    last = count[:, None] - 1
    blocks = cut_blocks(real, size)
    ends = torch.stack([blocks[:, 0], blocks[torch.arange(b, device=real.device), last[:, 0].clamp(min=0)]], dim=1)
    between = (row > 0) & (row < last)
    window = windows((blocks & between[..., None]).flatten(1)[..., None], size, size)[..., 0]
    fixed = torch.cat([ends.flatten(1)[:, None].expand(-1, length, -1), window], dim=2)[:, None].expand(-1, h, -1, -1)
    rows = torch.arange(b, device=real.device)[:, None, None, None]
    may = torch.cat([fixed, (blocks[rows, drawn] & exists[..., None]).flatten(3)], dim=3)
    # Blocks beyond the last have nothing, and softmax over nothing may be NaN; their results are dropped.
    return (may | ~may.any(dim=-1, keepdim=True))[:, :, :, None]


def _global_tokens(count: Int[Tensor, " b"], size: int) -> tuple[Int[Tensor, "b g"], Bool[Tensor, "b g"]]:
    """Positions in the first block and the last, and which of them count: a single block counts once."""
    here = torch.arange(size, device=count.device)
    last = (count - 1).clamp(min=0)[:, None] * size + here
    positions = torch.cat([here.expand_as(last), last], dim=1)
    named = torch.cat([torch.ones_like(last, dtype=torch.bool), (count > 1)[:, None].expand_as(last)], dim=1)
    return positions, named
