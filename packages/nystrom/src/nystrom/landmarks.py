r"""Reduce n tokens to m landmarks, per sequence and head, over real tokens only.

Only the order of real tokens matters, not their positions: the token of rank r is the r-th real one (from 0) of its
sequence, which has c real tokens. If $m \le c$, segment j holds the ranks r with $\lfloor r m / c \rfloor = j$: m
segments whose lengths differ by at most one.

- Segment means (Nyströmformer, eq. 16, whose sum should run over the l tokens of a segment and be divided by l):
  the mean of each segment.
- Uniform: one token drawn from each segment.
- k-means: Lloyd's iterations from the segment means, one of the choices compared in the supplement of Nyströmformer.

The content and number of padding tokens change nothing. If a sequence has fewer than m real tokens, some landmarks are
empty (zero): callers give such sequences exact attention instead.

**Exact limit.** A sequence is short if it has at most m real keys, or at most m real queries: then m landmarks are
enough for exact attention. `short_sequences` counts real tokens; `all_are_short` only looks at the lengths.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from nystrom.checks import check_at_least
from nystrom.native import is_worth_loops, run_landmarks, runs_natively
from nystrom.precision import accumulator, at_least_float32
from nystrom.shapes import Generator, check_generator, check_keep, check_tensor, is_number

KMEANS_STEPS = 5
# Centres count as equally near if they differ by less than this share of their mean squared distance from the middle.
_NEAR = 2**-16
# The fractional parts of its multiples are spread evenly.
GOLDEN_RATIO = 0.6180339887498949
# Tokens from which the middle is estimated.
MIDDLE_TOKENS = 8
# Distances to centres that k-means holds at a time: this many, or a quarter of the tokens' own size if that is more.
_DISTANCES = 2**14
_for_onnx = ContextVar("_for_onnx", default=False)


def real_index(keep: Bool[Tensor, "b n"]) -> tuple[Int[Tensor, "b n"], Int[Tensor, " b"]]:
    """Rank of each token among the real ones of its sequence (meaningless for the others), and their count."""
    running = keep.cumsum(dim=-1)
    return running - 1, running[:, -1]


def first_tokens(keep: Bool[Tensor, "b n"], m: int) -> tuple[Int[Tensor, "b m"], Bool[Tensor, "b m"]]:
    """Positions of the first m real tokens, and which of them exist."""
    rank, count = real_index(keep)
    slot = torch.where(keep & (rank < m), rank, m)
    here = torch.arange(keep.shape[1], device=keep.device).expand_as(slot)
    positions = here.new_zeros(keep.shape[0], m + 1).scatter(1, slot, here)[:, :m]
    return positions, torch.arange(m, device=keep.device) < count[:, None]


def insertion_points(ascending: Int[Tensor, "r n"], wanted: Int[Tensor, "r m"]) -> Int[Tensor, "r m"]:
    """For each wanted number, the first place in its row with that number or a larger one; n if there is none.

    ONNX has no search. There, the smaller numbers are counted: this gives the same places, but takes n x m comparisons.
    """
    if _is_for_onnx():
        return (ascending[:, None] < wanted[:, :, None]).sum(dim=-1)
    return torch.searchsorted(ascending, wanted)


@contextmanager
def for_onnx() -> Iterator[None]:
    """Context in which `torch.export` traces for ONNX, see `insertion_points`."""
    before = _for_onnx.set(True)
    try:
        yield
    finally:
        _for_onnx.reset(before)


def _is_for_onnx() -> bool:
    """Whether torch traces a model for ONNX: by `torch.onnx.export`, or `nystrom.models.export`."""
    if not torch.compiler.is_exporting() or torch.compiler.is_dynamo_compiling():
        return False
    return _for_onnx.get() or torch.onnx.is_in_onnx_export()


def take(x: Float[Tensor, "b h n d"], positions: Int[Tensor, "b m"]) -> Float[Tensor, "b h m d"]:
    """The tokens at the given positions of each sequence."""
    index = positions[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[-1])
    return x.gather(2, index)


def segment_means(
    x: Float[Tensor, "b h n d"], m: int, *, keep: Bool[Tensor, "b n"] | None = None
) -> Float[Tensor, "b h m d"]:
    """Mean of each of m near-equal segments of the real tokens, in float32 at least.

    Raises:
        ValueError: x does not have four axes, fewer than one landmark or more than tokens, or a mask that does not
            match.
    """
    _check(x, m, keep)
    n = x.shape[2]
    if keep is None and is_worth_loops(n) and not (torch.is_grad_enabled() and x.requires_grad) and runs_natively(x):
        means = x.new_empty(*x.shape[:2], m, x.shape[3])
        run_landmarks("means_forward", q=x, landmarks=means)
        return means
    # With symbolic lengths, a branch would give two graphs: for lengths that m divides, and for the others.
    if keep is None and statically_known_true(n % m == 0):
        return x.unflatten(2, (m, n // m)).mean(dim=3, dtype=accumulator(x.dtype))
    return group_means(x, segments(x, m, keep), m)


def uniform(
    x: Float[Tensor, "b h n d"],
    m: int,
    *,
    keep: Bool[Tensor, "b n"] | None = None,
    draws: Float[Tensor, " m"] | None = None,
) -> Float[Tensor, "b h m d"]:
    """One real token from each of m near-equal segments, in float32 at least.

    `draws` are the positions within the segments, in [0, 1), shared by the batch; None uses `even_draws`.

    Raises:
        ValueError: The cases of `segment_means`.
    """
    _check(x, m, keep)
    keep = all_real(x) if keep is None else keep
    draws = even_draws(m, x.device) if draws is None else draws
    positions = uniform_positions(keep, m, draws)
    return at_least_float32(take(x, positions))


def uniform_positions(keep: Bool[Tensor, "b n"], m: int, draws: Float[Tensor, " m"]) -> Int[Tensor, "b m"]:
    """Position of the real token drawn from each of m near-equal segments."""
    rank, count = real_index(keep)
    wanted = drawn_ranks(count, m, draws)
    # Ranks never decrease, so the position of a rank is its insertion point. A padding token has the rank of the real
    # token before it, but the search finds the leftmost.
    return insertion_points(rank, wanted).clamp(max=keep.shape[1] - 1)


def drawn_ranks(count: Int[Tensor, " b"], m: int, draws: Float[Tensor, " m"]) -> Int[Tensor, "b m"]:
    """Rank, among `count` real tokens, of the one drawn from each of m near-equal segments."""
    edge = (torch.arange(m + 1, device=count.device) * count[:, None] + m - 1) // m
    start, length = edge[:, :-1], edge.diff(dim=-1)
    return start + torch.minimum((draws * length).long(), (length - 1).clamp(min=0))


def kmeans(
    x: Float[Tensor, "b h n d"], m: int, *, keep: Bool[Tensor, "b n"] | None = None, steps: int = KMEANS_STEPS
) -> Float[Tensor, "b h m d"]:
    """Centres of m clusters of the real tokens, in float32 at least; means have a gradient, assignments do not.

    A cluster that becomes empty in one of Lloyd's `steps` keeps its centre.

    Raises:
        ValueError: The cases of `segment_means`, or a negative number of steps.
    """
    _check(x, m, keep)
    check_at_least("steps", steps, 0)
    b, h, n, _ = x.shape
    flat = at_least_float32(x).flatten(0, 1)[:, None]
    real = None if keep is None else keep[:, None].expand(b, h, n).flatten(0, 1)
    centres = segment_means(x, m, keep=keep).flatten(0, 1)[:, None]
    for _ in range(steps):
        with torch.no_grad():
            nearest = nearest_centres(flat[:, 0], centres[:, 0])
            nearest = nearest if real is None else torch.where(real, nearest, m)
            sizes = nearest.new_zeros(b * h, m + 1).scatter_add(1, nearest, torch.ones_like(nearest))[:, :m]
        centres = torch.where(sizes[:, None, :, None] > 0, group_means(flat, nearest, m), centres)
    return centres[:, 0].unflatten(0, (b, h))


def nearest_centres(x: Float[Tensor, "b n d"], centres: Float[Tensor, "b m d"]) -> Int[Tensor, "b n"]:
    """The nearest centre of each token, computed in chunks of tokens: nothing of size n x m is stored.

    The first of nearly equally near centres wins: their distances differ by rounding, which depends on padding.
    """
    # argmin |x - c|^2 = argmin |c|^2 / 2 - x.c; relative to the mean of the centres, fewer digits cancel.
    middle = centres.mean(dim=1, keepdim=True)
    centres = centres - middle
    half = 0.5 * centres.square().sum(dim=-1)[:, None]
    near = _NEAR * half.mean(dim=-1, keepdim=True)
    (b, n, d), m = x.shape, centres.shape[1]
    # In a compiler there is a single stretch: the number of stretches would become part of its graph.
    whole = torch.compiler.is_compiling() or not is_number(n)
    stretches = [x] if whole else x.split(max(1, _DISTANCES // (b * m), n * d // (4 * m)), dim=1)
    return torch.cat([_first_least(half - (part - middle) @ centres.mT, near) for part in stretches], dim=1)


def _first_least(values: Float[Tensor, "b n m"], near: Float[Tensor, "b 1 1"]) -> Int[Tensor, "b n"]:
    """In each row, the index of the first value that is about as small as the smallest."""
    return (values <= values.amin(dim=-1, keepdim=True) + near).byte().argmax(dim=-1)


def even_draws(m: int, device: torch.device) -> Float[Tensor, " m"]:
    """Numbers in [0, 1) spread by the golden ratio, used if no random draws are given."""
    if torch.compiler.is_exporting():
        # Write constants: ONNX would compute in float32, and rounding could then select other tokens.
        return torch.tensor([i * GOLDEN_RATIO % 1 for i in range(1, m + 1)], dtype=torch.float32, device=device)
    return (torch.arange(1, m + 1, device=device, dtype=torch.float64) * GOLDEN_RATIO % 1).float()


def draw(m: int, generator: Generator, device: torch.device) -> Float[Tensor, " m"]:
    """Numbers in [0, 1): evenly spread if there is no generator, else drawn from it on its device."""
    if generator is None:
        return even_draws(m, device)
    check_generator(generator)
    if generator == "global":
        return torch.rand(m, dtype=torch.float32, device=device)
    return torch.rand(m, generator=generator, dtype=torch.float32, device=generator.device).to(device)


def group_means(x: Float[Tensor, "b h n d"], groups: Int[Tensor, "b n"], m: int) -> Float[Tensor, "b h m d"]:
    """Mean of the tokens of each of m groups, in float32 at least; zero for an empty group.

    A token's group is the same in all heads; m means none.
    """
    sums, sizes = group_sums(x, groups, m)
    return sums / sizes.clamp(min=1)[:, None, :, None]


def group_sums(
    x: Float[Tensor, "b h n d"], groups: Int[Tensor, "b n"], m: int
) -> tuple[Float[Tensor, "b h m d"], Float[Tensor, "b m"]]:
    """Sum and number of the tokens of each group; see `group_means`."""
    b, h, n, d = x.shape
    rows = at_least_float32(x).transpose(1, 2).reshape(b * n, h, d)
    slots = (groups + torch.arange(b, device=x.device)[:, None] * (m + 1)).flatten()
    sums = rows.new_zeros(b * (m + 1), h, d).index_add(0, slots, rows)
    sizes = rows.new_zeros(b * (m + 1)).index_add(0, slots, rows.new_ones(b * n))
    sums, sizes = (total.unflatten(0, (b, m + 1))[:, :m] for total in (sums, sizes))
    return sums.transpose(1, 2), sizes


def segments(x: Float[Tensor, "b h n d"], m: int, keep: Bool[Tensor, "b n"] | None) -> Int[Tensor, "b n"]:
    """The segment of each token, 0 ... m - 1; m for padding tokens."""
    keep = all_real(x) if keep is None else keep
    rank, count = real_index(keep)
    count = count[:, None]
    return torch.where(keep, rank * count.clamp(max=m) // count.clamp(min=1), m)


@torch.no_grad()
def middle_of(x: Float[Tensor, "b h n d"], keep: Bool[Tensor, "b n"] | None = None) -> Float[Tensor, "b h 1 d"]:
    """A rough centre of the real tokens, in float32 at least: in each channel the median of a few evenly spread ones.

    Subtracting it saves the digits that a common offset of all tokens would cost in comparisons. With the mean instead,
    a single huge token would cost as many. The centre is bounded like landmarks, see `within_reach`.
    """
    if keep is None:
        some = x[:, :, torch.arange(MIDDLE_TOKENS, device=x.device) * x.shape[2] // MIDDLE_TOKENS]
    else:
        rank, count = real_index(keep)
        some = take(x, insertion_points(rank, places_of_middle(count)).clamp(max=keep.shape[1] - 1))
    return middle_of_some(at_least_float32(some))


def places_of_middle(count: Int[Tensor, " b"]) -> Int[Tensor, "b r"]:
    """The ranks of the tokens of which `middle_of` takes the median, among `count` real ones."""
    return torch.arange(MIDDLE_TOKENS, device=count.device) * count[:, None] // MIDDLE_TOKENS


def middle_of_some(some: Float[Tensor, "b h r d"]) -> Float[Tensor, "b h 1 d"]:
    """The median of tokens in each channel, bounded; see `middle_of`."""
    # A stable sort can be exported to ONNX; the median is the one of the two middle values that is nearer to 0.
    low, high = (
        some.sort(dim=2, stable=True).values[:, :, MIDDLE_TOKENS // 2 - 1 : MIDDLE_TOKENS // 2 + 1].split(1, dim=2)
    )
    return bounded(torch.where(low.abs() < high.abs(), low, high))


def bounded(centre: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
    """A centre within the bound of landmarks, see `within_reach`."""
    return centre.clamp(-reach(centre.dtype), reach(centre.dtype))


def within_reach(landmarks: Float[Tensor, "b h m d"]) -> Float[Tensor, "b h m d"]:
    """Landmarks clipped so that their inner products with tokens are finite, even if a huge token was drawn.

    A landmark may be any point; one that is as far from the centre as the bound is equally far from all other tokens.
    """
    middle = middle_of(landmarks)
    return landmarks.clamp(middle - reach(landmarks.dtype), middle + reach(landmarks.dtype))


def reach(dtype: torch.dtype) -> float:
    """The bound of landmarks and centres: 3e5 in float32.

    Times 1e30 and summed over the channels of a head it is still finite.
    """
    return torch.finfo(dtype).max ** (1 / 6) / 8


def all_are_short(q: Float[Tensor, "b h n d"], k: Float[Tensor, "b h s d"], m: int) -> bool:
    """Whether all sequences are short by their length alone: at most m queries or keys; False for symbolic lengths."""
    return is_known(q, k) and min(q.shape[2], k.shape[2]) <= m


def is_known(q: Float[Tensor, "b h n d"], k: Float[Tensor, "b h s d"]) -> bool:
    """Whether lengths are numbers rather than symbols."""
    return is_number(q.shape[2]) and is_number(k.shape[2])


def short_sequences(
    keep: Bool[Tensor, "b s"], query_keep: Bool[Tensor, "b n"], m: int
) -> tuple[Bool[Tensor, " b"], Bool[Tensor, " b"] | None]:
    """Sequences of at most m real keys, and sequences of at most m real queries and more keys.

    The second is None if the queries' mask is the same object as that of the keys.
    """
    few_keys = keep.sum(-1) <= m
    return few_keys, None if query_keep is keep else (query_keep.sum(-1) <= m) & ~few_keys


def all_real(x: Float[Tensor, "b h n d"]) -> Bool[Tensor, "b n"]:
    """A mask with all tokens real."""
    return torch.ones(x.shape[0], x.shape[2], dtype=torch.bool, device=x.device)


def _check(x: Tensor, m: int, keep: Tensor | None) -> None:
    check_tensor("x", x)
    if x.ndim != 4:
        raise ValueError(f"x has shape {tuple(x.shape)}; expected four axes (b, h, n, d): split the heads first.")
    check_at_least("m", m, 1)
    check_keep("keep", keep, x, "x")
