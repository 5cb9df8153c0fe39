r"""Skyformer: kernelized attention in linear time by a Nyström method made for matrices that are not symmetric.

The Gaussian scores $C = \kappa(Q, K)$ are an off-diagonal block of the positive semidefinite matrix of all queries
and keys with themselves. m landmarks L are drawn from both, half from the queries and half from the keys, and
$$\hat C V = \kappa(Q, L)\; D^{-1/2} \bigl(D^{-1/2} (M + \gamma I) D^{-1/2}\bigr)^{-1} D^{-1/2}\; \kappa(L, K)\, V,
\qquad M = \kappa(L, L),\; D = \mathrm{diag}((M + \gamma I) \mathbf 1).$$
The scaling by D puts all singular values in (0, 1] (Lemma 3 says below 1, but $D^{1/2} \mathbf 1$ has
the eigenvalue 1), where the iteration of `nystrom.linalg.pinv` converges.

Both outer factors are sums of `kernelized`, one fused call each: nothing of size n x m is stored.

**Exact limit.** With m at least the number of real keys or queries, kernelized attention itself costs no more, and is
what is returned, sequence by sequence.

Source: Chen et al. (2021), arXiv:2111.00035, sections 4.2 and 4.4.
Departs from the authors' code: inputs are scaled by d^(-1/4), not 32^(-1/4); a landmark is drawn from each of m/2
segments of the real tokens, so that no token is drawn twice; norms are per matrix.
"""

from dataclasses import dataclass
from typing import get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from nystrom.attention.backend import Backend, check_backend, uses_triton
from nystrom.attention.methods.kernelized import gaussian_sum, kernelized_attention
from nystrom.checks import check_at_least, check_choice
from nystrom.kernels import gaussian_kernel
from nystrom.landmarks import even_draws, first_tokens, random_draws, ranks, take, uniform
from nystrom.linalg.pinv import Inverse, pinv
from nystrom.precision import cast_for_autocast, without_autocast
from nystrom.shapes import check_inputs, score_scale, zero_masked


@dataclass(frozen=True)
class SkyformerOptions:
    """Options of Skyformer.

    Attributes:
        num_landmarks: Landmarks m, half from the queries and half from the keys (the odd one from the keys).
        gamma: Ridge added to the landmarks' kernel matrix.
        pinv: "iterative", "ridge" or "exact".
        pinv_steps: Iterations of the iterative inverse.
        scale: Factor c in exp(-c |q - k|^2 / 2); None means 1 / sqrt(d).
        backend: "auto", "torch" or "triton" (kernels for a GPU, with the iterative inverse).
    """

    num_landmarks: int = 128
    gamma: float = 0.1
    pinv: Inverse = "iterative"
    pinv_steps: int = 6
    scale: float | None = None
    backend: Backend = "auto"

    def __post_init__(self):
        check_at_least("num_landmarks", self.num_landmarks, 2)
        check_choice("pinv", self.pinv, get_args(Inverse))
        check_at_least("pinv_steps", self.pinv_steps, 0)
        if not self.gamma > 0:
            raise ValueError(f"gamma is {self.gamma!r}; expected a positive number (the authors use 0.1).")
        check_backend(self.backend, {"pinv": (self.pinv, "iterative")})


def skyformer_attention(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    v: Float[Tensor, "b h s e"],
    *,
    num_landmarks: int = 128,
    keep: Bool[Tensor, "b s"] | None = None,
    query_keep: Bool[Tensor, "b n"] | None = None,
    scale: float | None = None,
    gamma: float = 0.1,
    pinv: Inverse = "iterative",
    pinv_steps: int = 6,
    generator: torch.Generator | None = None,
    backend: Backend = "auto",
) -> Float[Tensor, "b h n e"]:
    """Approximate kernelized attention with m landmarks, in time and memory linear in n and s.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        num_landmarks: Landmarks m; a sequence of at most m real keys or queries gets kernelized attention itself.
        keep: Real keys; None where all are.
        query_keep: Real queries; None means `keep` where n == s, else all. Other queries give zeros.
        scale: Factor c in exp(-c |q - k|^2 / 2); None means 1 / sqrt(d).
        gamma: Ridge added to the landmarks' kernel matrix.
        pinv: "iterative", "ridge" or "exact".
        pinv_steps: Iterations of the iterative inverse.
        generator: Source of the draws; None takes tokens spread evenly, the same each time.
        backend: "auto", "torch" or "triton"; an explicit choice that cannot run raises.

    Raises:
        ValueError: Shapes, dtypes, masks or options that do not fit.
    """
    options = SkyformerOptions(num_landmarks, gamma, pinv, pinv_steps, scale, backend)
    draws = random_draws(num_landmarks, generator, q.device)
    return _attend(q, k, v, keep, query_keep, draws, options)


