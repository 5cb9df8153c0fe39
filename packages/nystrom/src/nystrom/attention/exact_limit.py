r"""Exact attention for short sequences, at no more cost than the approximation.

A method with m landmarks computes $\mathrm{out} = f(Q, L)\,(B\, g(L, K) V)$: a right factor that gives each landmark a
result over all keys, an m x m matrix B, and a left factor over the landmarks.

- At most m real keys: they become the landmarks and their values the middle, so that the left factor is exact.
- At most m real queries, and more keys: they become the landmarks, so that the right factor holds the exact results.

Both select between tensors of the same shape, for each sequence of a batch independently (`short_sequences`). So
results do not depend on the rest of the batch, and compilation and export need no branch.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nystrom.attention.fused import fused_softmax
from nystrom.landmarks import all_real, first_tokens, is_known, real_index, short_sequences, take
from nystrom.private_torch import is_transformed
from nystrom.shapes import has_numbers, is_number, zero_masked

# Share of padding above which cutting a batch into sequences saves more than the extra calls cost.
_PADDED = 1 / 8


@dataclass(frozen=True)
class ExactLimit:
    """The short sequences of a batch, and what replaces their landmarks."""

    m: int
    keep: Bool[Tensor, "b s"]  # Real keys
    query_keep: Bool[Tensor, "b n"]  # Real queries; the same object as `keep` in self-attention
    few_keys: Bool[Tensor, "b 1 1 1"]  # Sequences of at most m real keys
    few_queries: Bool[Tensor, "b 1 1 1"] | None  # Other sequences, of at most m real queries

    @property
    def short(self) -> Bool[Tensor, "b 1 1 1"]:
        """Sequences that get exact attention."""
        return self.few_keys if self.few_queries is None else self.few_keys | self.few_queries

    def queries_as_landmarks(
        self, landmarks: Float[Tensor, "b h m d"], q: Float[Tensor, "b h n d"]
    ) -> Float[Tensor, "b h m d"]:
        """The landmarks that attend to the keys: the queries themselves, if there are few."""
        if self.few_queries is None:
            return landmarks
        return torch.where(self.few_queries, _first(q, self.query_keep, self.m).to(landmarks.dtype), landmarks)

    def keys_as_landmarks(
        self, landmarks: Float[Tensor, "b h m d"], k: Float[Tensor, "b h s d"]
    ) -> Float[Tensor, "b h m d"]:
        """The landmarks that the queries attend to: the keys themselves, if there are few."""
        return torch.where(self.few_keys, _first(k, self.keep, self.m).to(landmarks.dtype), landmarks)

    def values_as_middle(
        self, middle: Float[Tensor, "b h m e"], v: Float[Tensor, "b h s e"]
    ) -> Float[Tensor, "b h m e"]:
        """The values that the queries average: the values of the keys, if there are few."""
        return torch.where(self.few_keys, _first(v, self.keep, self.m).to(middle.dtype), middle)

    def real_landmarks(self) -> Bool[Tensor, "b m"]:
        """The landmarks that the queries attend to: all, or as many as there are keys."""
        return first_tokens(self.keep, self.m)[1] | ~self.few_keys[:, 0, :, 0]

    def results(self, out: Float[Tensor, "b h n e"], right: Float[Tensor, "b h m e"]) -> Float[Tensor, "b h n e"]:
        """The outputs: the results of the right factor, if there are few queries."""
        if self.few_queries is None:
            return out
        rank = real_index(self.query_keep)[0].clamp(0, self.m - 1)
        return torch.where(self.few_queries, take(right, rank).to(out.dtype), out)


def exact_limit(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    keep: Bool[Tensor, "b s"] | None,
    query_keep: Bool[Tensor, "b n"] | None,
    m: int,
) -> ExactLimit | None:
    """The short sequences of a batch; None if all tokens are real and their number is known."""
    if keep is None and query_keep is None and is_known(q, k):
        return None
    keep = all_real(k) if keep is None else keep
    if query_keep is None:
        query_keep = keep if q is k else all_real(q)
    few_keys, few_queries = short_sequences(keep, query_keep, m)
    few_queries = None if few_queries is None else few_queries[:, None, None, None]
    return ExactLimit(m, keep, query_keep, few_keys[:, None, None, None], few_queries)


def exact_where_short(
    approximate: Callable[..., Tensor],
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h n d"],
    v: Float[Tensor, "b h n e"],
    keep: Bool[Tensor, "b n"],
    m: int,
    scale: float | None,
) -> Float[Tensor, "b h n e"]:
    """Self-attention that is exact for sequences of at most m real tokens.

    `approximate` is that of longer ones: a function of q, k, v and the masks of keys and queries.
    """
    count = keep.sum(dim=1)
    short = count <= m

    def exact(some: slice | Int[Tensor, " r"], length: int) -> Float[Tensor, "r h n e"]:
        place, real = first_tokens(keep[some], length)
        first = (zero_masked(take(x[some], place), real) for x in (q, k, v))
        return take(fused_softmax(*first, keep=real, scale=scale), real_index(keep[some])[0].clamp(0, length - 1))

    if not may_branch(q):
        # Without branches, both are computed, and one is selected.
        return torch.where(short[:, None, None, None], exact(slice(None), m), approximate(q, k, v, keep, keep))
    if not short.any():
        return approximate(q, k, v, keep, keep)
    rows, others = short.nonzero()[:, 0], (~short).nonzero()[:, 0]
    if q.device.type == "cpu":
        of_short = exact_one_by_one(q[rows], k[rows], v[rows], keep[rows], scale)
    else:
        of_short = exact(rows, max(1, int(count[rows].max())))
    if not len(others):
        return of_short
    far = approximate(*(x[others] for x in (q, k, v, keep, keep)))
    return torch.cat([of_short, far.to(of_short.dtype)])[torch.cat([rows, others]).argsort()]


def exact_one_by_one(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h n d"],
    v: Float[Tensor, "b h n e"],
    keep: Bool[Tensor, "b n"] | None,
    scale: float | None,
) -> Float[Tensor, "b h n e"]:
    """Exact self-attention, one sequence at a time, if possible cut to the span of its real tokens.

    A fused call on a CPU takes as long for a masked token as for a real one. Tokens outside the span give zeros.
    """
    if keep is None or q.shape[0] == 1 or q.device.type != "cpu" or not may_branch(q):
        return fused_softmax(q, k, v, keep=keep, scale=scale)
    place = torch.arange(keep.shape[1], device=keep.device)
    first = torch.where(keep, place, keep.shape[1]).amin(dim=1).tolist()
    end = torch.where(keep, place + 1, 0).amax(dim=1).tolist()
    held = sum(max(0, stop - start) for start, stop in zip(first, end, strict=True))
    if not held or held > (1 - _PADDED) * keep.numel():
        return fused_softmax(q, k, v, keep=keep, scale=scale)
    results = []
    for row, (start, stop) in enumerate(zip(first, end, strict=True)):
        if start >= stop:
            # A sequence without real tokens has zeros as values: return them as its output.
            results.append(v[row : row + 1])
            continue
        inside = keep[row : row + 1, start:stop]
        some = (x[row : row + 1, :, start:stop] for x in (q, k, v))
        out = fused_softmax(*some, keep=None if inside.all() else inside, scale=scale)
        results.append(F.pad(out, (0, 0, start, keep.shape[1] - stop)))
    return torch.cat(results)


def may_branch(x: Tensor) -> bool:
    """Whether code may branch on the values of a tensor: not in a recorded graph or a transform of torch.func."""
    return not (
        # First: a compiler cannot ask for a capture.
        torch.compiler.is_compiling()
        or is_transformed()
        or not has_numbers(x)
        or (x.is_cuda and torch.cuda.is_current_stream_capturing())
        or not all(is_number(size) for size in x.shape)
    )


def _first(x: Float[Tensor, "b h n d"], keep: Bool[Tensor, "b n"], m: int) -> Float[Tensor, "b h m d"]:
    """The first m real tokens, and zeros after the last."""
    place, real = first_tokens(keep, m)
    return zero_masked(take(x, place), real)
