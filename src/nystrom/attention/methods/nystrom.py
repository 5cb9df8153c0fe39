r"""Attention in linear time and memory by the Nyström method.

With landmarks $\tilde Q$, $\tilde K$ (m x d) of the queries and keys and $c = 1 / \sqrt d$,
$$\hat S V = \mathrm{softmax}(c\, Q \tilde K^\top)\; A^+\; \mathrm{softmax}(c\, \tilde Q K^\top)\, V, \qquad
A = \mathrm{softmax}(c\, \tilde Q \tilde K^\top).$$

The right factor times V is one fused attention call (m queries, s keys), the left factor times the m x e result is
another (n queries, m keys): nothing of size n x m is stored. The m x m inverse is taken in float32 at least.

**Exact limit.** With m at least the number of real keys, each key is its own landmark and the left factor is the exact
one: $\mathrm{softmax}(c\, Q K^\top) V$. With m at least the number of real queries, the right factor times V holds the
exact results. Either way exact attention costs no more than the approximation, and is what is returned, sequence by
sequence, without a look at the rest of the batch.

Source: Xiong et al. (2021), arXiv:2102.03902, eq. (13)-(17).
Departs from the authors' code: landmarks and norms see real tokens of one sequence and head alone, segments need not
divide n, queries and keys may differ in number and mask.
"""

from dataclasses import dataclass
from typing import NamedTuple, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from nystrom.attention.backend import Backend, check_backend, uses_triton
from nystrom.attention.fused import fused_softmax, softmax_rows
from nystrom.attention.methods.softmax import softmax_attention
from nystrom.attention.skip import check_skip, depthwise_skip
from nystrom.checks import check_at_least, check_choice
from nystrom.landmarks import (
    Landmarks,
    even_draws,
    first_tokens,
    kmeans,
    random_draws,
    ranks,
    segment_means,
    take,
    uniform,
)
from nystrom.linalg.pinv import Inverse, StartValue, pinv
from nystrom.precision import at_least_float32, cast_for_autocast, without_autocast
from nystrom.shapes import check_inputs, score_scale, zero_masked


@dataclass(frozen=True)
class NystromOptions:
    """Options of Nyström attention.

    Attributes:
        num_landmarks: Landmarks m; a sequence of at most m real tokens gets exact attention.
        landmarks: "segment_means" (the paper), "uniform" or "kmeans".
        pinv: "iterative" (eq. 14), "ridge" (the sound exact mode) or "exact" (singular values, for study).
        pinv_steps: Iterations of eq. (14).
        z0: Start value, "paper" (per matrix), "authors" (largest column sum over batch and heads, as the published
            checkpoints were trained; a result then depends on its neighbours) or "sequence" (largest column sum over
            the heads of one sequence: "authors" without the neighbours).
        scale: Factor on the scores; None means 1 / sqrt(d).
        backend: "auto", "torch" or "triton" (kernels for a GPU: segment means and the iterative inverse).
    """

    num_landmarks: int = 64
    landmarks: Landmarks = "segment_means"
    pinv: Inverse = "iterative"
    pinv_steps: int = 6
    z0: StartValue = "paper"
    scale: float | None = None
    backend: Backend = "auto"

    def __post_init__(self):
        check_at_least("num_landmarks", self.num_landmarks, 1)
        check_choice("landmarks", self.landmarks, get_args(Landmarks))
        check_choice("pinv", self.pinv, get_args(Inverse))
        check_at_least("pinv_steps", self.pinv_steps, 0)
        check_choice("z0", self.z0, get_args(StartValue))
        check_backend(self.backend, {"landmarks": (self.landmarks, "segment_means"), "pinv": (self.pinv, "iterative")})


class NystromFactors(NamedTuple):
    """The small matrices of the approximation, in float32 at least.

    Attributes:
        q_landmarks: Landmarks of the queries.
        k_landmarks: Landmarks of the keys.
        a: Their softmax matrix; the identity where a sequence is short enough for exact attention.
        inverse: What stands for its inverse; `nystrom.linalg.residual(a, inverse)` says how near it is.
    """

    q_landmarks: Float[Tensor, "b h m d"]
    k_landmarks: Float[Tensor, "b h m d"]
    a: Float[Tensor, "b h m m"]
    inverse: Float[Tensor, "b h m m"]


