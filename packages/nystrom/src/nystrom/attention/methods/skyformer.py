r"""Skyformer: kernelized attention in linear time, by a Nyström method for matrices that are not symmetric.

The scores $C = \kappa(Q, K)$ are an off-diagonal block of the positive semidefinite matrix of all queries
and keys with themselves. m landmarks L are drawn from both, half from the queries and half from the keys, and
$$\hat C V = \kappa(Q, L)\; D^{-1/2} \bigl(D^{-1/2} (M + \gamma I) D^{-1/2}\bigr)^{-1} D^{-1/2}\; \kappa(L, K)\, V,
\qquad M = \kappa(L, L),\; D = \mathrm{diag}((M + \gamma I) \mathbf 1).$$
The scaling by D puts all singular values in (0, 1] (Lemma 3 says below 1, but $D^{1/2} \mathbf 1$ has
the eigenvalue 1), where the iteration of `nystrom.linalg.pinv` converges.

Both outer factors are sums of `kernelized`, for the Gaussian kernel one fused call each: nothing of size n x m is
stored. Another kernel of `kernelized` may replace it: section 4.2 only asks for a positive semidefinite one.

**Exact limit.** With m at least the number of real keys or queries, kernelized attention itself costs no more and is
returned, for each sequence independently.

Source: Chen et al. (2021), arXiv:2111.00035, sections 4.2 and 4.4.
Departs from Definition 1, whose m columns are drawn independently from all queries and keys, as Theorem 2 asks: a
landmark is drawn from each of m/2 segments of the real queries and of the real keys, so that no token is drawn twice.
Departs from the authors' code: inputs are scaled by d^(-1/4), not 32^(-1/4); norms are per matrix.
"""

import functools

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nystrom.attention.entry import attend
from nystrom.attention.exact_limit import exact_limit
from nystrom.attention.methods.kernelized import sum_by_kernel
from nystrom.attention.options import SkyformerOptions, SkyformerSoftmaxOptions, documented
from nystrom.attention.parts.by_heads import by_heads
from nystrom.checks import Backend, Inverse, Kernel
from nystrom.kernels import KERNELS
from nystrom.landmarks import all_are_short, draw, middle_of, uniform, within_reach
from nystrom.linalg.pinv import pinv
from nystrom.shapes import Generator, Group, Masks, check_generator, score_scale


@documented(SkyformerOptions)
def skyformer_attention(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    v: Float[Tensor, "b h s e"],
    *,
    num_landmarks: int = 128,
    kernel: Kernel = "gaussian",
    gamma: float = 0.1,
    pinv: Inverse = "iterative",
    pinv_steps: int = 6,
    scale: float | None = None,
    backend: Backend = "auto",
    keep: Bool[Tensor, "b n"] | None = None,
    key_keep: Bool[Tensor, "b s"] | None = None,
    query_keep: Bool[Tensor, "b n"] | None = None,
    cu_seqlens: Int[Tensor, " ends"] | None = None,
    generator: Generator = None,
    group: Group = None,
) -> Float[Tensor, "b h n e"]:
    """Approximate kernelized attention with m landmarks, in time and memory linear in n and s.

    Args:
        **usual: Tensors, masks, generator, group and `SkyformerOptions`.
    """
    check_generator(generator)
    options = SkyformerOptions(
        num_landmarks=num_landmarks,
        kernel=kernel,
        gamma=gamma,
        pinv=pinv,
        pinv_steps=pinv_steps,
        scale=scale,
        backend=backend,
    )
    masks = Masks(keep, key_keep, query_keep, cu_seqlens)
    return attend(_skyformer, q, k, v, masks, options, generator, kernels=_by_kernels, group=group)


def _skyformer(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    v: Float[Tensor, "b h s e"],
    keep: Bool[Tensor, "b s"] | None,
    query_keep: Bool[Tensor, "b n"] | None,
    options: SkyformerOptions,
    generator: Generator,
) -> Float[Tensor, "b h n e"]:
    m, scale = options.num_landmarks, score_scale(q, options.scale)
    if all_are_short(q, k, m):
        return sum_by_kernel(q, k, v, keep=keep, kernel=options.kernel, scale=scale)
    draws = draw(m, generator, q.device)
    return by_heads(lambda _, q, k, v: _by_landmarks(q, k, v, keep, query_keep, draws, options), q, k, v)