def _attend(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    v: Float[Tensor, "b h s e"],
    keep: Bool[Tensor, "b s"] | None,
    query_keep: Bool[Tensor, "b n"] | None,
    draws: Float[Tensor, " m"] | None,
    options: SkyformerOptions,
) -> Float[Tensor, "b h n e"]:
    keep, query_keep = check_inputs(q, k, v, keep, query_keep)
    m, n, s = options.num_landmarks, q.shape[2], k.shape[2]
    scale = score_scale(q, options.scale)
    known = isinstance(n, int) and isinstance(s, int)
    if known and min(n, s) <= m:
        return kernelized_attention(q, k, v, keep=keep, query_keep=query_keep, scale=scale)
    q, k, v = cast_for_autocast(q, k, v)
    dtype = v.dtype
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
                scale=scale,
                pinv_steps=options.pinv_steps,
                gamma=options.gamma,
                draws=draws,
            )
        q, k, v = zero_masked(q, query_keep), zero_masked(k, keep), zero_masked(v, keep)
        draws = even_draws(m, q.device) if draws is None else draws
        half = m // 2
        landmarks = torch.cat(
            [
                uniform(q, half, keep=query_keep, draws=draws[:half]),
                uniform(k, m - half, keep=keep, draws=draws[half:]),
            ],
            dim=2,
        )
        inverse = ridged_inverse(gaussian_kernel(landmarks, landmarks, scale=scale), options)
        if known and keep is None and query_keep is None:
            right = gaussian_sum(landmarks, k, v, scale=scale)
            return gaussian_sum(q, landmarks, inverse @ right, scale=scale).to(dtype)
        keep = _all_real(k) if keep is None else keep
        query_keep = _all_real(q) if query_keep is None else query_keep
        # A sequence of at most m real keys: they are its landmarks and their values the middle.
        few_keys = (keep.sum(-1) <= m)[:, None]
        # A sequence of at most m real queries: they are its landmarks, and the right factor holds their results.
        few_queries = (query_keep.sum(-1) <= m)[:, None] & ~few_keys
        k_place, k_real = first_tokens(keep, m)
        q_place, _ = first_tokens(query_keep, m)
        landmarks = torch.where(few_queries[..., None, None], take(q, q_place).to(landmarks.dtype), landmarks)
        right = gaussian_sum(landmarks, k, v, keep=keep, scale=scale)
        own = zero_masked(take(v, k_place), k_real).to(right.dtype)
        middle = torch.where(few_keys[..., None, None], own, inverse @ right)
        landmarks = torch.where(few_keys[..., None, None], take(k, k_place).to(landmarks.dtype), landmarks)
        out = gaussian_sum(q, landmarks, middle, keep=k_real | ~few_keys, scale=scale)
        results = take(right, ranks(query_keep)[0].clamp(0, m - 1))
        out = torch.where(few_queries[..., None, None], results, out)
        return zero_masked(out, query_keep).to(dtype)


def ridged_inverse(kernel: Float[Tensor, "b h m m"], options: SkyformerOptions) -> Float[Tensor, "b h m m"]:
    """Inverse of M + gamma I through the scaling of Lemma 3."""
    ridged = kernel + options.gamma * torch.eye(kernel.shape[-1], dtype=kernel.dtype, device=kernel.device)
    root = ridged.sum(dim=-1).rsqrt()
    scaled = root[..., :, None] * ridged * root[..., None, :]
    return root[..., :, None] * pinv(scaled, inverse=options.pinv, steps=options.pinv_steps) * root[..., None, :]


def _all_real(x: Float[Tensor, "b h n d"]) -> Bool[Tensor, "b n"]:
    return torch.ones(x.shape[0], x.shape[2], dtype=torch.bool, device=x.device)


class SkyformerHeads(nn.Module):
    """Skyformer over head-split tensors; has no parameters.

    In training, landmarks are drawn from torch's global generator; in evaluation they are spread evenly.
    """

    def __init__(self, num_heads: int, head_dim: int, options: SkyformerOptions | None = None):
        super().__init__()
        self.options = SkyformerOptions() if options is None else options

    def forward(
        self,
        q: Float[Tensor, "b h n d"],
        k: Float[Tensor, "b h s d"],
        v: Float[Tensor, "b h s e"],
        *,
        keep: Bool[Tensor, "b s"] | None = None,
        query_keep: Bool[Tensor, "b n"] | None = None,
    ) -> Float[Tensor, "b h n e"]:
        """Attend; see `skyformer_attention`."""
        draws = torch.rand(self.options.num_landmarks, device=q.device) if self.training else None
        return _attend(q, k, v, keep, query_keep, draws, self.options)