def nystrom_attention(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    v: Float[Tensor, "b h s e"],
    *,
    num_landmarks: int = 64,
    keep: Bool[Tensor, "b s"] | None = None,
    query_keep: Bool[Tensor, "b n"] | None = None,
    scale: float | None = None,
    landmarks: Landmarks = "segment_means",
    pinv: Inverse = "iterative",
    pinv_steps: int = 6,
    z0: StartValue = "paper",
    generator: torch.Generator | None = None,
    backend: Backend = "auto",
    skip: Float[Tensor, "h 1 taps 1"] | None = None,
) -> Float[Tensor, "b h n e"]:
    """Approximate softmax attention with m landmarks, in time and memory linear in n and s.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        num_landmarks: Landmarks m; a sequence of at most m real keys or queries gets exact attention.
        keep: Real keys; None where all are.
        query_keep: Real queries; None means `keep` where n == s (self-attention: queries that are not real must not
            reach the landmarks), else all. Cross-attention of equal lengths passes both. Other queries give zeros.
        scale: Factor on the scores; None means 1 / sqrt(d).
        landmarks: "segment_means" (the paper), "uniform" or "kmeans", each over real tokens only.
        pinv: "iterative" (eq. 14), "ridge" (the sound exact mode) or "exact" (singular values, for study).
        pinv_steps: Iterations of eq. (14).
        z0: Start value, "paper" (per matrix), "authors" (over batch and heads: what published checkpoints were trained
            with; a result then depends on its neighbours) or "sequence" (over the heads: "authors" for one sequence).
        generator: Source of the draws of "uniform"; None takes tokens spread evenly, the same each time.
        backend: "auto", "torch" or "triton"; an explicit choice that cannot run raises.
        skip: Kernel of a convolution of the values that is added, see `depthwise_skip`; self-attention only.

    Raises:
        ValueError: Shapes, dtypes, masks or options that do not fit.
    """
    options = NystromOptions(num_landmarks, landmarks, pinv, pinv_steps, z0, scale, backend)
    draws = random_draws(num_landmarks, generator, q.device)
    return _attend(q, k, v, keep, query_keep, draws, options, skip)


def nystrom_factors(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    *,
    keep: Bool[Tensor, "b s"] | None = None,
    query_keep: Bool[Tensor, "b n"] | None = None,
    options: NystromOptions = NystromOptions(),
    generator: torch.Generator | None = None,
) -> NystromFactors:
    """The landmarks, their softmax matrix and its inverse, for the same arguments as `nystrom_attention`.

    Raises:
        ValueError: Shapes, dtypes or masks that do not fit.
    """
    keep, query_keep = check_inputs(q, k, k, keep, query_keep)
    q, k = cast_for_autocast(q, k)
    with without_autocast(q):
        q, k = zero_masked(q, query_keep), zero_masked(k, keep)
        sides = _both_masks(q, k, keep, query_keep)
        return _factors(q, k, sides, random_draws(options.num_landmarks, generator, q.device), options)


def nystrom_rows(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    queries: Int[Tensor, " r"],
    *,
    keep: Bool[Tensor, "b s"] | None = None,
    query_keep: Bool[Tensor, "b n"] | None = None,
    options: NystromOptions = NystromOptions(),
    generator: torch.Generator | None = None,
) -> Float[Tensor, "b h r s"]:
    r"""Rows of the approximate attention matrix $\hat S$, for the queries at r positions: (r + m) x s numbers.

    The rows times V are the outputs of `nystrom_attention` at these queries. Rows of an approximation need not be
    positive, nor sum to one.

    Raises:
        ValueError: Shapes, dtypes or masks that do not fit, or a position outside 0 ... n - 1.
    """
    keep, query_keep = check_inputs(q, k, k, keep, query_keep)
    if queries.ndim != 1 or queries.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"queries is {tuple(queries.shape)} of {queries.dtype}; expected one axis of integer positions."
        )
    if queries.numel() and (int(queries.min()) < 0 or int(queries.max()) >= q.shape[2]):
        raise ValueError(f"queries holds positions outside 0 ... {q.shape[2] - 1}.")
    q, k = (at_least_float32(x) for x in cast_for_autocast(q, k))
    with without_autocast(q):
        q, k = zero_masked(q, query_keep), zero_masked(k, keep)
        sides = _both_masks(q, k, keep, query_keep)
        factors = _factors(q, k, sides, random_draws(options.num_landmarks, generator, q.device), options)
        asked = q[:, :, queries]
        left = softmax_rows(asked, factors.k_landmarks, scale=options.scale)
        right = softmax_rows(factors.q_landmarks, k, keep=keep, scale=options.scale)
        rows = left @ factors.inverse @ right
        exact = softmax_rows(asked, k, keep=keep, scale=options.scale)
        if sides is None:
            return exact if min(q.shape[2], k.shape[2]) <= options.num_landmarks else rows
        rows = torch.where(_short(sides, options.num_landmarks)[:, None, None, None], exact, rows)
        return torch.where(sides.query_keep[:, None, queries, None], rows, 0.0)