def _by_landmarks(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    v: Float[Tensor, "b h s e"],
    keep: Bool[Tensor, "b s"] | None,
    query_keep: Bool[Tensor, "b n"] | None,
    draws: Float[Tensor, " m"],
    options: SkyformerOptions,
) -> Float[Tensor, "b h n e"]:
    m, scale = options.num_landmarks, score_scale(q, options.scale)
    weigh = functools.partial(sum_by_kernel, kernel=options.kernel, scale=scale)
    landmarks = mixed_landmarks(q, k, keep, query_keep, draws)
    inverse = ridged_inverse(kernel_of_landmarks(landmarks, options.kernel, scale), options)
    limit = exact_limit(q, k, keep, query_keep, m)
    if limit is None:
        right = weigh(landmarks, k, v)
        return weigh(q, landmarks, inverse @ right)
    landmarks = limit.queries_as_landmarks(landmarks, q)
    right = weigh(landmarks, k, v, keep=limit.keep)
    values = limit.values_as_middle(inverse @ right, v)
    landmarks = limit.keys_as_landmarks(landmarks, k)
    out = weigh(q, landmarks, values, keep=limit.real_landmarks())
    return limit.results(out, right)


def _by_kernels(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    v: Float[Tensor, "b h s e"],
    keep: Bool[Tensor, "b s"] | None,
    query_keep: Bool[Tensor, "b n"] | None,
    options: SkyformerOptions,
    generator: Generator,
) -> Float[Tensor, "b h n e"]:
    from nystrom.gpu.landmark_attention import landmark_attention

    m, scale = options.num_landmarks, score_scale(q, options.scale)
    if all_are_short(q, k, m):
        return attend(_skyformer, q, k, v, Masks(key_keep=keep, query_keep=query_keep), options, generator)
    return landmark_attention(
        q,
        k,
        v,
        num_landmarks=m,
        keep=keep,
        query_keep=query_keep,
        scale=scale,
        pinv_steps=options.pinv_steps,
        gamma=options.gamma,
        draws=None if generator is None else draw(m, generator, q.device),
    )


def mixed_landmarks(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    keep: Bool[Tensor, "b s"] | None,
    query_keep: Bool[Tensor, "b n"] | None,
    draws: Float[Tensor, " m"],
) -> Float[Tensor, "b h m d"]:
    """Half of the landmarks from segments of the queries, half from segments of the keys, in float32 at least."""
    m = draws.shape[0]
    half = m // 2
    from_queries = uniform(q, half, keep=query_keep, draws=draws[:half])
    return within_reach(torch.cat([from_queries, uniform(k, m - half, keep=keep, draws=draws[half:])], dim=2))


def kernel_of_landmarks(landmarks: Float[Tensor, "b h m d"], kernel: Kernel, scale: float) -> Float[Tensor, "b h m m"]:
    """The kernel of all pairs of landmarks; their common offset, which no kernel sees, is removed: it costs digits."""
    landmarks = landmarks - middle_of(landmarks)
    return KERNELS[kernel](landmarks, landmarks, scale=scale)


def ridged_inverse(
    kernel: Float[Tensor, "b h m m"], options: SkyformerOptions | SkyformerSoftmaxOptions
) -> Float[Tensor, "b h m m"]:
    """Inverse of M + gamma I through the scaling of Lemma 3."""
    ridged = kernel + options.gamma * torch.eye(kernel.shape[-1], dtype=kernel.dtype, device=kernel.device)
    root = ridged.sum(dim=-1).rsqrt()
    scaled = root[..., :, None] * ridged * root[..., None, :]
    return root[..., :, None] * pinv(scaled, inverse=options.pinv, steps=options.pinv_steps) * root[..., None, :]
