r"""Attention in linear time and memory by the Nyström method.

With landmarks $\tilde Q$, $\tilde K$ (m x d) of the queries and keys and $c = 1 / \sqrt d$,
$$\hat S V = \mathrm{softmax}(c\, Q \tilde K^\top)\; A^+\; \mathrm{softmax}(c\, \tilde Q K^\top)\, V, \qquad
A = \mathrm{softmax}(c\, \tilde Q \tilde K^\top).$$

The right factor times V is one fused attention call (m queries, s keys), the left factor times the m x e result is
another (n queries, m keys): nothing of size n x m is stored. The m x m inverse is taken in float32 at least.

**Exact limit.** With m at least the number of real keys, each key is its own landmark and the left factor is the exact
one: $\mathrm{softmax}(c\, Q K^\top) V$. With m at least the number of real queries, the right factor times V holds the
exact results. Either way exact attention costs no more than the approximation and is returned, for each sequence
independently of the rest of the batch.

Source: Xiong et al. (2021), arXiv:2102.03902, eq. (13)-(17).
Departs from the authors' code: landmarks and norms see real tokens of one sequence and head alone, segments need not
divide n, queries and keys may differ in number and mask.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nystrom.attention.entry import attend
from nystrom.attention.exact_limit import ExactLimit, exact_limit
from nystrom.attention.fused import fused_softmax, softmax_of_landmarks, softmax_rows
from nystrom.attention.loops_operator import loops_operator
from nystrom.attention.options import NystromOptions, documented, refuse_tolerance
from nystrom.attention.parts.error_estimate import within_tolerance
from nystrom.attention.parts.landmark_sums import landmark_sums
from nystrom.attention.parts.shared_gradient import with_segment_means
from nystrom.attention.skip import NEEDS_SAME_TOKENS, check_kernel, depthwise_skip, padded_values_and_buffer
from nystrom.checks import Backend, Inverse, Landmarks, StartValue
from nystrom.landmarks import all_are_short, all_real, draw, kmeans, segment_means, uniform
from nystrom.linalg.pinv import pinv
from nystrom.native import runs_in_stretches
from nystrom.precision import at_least_float32, cast_for_autocast, narrowed, without_autocast
from nystrom.shapes import (
    Generator,
    Group,
    Masks,
    check_generator,
    check_inputs,
    check_positions,
    score_scale,
    zero_masked,
)

# Tokens from which on working in stretches on a CPU gains more than its calls cost.
_LONG = 2048


class NystromFactors(NamedTuple):
    """The small matrices of the approximation, in float32 at least."""

    q_landmarks: Float[Tensor, "b h m d"]  # Landmarks of the queries
    k_landmarks: Float[Tensor, "b h m d"]  # Landmarks of the keys
    a: Float[Tensor, "b h m m"]  # Their softmax matrix; the identity for a sequence short enough for exact attention
    # The approximation of its inverse; `nystrom.residual(a, inverse)` measures how good it is
    inverse: Float[Tensor, "b h m m"]


@documented(NystromOptions)
def nystrom_attention(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    v: Float[Tensor, "b h s e"],
    *,
    num_landmarks: int = 64,
    landmarks: Landmarks = "segment_means",
    pinv: Inverse = "iterative",
    pinv_steps: int = 6,
    z0: StartValue = "paper",
    scale: float | None = None,
    backend: Backend = "auto",
    tolerance: float | None = None,
    keep: Bool[Tensor, "b n"] | None = None,
    key_keep: Bool[Tensor, "b s"] | None = None,
    query_keep: Bool[Tensor, "b n"] | None = None,
    cu_seqlens: Int[Tensor, " ends"] | None = None,
    generator: Generator = None,
    skip: Float[Tensor, "h 1 taps 1"] | None = None,
    group: Group = None,
) -> Float[Tensor, "b h n e"]:
    """Approximate softmax attention with m landmarks, in time and memory linear in n and s.

    Args:
        **usual: Tensors, masks, generator, group and `NystromOptions`.
        skip: Kernel of a convolution of the values that is added, see `depthwise_skip`; self-attention only.
    """
    check_generator(generator)
    options = NystromOptions(
        num_landmarks=num_landmarks,
        landmarks=landmarks,
        pinv=pinv,
        pinv_steps=pinv_steps,
        z0=z0,
        scale=scale,
        backend=backend,
        tolerance=tolerance,
    )
    if skip is not None:
        refuse_tolerance(tolerance, "a skip is given, which is no part of attention: add depthwise_skip to the output")
    masks, same_tokens = Masks(keep, key_keep, query_keep, cu_seqlens), None if skip is None else NEEDS_SAME_TOKENS
    core, kernels = _nystrom, _by_kernels
    if tolerance is not None:
        core, kernels = (within_tolerance(each, tolerance, scale, group=group) for each in (core, kernels))
    operator = _by_loops if tolerance is None and generator is None else None
    how = {"same_tokens": same_tokens, "kernels": kernels, "operator": operator, "onnx": "nystrom", "group": group}
    return attend(core, q, k, v, masks, options, generator, skip, **how)


@documented(NystromOptions)
def nystrom_factors(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    *,
    num_landmarks: int = 64,
    landmarks: Landmarks = "segment_means",
    pinv: Inverse = "iterative",
    pinv_steps: int = 6,
    z0: StartValue = "paper",
    scale: float | None = None,
    tolerance: float | None = None,
    keep: Bool[Tensor, "b n"] | None = None,
    key_keep: Bool[Tensor, "b s"] | None = None,
    query_keep: Bool[Tensor, "b n"] | None = None,
    generator: Generator = None,
) -> NystromFactors:
    """The landmarks, their softmax matrix and its inverse, for the same arguments as `nystrom_attention`.

    Args:
        **usual: Queries, keys, masks, generator and `NystromOptions`.
    """
    check_generator(generator)
    options = NystromOptions(
        num_landmarks=num_landmarks, landmarks=landmarks, pinv=pinv, pinv_steps=pinv_steps, z0=z0, scale=scale
    )
    refuse_tolerance(tolerance, "factors are those of the approximation")
    keep, query_keep = check_inputs(q, k, k, Masks(keep, key_keep, query_keep))
    q, k = cast_for_autocast(q, k)
    with without_autocast(q):
        q, k = zero_masked(q, query_keep), zero_masked(k, keep)
        if all_are_short(q, k, num_landmarks):
            # Their limit needs masks, in which all are real where none is given.
            keep, query_keep = (all_real(x) if mask is None else mask for x, mask in ((k, keep), (q, query_keep)))
        return _factors(q, k, exact_limit(q, k, keep, query_keep, num_landmarks), options, generator)


@documented(NystromOptions)
def nystrom_rows(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    queries: Int[Tensor, " r"],
    *,
    num_landmarks: int = 64,
    landmarks: Landmarks = "segment_means",
    pinv: Inverse = "iterative",
    pinv_steps: int = 6,
    z0: StartValue = "paper",
    scale: float | None = None,
    tolerance: float | None = None,
    keep: Bool[Tensor, "b n"] | None = None,
    key_keep: Bool[Tensor, "b s"] | None = None,
    query_keep: Bool[Tensor, "b n"] | None = None,
    generator: Generator = None,
) -> Float[Tensor, "b h r s"]:
    r"""Rows of the approximate attention matrix $\hat S$, for the queries at r positions: (r + m) x s numbers.

    The rows times V are the outputs of `nystrom_attention` at these queries, without the skip. Rows of an approximation
    need not be positive, nor sum to one.

    Args:
        **usual: Queries, keys, masks, generator and `NystromOptions`.
        queries: Positions of the queries, 0 ... n - 1.
    """
    check_generator(generator)
    options = NystromOptions(
        num_landmarks=num_landmarks, landmarks=landmarks, pinv=pinv, pinv_steps=pinv_steps, z0=z0, scale=scale
    )
    refuse_tolerance(tolerance, "rows are those of the approximation")
    keep, query_keep = check_inputs(q, k, k, Masks(keep, key_keep, query_keep))
    check_positions("queries", queries, q)
    q, k = (at_least_float32(x) for x in cast_for_autocast(q, k))
    if not all((q.shape[0], len(queries), k.shape[2])):
        return q.new_zeros(*q.shape[:2], len(queries), k.shape[2])
    with without_autocast(q):
        q, k = zero_masked(q, query_keep), zero_masked(k, keep)
        rows_of_q = q[:, :, queries]
        exact = softmax_rows(rows_of_q, k, keep=keep, scale=scale)
        limit = exact_limit(q, k, keep, query_keep, num_landmarks)
        if limit is None and all_are_short(q, k, num_landmarks):
            return exact
        factors = _factors(q, k, limit, options, generator)
        left = softmax_rows(rows_of_q, factors.k_landmarks, scale=scale)
        right = softmax_rows(factors.q_landmarks, k, keep=keep, scale=scale)
        rows = left @ factors.inverse @ right
        if limit is None:
            return rows
        return torch.where(limit.query_keep[:, None, queries, None], torch.where(limit.short, exact, rows), 0.0)


def _nystrom(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    v: Float[Tensor, "b h s e"],
    keep: Bool[Tensor, "b s"] | None,
    query_keep: Bool[Tensor, "b n"] | None,
    options: NystromOptions,
    generator: Generator,
    skip: Float[Tensor, "h 1 taps 1"] | None,
) -> Float[Tensor, "b h n e"]:
    if skip is not None:
        check_kernel(v, skip)
    if options.pinv == "exact" and skip is None and v.dtype == torch.float16:
        # Products with the inverse can overflow float16 even if the result does not.
        wide = _nystrom(q.float(), k.float(), v.float(), keep, query_keep, options, generator, None)
        return narrowed(wide, v.dtype)
    m, scale = options.num_landmarks, options.scale
    short, stretches = all_are_short(q, k, m), runs_in_stretches(q, k, v) and q.shape[2] >= _LONG
    if skip is not None and (short or not stretches):
        out = _nystrom(q, k, v, keep, query_keep, options, generator, None)
        # Without the mask: `attend` has put zeros into the values, and puts them into the sum.
        return depthwise_skip(v, skip, to=out)
    if short:
        return fused_softmax(q, k, v, keep=keep, scale=scale)
    limit, convolution = exact_limit(q, k, keep, query_keep, m), None
    if skip is not None:
        kernels = skip.to(v.dtype)[:, 0, :, 0]
        v, room = padded_values_and_buffer(v, kernels)
        convolution = room, v, kernels
    q_means = k_means = None
    if options.landmarks == "segment_means" and stretches and torch.is_grad_enabled():
        q, q_means = with_segment_means(q, m, keep=limit and limit.query_keep)
        k, k_means = with_segment_means(k, m, keep=limit and limit.keep)
    factors = _factors(q, k, limit, options, generator, q_means, k_means)
    right = fused_softmax(factors.q_landmarks.to(q.dtype), k, v, keep=keep, scale=scale)
    middle, k_landmarks = factors.inverse @ at_least_float32(right), factors.k_landmarks.to(k.dtype)
    if limit is None:
        return left_factor(q, k_landmarks, middle, None, scale, convolution)
    out = left_factor(q, k_landmarks, limit.values_as_middle(middle, v), limit.real_landmarks(), scale, convolution)
    return limit.results(out, right)


_by_loops = loops_operator("nystrom", _nystrom, NystromOptions)


def _by_kernels(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    v: Float[Tensor, "b h s e"],
    keep: Bool[Tensor, "b s"] | None,
    query_keep: Bool[Tensor, "b n"] | None,
    options: NystromOptions,
    generator: Generator,
    skip: Float[Tensor, "h 1 taps 1"] | None,
) -> Float[Tensor, "b h n e"]:
    from nystrom.gpu.landmark_attention import landmark_attention

    if skip is not None:
        check_kernel(v, skip)
    if all_are_short(q, k, options.num_landmarks):
        return attend(_nystrom, q, k, v, Masks(key_keep=keep, query_keep=query_keep), options, generator, skip)
    return landmark_attention(
        q,
        k,
        v,
        num_landmarks=options.num_landmarks,
        keep=keep,
        query_keep=query_keep,
        scale=score_scale(q, options.scale),
        pinv_steps=options.pinv_steps,
        z0=options.z0,
        skip=skip,
    )


def _choose(
    x: Float[Tensor, "b h n d"],
    keep: Bool[Tensor, "b n"] | None,
    options: NystromOptions,
    draws: Float[Tensor, " m"] | None,
) -> Float[Tensor, "b h m d"]:
    if options.landmarks == "kmeans":
        return kmeans(x, options.num_landmarks, keep=keep)
    if options.landmarks == "uniform":
        return uniform(x, options.num_landmarks, keep=keep, draws=draws)
    return segment_means(x, options.num_landmarks, keep=keep)


def _factors(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    limit: ExactLimit | None,
    options: NystromOptions,
    generator: Generator,
    q_means: Float[Tensor, "b h m d"] | None = None,
    k_means: Float[Tensor, "b h m d"] | None = None,
) -> NystromFactors:
    """The small matrices; segment means are reused if already computed."""
    m = options.num_landmarks
    draws = draw(m, generator, q.device) if options.landmarks == "uniform" else None
    q_landmarks = _choose(q, limit and limit.query_keep, options, draws) if q_means is None else q_means
    k_landmarks = _choose(k, limit and limit.keep, options, draws) if k_means is None else k_means
    # At most m tokens are their own means.
    if limit is not None and q_means is None:
        q_landmarks, k_landmarks = limit.queries_as_landmarks(q_landmarks, q), limit.keys_as_landmarks(k_landmarks, k)
    a = softmax_of_landmarks(q_landmarks, k_landmarks, scale=options.scale)
    if limit is not None:
        a = torch.where(limit.short, torch.eye(m, dtype=a.dtype, device=a.device), a)
    inverse = pinv(a, inverse=options.pinv, steps=options.pinv_steps, z0=options.z0)
    return NystromFactors(q_landmarks, k_landmarks, a, inverse)


def left_factor(
    q: Float[Tensor, "b h n d"],
    k_landmarks: Float[Tensor, "b h m d"],
    middle: Float[Tensor, "b h m e"],
    real: Bool[Tensor, "b m"] | None,
    scale: float | None,
    convolution: tuple[Float[Tensor, "b h n e"], Float[Tensor, "b h n e"], Float[Tensor, "h taps"]] | None = None,
) -> Float[Tensor, "b h n e"]:
    """The queries' softmax over the real landmarks, times the middle; plus the values convolved with kernels, if given.

    The convolution is given as memory for the result, the values and the kernels.
    """
    if convolution is not None:
        (room, v, w), scale = convolution, score_scale(q, scale)
        return landmark_sums(room, q, k_landmarks, middle, v, w, keep=real, scale=scale)
    if q.dtype != torch.float16:
        return fused_softmax(q, k_landmarks, middle.to(q.dtype), keep=real, scale=scale)
    # The inverse may carry values past the largest float16: scale them into range, and hold the result there.
    largest = torch.finfo(q.dtype).max
    shrink = (middle.detach().abs().amax(dim=(-2, -1), keepdim=True) / largest).clamp(min=1)
    out = fused_softmax(q, k_landmarks, (middle / shrink).to(q.dtype), keep=real, scale=scale)
    return (out.float() * shrink).clamp(-largest, largest).to(q.dtype)