class _Sides(NamedTuple):
    keep: Bool[Tensor, "b s"]
    query_keep: Bool[Tensor, "b n"]


def _both_masks(q: Tensor, k: Tensor, keep: Tensor | None, query_keep: Tensor | None) -> _Sides | None:
    """Both masks, or None where all tokens are real and their number is known."""
    if keep is None and query_keep is None and isinstance(q.shape[2], int) and isinstance(k.shape[2], int):
        return None
    if keep is None:
        keep = torch.ones(k.shape[0], k.shape[2], dtype=torch.bool, device=k.device)
    if query_keep is None:
        # In self-attention the two are one object, which spares the path of a few queries over many keys.
        query_keep = keep if q is k else torch.ones(q.shape[0], q.shape[2], dtype=torch.bool, device=q.device)
    return _Sides(keep, query_keep)


def _short(sides: _Sides, m: int) -> Bool[Tensor, " b"]:
    return torch.minimum(sides.keep.sum(-1), sides.query_keep.sum(-1)) <= m


def _attend(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    v: Float[Tensor, "b h s e"],
    keep: Bool[Tensor, "b s"] | None,
    query_keep: Bool[Tensor, "b n"] | None,
    draws: Float[Tensor, " m"] | None,
    options: NystromOptions,
    skip: Float[Tensor, "h 1 taps 1"] | None = None,
) -> Float[Tensor, "b h n e"]:
    keep, query_keep = check_inputs(q, k, v, keep, query_keep)
    m, scale = options.num_landmarks, options.scale
    n, s = q.shape[2], k.shape[2]
    if skip is not None:
        check_skip(v, skip, q, keep, query_keep)
    short = isinstance(n, int) and isinstance(s, int) and min(n, s) <= m
    if skip is not None and (short or not uses_triton(options.backend)):
        return depthwise_skip(v, skip, keep=keep, to=_attend(q, k, v, keep, query_keep, draws, options))
    if short:
        return softmax_attention(q, k, v, keep=keep, query_keep=query_keep, scale=scale)
    q, k, v = cast_for_autocast(q, k, v)
    with without_autocast(q):
        if uses_triton(options.backend):
            from nystrom.gpu.attention import landmark_attention

            return landmark_attention(
                q,
                k,
                v,
                num_landmarks=m,
                keep=keep,
                query_keep=query_keep,
                scale=score_scale(q, scale),
                pinv_steps=options.pinv_steps,
                z0=options.z0,
                skip=skip,
            )
        q, k, v = zero_masked(q, query_keep), zero_masked(k, keep), zero_masked(v, keep)
        sides = _both_masks(q, k, keep, query_keep)
        factors = _factors(q, k, sides, draws, options)
        q_landmarks, k_landmarks = factors.q_landmarks.to(q.dtype), factors.k_landmarks.to(k.dtype)
        right = fused_softmax(q_landmarks, k, v, keep=keep, scale=scale)
        middle = factors.inverse @ at_least_float32(right)
        if sides is None:
            return _left(q, k_landmarks, middle, None, scale)
        # A sequence of at most m real keys: they are its landmarks, their values the middle, and the left factor exact.
        few_keys = (sides.keep.sum(-1) <= m)[:, None]
        place, real = first_tokens(sides.keep, m)
        middle = torch.where(few_keys[..., None, None], zero_masked(take(v, place), real).to(middle.dtype), middle)
        out = _left(q, k_landmarks, middle, real | ~few_keys, scale)
        if sides.query_keep is not sides.keep:
            # A sequence of at most m real queries: they are its landmarks, and the right factor holds their results.
            few_queries = (sides.query_keep.sum(-1) <= m)[:, None] & ~few_keys
            rank = ranks(sides.query_keep)[0].clamp(0, m - 1)
            out = torch.where(few_queries[..., None, None], take(right, rank), out)
        return zero_masked(out, query_keep)


