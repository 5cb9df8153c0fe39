r"""The communication volume of attention across ranks, from formulas: what `count_bytes` counts, without a run.

For float32 tokens, the formulas below count numbers of 4 bytes for each sequence and head. They use m landmarks or
clusters, r features, g heavy keys or global tokens, i steps of k-means, a window of w tokens, n tokens, d the width of
a head, R ranks, and t = min(2, R - 1), the largest number of neighbours of a rank:
$$\begin{aligned}
\text{nystrom} &: 2 m (d + 1) + m + m (d + 1) \qquad
\text{skyformer}: 2 m d \qquad
\text{linformer}: 2 r d \\
\text{linear} &: d + d (d + 1) \qquad
\text{performer}: r + r (d + 1) \\
\text{longformer} &: 2 t \lfloor w / 2 \rfloor d + 3 g d + g + g (d + 1) \\
\text{near\_far} &: 8 (2 d + 3) + 2 g (R - 1) + i\, m (d + 1) + (g + m)(2 d + 1) + t\, a\, (2 d + 2) + t\, s\, m d,
a = \text{block\_size} - 1 + \text{reach}, \quad s = 1 + \lceil \log_2 (R - 1) \rceil \\
\text{softmax} &: \tfrac{n}{R} (2 d + 1).
\end{aligned}$$

For longformer, the neighbours' masks add a byte per token. For near_far, the last term is an upper bound; `num_samples`
= r adds 2 r d + r + r (d + 1) numbers, and sequences that `exact_up_to` makes exact, which the functions here leave
out, add 2 d numbers for each token of the limit.

The backward pass exchanges everything with a gradient once more. Every call begins with an agreement check, 32 bytes to
each other rank. The formulas assume self-attention of real tokens, more tokens than landmarks, and equal pieces.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from nystrom.attention.parts.clusters import QUERY_MEANS
from nystrom.attention.registry import METHODS
from nystrom.landmarks import KMEANS_STEPS, MIDDLE_TOKENS
from nystrom.parallel.communication import Traffic
from nystrom.parallel.scan import hops


class Exchanged(NamedTuple):
    """Bytes of one call of attention.

    Attributes:
        forward: Bytes that a rank passes to collectives in the forward pass.
        backward: The same for the backward pass.
    """

    forward: Traffic
    backward: Traffic


@dataclass(frozen=True, kw_only=True)
class CutSizes:
    """Sizes of one call of attention across ranks.

    Attributes:
        batch: Sequences.
        heads: Heads.
        head_dim: Width d of a head, for queries, keys and values.
        tokens: Tokens of a sequence, across all ranks.
        ranks: Ranks R, each with the same number of tokens.
        itemsize: Bytes per number of the tokens, such as 2 in bfloat16.
        rank: The rank to compute for; None for a rank with the most neighbours.
    """

    batch: int
    heads: int
    head_dim: int
    tokens: int
    ranks: int
    itemsize: int
    rank: int | None = None

    @property
    def neighbours(self) -> int:
        """Number of neighbours of the rank."""
        if self.rank is None:
            return min(2, self.ranks - 1)
        return (self.rank > 0) + (self.rank < self.ranks - 1)

    @property
    def wide(self) -> int:
        """Bytes per number in sums, which are in float32 at least."""
        return max(4, self.itemsize)


class _Step(NamedTuple):
    """One collective.

    Attributes:
        kind: Its name in `Traffic`.
        size: Bytes for each sequence and head.
        gradient: Whether its result has a gradient, which the backward pass exchanges.
        forward: Whether the forward pass exchanges it.
    """

    kind: str
    size: int
    gradient: bool = True
    forward: bool = True


def exchanged(method: str, options: Any, sizes: CutSizes, *, taps: int = 0) -> Exchanged:
    """The bytes that one call of a method exchanges.

    Args:
        method: Name of a method that works across ranks.
        options: Its options, a `METHODS[method].options`.
        sizes: Sizes of the call.
        taps: Width of the skip convolution of the values; 0 for none.

    Raises:
        ValueError: A method that does not work across ranks, or pieces that are shorter than what neighbours need.
    """
    if method not in OVER_RANKS:
        raise ValueError(
            f"method is {method!r}, which does not work over ranks; expected one of {', '.join(OVER_RANKS)}."
        )
    steps = list(_STEPS[method](options, sizes))
    agreements = 1
    if taps > 1:
        steps += _halo(sizes, taps // 2, sizes.head_dim * sizes.itemsize)
        agreements += not METHODS[method].takes_skip
    forward, backward, heads = Traffic(), Traffic(), sizes.batch * sizes.heads
    for _ in range(agreements):
        _add(forward, "gather", 32 * (sizes.ranks - 1))
    for step in steps:
        if step.forward:
            _add(forward, step.kind, heads * step.size)
        if step.gradient:
            _add(backward, step.kind, heads * step.size)
    if method == "longformer":
        # The masks of the neighbours' tokens, the same for all heads.
        _add(forward, "exchange", sizes.batch * sizes.neighbours * _half(options, sizes))
    return Exchanged(forward, backward)


def _add(traffic: Traffic, kind: str, size: int) -> None:
    traffic.total += size
    traffic.calls += 1
    traffic.by_kind[kind] = traffic.by_kind.get(kind, 0) + size


def _halo(sizes: CutSizes, tokens: int, size: int, *, gradient: bool = True) -> Iterator[_Step]:
    """The halo for the neighbours: `tokens` tokens on either side, of `size` bytes each."""
    if sizes.ranks > 1 and tokens > sizes.tokens // sizes.ranks:
        raise ValueError(
            f"a rank holds {sizes.tokens // sizes.ranks} tokens of {sizes.tokens}, and its neighbours need "
            f"{tokens}: use fewer ranks, more tokens or a shorter window."
        )
    yield _Step("exchange", sizes.neighbours * tokens * size, gradient)


def _scans(sizes: CutSizes, size: int) -> Iterator[_Step]:
    """Sums over the ranks before and after this one, see `nystrom.parallel.scan`."""
    rank = sizes.ranks // 2 if sizes.rank is None else sizes.rank
    for side in (1, -1):
        for distance in hops(sizes.ranks):
            # What is sent one way in the forward pass is returned in the backward pass.
            to, back = (0 <= rank + way * side * distance < sizes.ranks for way in (1, -1))
            yield _Step("exchange", to * size, gradient=False)
            yield _Step("exchange", back * size, forward=False)


def _joined(rows: int, sizes: CutSizes) -> Iterator[_Step]:
    """Averages of the values for some rows, and their normalisers."""
    yield _Step("maximum", rows * sizes.wide, False)
    yield _Step("sum", rows * (sizes.head_dim + 1) * sizes.wide)


def _nystrom(options: Any, sizes: CutSizes) -> Iterator[_Step]:
    m, d = options.num_landmarks, sizes.head_dim
    for _ in ("queries", "keys"):
        if options.landmarks == "uniform":
            yield _Step("sum", m * d * sizes.wide)
        else:
            for _ in range(1 + KMEANS_STEPS if options.landmarks == "kmeans" else 1):
                yield _Step("sum", m * (d + 1) * sizes.wide)
    yield from _joined(m, sizes)


def _skyformer(options: Any, sizes: CutSizes) -> Iterator[_Step]:
    half, d = options.num_landmarks // 2, sizes.head_dim
    for rows in (half, options.num_landmarks - half, options.num_landmarks):
        yield _Step("sum", rows * d * sizes.wide)


def _linear(options: Any, sizes: CutSizes) -> Iterator[_Step]:
    return _joined(sizes.head_dim, sizes)


def _performer(options: Any, sizes: CutSizes) -> Iterator[_Step]:
    return _joined(options.num_features, sizes)


def _linformer(options: Any, sizes: CutSizes) -> Iterator[_Step]:
    yield _Step("sum", 2 * options.num_features * sizes.head_dim * sizes.wide)


def _half(options: Any, sizes: CutSizes) -> int:
    return min(options.window // 2, sizes.tokens - 1)


def _longformer(options: Any, sizes: CutSizes) -> Iterator[_Step]:
    g, each = options.num_global, sizes.head_dim * sizes.itemsize
    for _ in ("keys", "values"):
        yield from _halo(sizes, _half(options, sizes), each)
    if g:
        for _ in ("queries", "keys", "values"):
            yield _Step("sum", g * each)
        yield from _joined(g, sizes)


def _near_far(options: Any, sizes: CutSizes) -> Iterator[_Step]:
    g, m, d, wide = options.num_heavy, options.num_clusters, sizes.head_dim, sizes.wide
    yield _Step("sum", MIDDLE_TOKENS * d * wide, False)
    yield _Step("sum", QUERY_MEANS * (d + 1) * wide, False)
    for kind in ("maximum", "sum"):
        yield _Step(kind, QUERY_MEANS * wide, False)
    yield _Step("gather", g * 8 * (sizes.ranks - 1), False)
    # The first centres are segment means; every iteration of k-means but the last adds a sum.
    for _ in range(options.iterations):
        yield _Step("sum", m * (d + 1) * wide, False)
    yield _Step("sum", (g + m) * (2 * d + 1) * wide)
    around = options.block_size - 1 + options.reach
    yield from _halo(sizes, around, 2 * d * wide)
    yield from _halo(sizes, around, 8, gradient=False)
    yield from _scans(sizes, m * d * wide)
    if options.num_samples:
        for _ in ("queries", "outputs"):
            yield _Step("sum", options.num_samples * d * wide)
        yield from _joined(options.num_samples, sizes)


def _softmax(options: Any, sizes: CutSizes) -> Iterator[_Step]:
    piece = sizes.tokens // sizes.ranks * (2 * sizes.head_dim + 1) * sizes.wide
    yield _Step("broadcast", piece)
    # The gradients of the other ranks' pieces are sent back to them.
    for _ in range(sizes.ranks - 1):
        yield _Step("reduce", piece, forward=False)


_STEPS: dict[str, Callable[[Any, CutSizes], Iterator[_Step]]] = {
    "softmax": _softmax,
    "nystrom": _nystrom,
    "near_far": _near_far,
    "skyformer": _skyformer,
    "linear": _linear,
    "performer": _performer,
    "linformer": _linformer,
    "longformer": _longformer,
}
# Methods with a formula.
OVER_RANKS = tuple(_STEPS)