def _factors(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    sides: _Sides | None,
    draws: Float[Tensor, " m"] | None,
    options: NystromOptions,
) -> NystromFactors:
    m = options.num_landmarks
    draws = even_draws(m, q.device) if draws is None else draws
    landmarks = []
    for x, keep in ((q, sides and sides.query_keep), (k, sides and sides.keep)):
        if options.landmarks == "kmeans":
            chosen = kmeans(x, m, keep=keep)
        elif options.landmarks == "uniform":
            chosen = uniform(x, m, keep=keep, draws=draws)
        else:
            chosen = segment_means(x, m, keep=keep)
        if keep is not None:
            place, real = first_tokens(keep, m)
            few = (keep.sum(-1) <= m)[:, None, None, None]
            chosen = torch.where(few, zero_masked(take(x, place), real).to(chosen.dtype), chosen)
        landmarks.append(chosen)
    q_landmarks, k_landmarks = landmarks
    a = softmax_rows(q_landmarks, k_landmarks, scale=options.scale)
    if sides is not None:
        eye = torch.eye(m, dtype=a.dtype, device=a.device)
        a = torch.where(_short(sides, m)[:, None, None, None], eye, a)
    inverse = pinv(a, inverse=options.pinv, steps=options.pinv_steps, z0=options.z0)
    return NystromFactors(q_landmarks, k_landmarks, a, inverse)


def _left(
    q: Float[Tensor, "b h n d"],
    k_landmarks: Float[Tensor, "b h m d"],
    middle: Float[Tensor, "b h m e"],
    real: Bool[Tensor, "b m"] | None,
    scale: float | None,
) -> Float[Tensor, "b h n e"]:
    if q.dtype != torch.float16:
        return fused_softmax(q, k_landmarks, middle.to(q.dtype), keep=real, scale=scale)
    # The inverse may carry values past the largest float16: scale them into range, and hold the result there.
    largest = torch.finfo(q.dtype).max
    shrink = (middle.detach().abs().amax(dim=(-2, -1), keepdim=True) / largest).clamp(min=1)
    out = fused_softmax(q, k_landmarks, (middle / shrink).to(q.dtype), keep=real, scale=scale)
    return (out.float() * shrink).clamp(-largest, largest).to(q.dtype)


class NystromHeads(nn.Module):
    """Nyström attention over head-split tensors; has no parameters.

    In training, "uniform" landmarks are drawn from torch's global generator; in evaluation they are spread evenly.
    """

    def __init__(self, num_heads: int, head_dim: int, options: NystromOptions | None = None):
        super().__init__()
        self.options = NystromOptions() if options is None else options

    @property
    def takes_skip(self) -> bool:
        """Whether `skip` is added in the same pass, rather than after it."""
        return uses_triton(self.options.backend)

    def forward(
        self,
        q: Float[Tensor, "b h n d"],
        k: Float[Tensor, "b h s d"],
        v: Float[Tensor, "b h s e"],
        *,
        keep: Bool[Tensor, "b s"] | None = None,
        query_keep: Bool[Tensor, "b n"] | None = None,
        skip: Float[Tensor, "h 1 taps 1"] | None = None,
    ) -> Float[Tensor, "b h n e"]:
        """Attend; see `nystrom_attention`."""
        drawn = self.training and self.options.landmarks == "uniform"
        draws = torch.rand(self.options.num_landmarks, device=q.device) if drawn else None
        return _attend(q, k, v, keep, query_keep, draws, self.options, skip)
