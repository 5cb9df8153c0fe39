r"""Softmax attention by the modified Nyström method of Skyformer.

The unnormalised scores $A = \mathrm{SM}(Q, K)$ are an off-diagonal block of the positive semidefinite matrix of all
queries and keys with themselves. m landmarks L are drawn from both, half from the queries and half from the keys, and
$$\hat A = \mathrm{SM}(Q, L)\, \mathrm{SM}(L, L)^+ \mathrm{SM}(L, K), \qquad
\hat D = \mathrm{diag}(\hat A \mathbf 1), \qquad \mathrm{out} = \hat D^{-1} \hat A V.$$

These exponentials overflow. By Lemma 1, $\mathrm{SM}(x, y) = e^{c \|x\|^2 / 2}\, \kappa(x, y)\, e^{c \|y\|^2 / 2}$: the
factors of the landmarks cancel against the inverse, those of the queries against $\hat D$, and what is left are
$$\mathrm{out}_i = \frac{\sum_f p_{if} (B \rho C)_f}{\sum_f p_{if} (B \rho \mathbf 1)_f}, \qquad
B = (\kappa(L, L) + \gamma I)^{-1}, \qquad C = \mathrm{softmax}(c\, L K^\top) V,$$
with $\rho_f = \exp(\ell_f - \tfrac c2 \|l_f\|^2)$, $\ell_f$ the logarithm of the normaliser of row f of C, relative to
the largest of them, and $p_i = \mathrm{softmax}_f(c\, q_i^\top l_f - \tfrac c2 \|l_f\|^2)$. C with $\ell$ is one
fused call, the sums over p are another: nothing of size n x m is stored, and no exponential is above 1.

**Guard.** Rows of $\hat A$ may have a sum that is tiny or negative. A result is kept within the smallest and the
largest real value of its channel, where every softmax average lies: that never adds to the error, and ends the gradient
of rows that ran away. A row without a positive sum gives the mean of the values.

**Exact limit.** With m at least the number of real keys or queries, exact attention costs no more, and is what is
returned, sequence by sequence.

Source: Chen et al. (2021), arXiv:2111.00035, sections 4.2, 4.4 and Fig. 1, where it stands as "Skyformer".
Departs from the paper: the ridge is added to the Gaussian matrix of the landmarks, with the scaling of Lemma 3, as
`skyformer` does; a landmark is drawn from each of m/2 segments of the real tokens, so that no token is drawn twice; the
guard. The paper advises against training with it: gradients through the inverse grow with the condition of A.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from nystrom.attention.fused import fused_softmax
from nystrom.attention.logsumexp import softmax_and_logsumexp
from nystrom.attention.methods.skyformer import SkyformerOptions, ridged_inverse
from nystrom.attention.methods.softmax import softmax_attention
from nystrom.kernels import gaussian_kernel
from nystrom.landmarks import even_draws, first_tokens, random_draws, ranks, take, uniform
from nystrom.linalg.pinv import Inverse
from nystrom.precision import at_least_float32, cast_for_autocast, without_autocast
from nystrom.shapes import check_inputs, score_scale, zero_masked


@dataclass(frozen=True)
class SkyformerSoftmaxOptions(SkyformerOptions):
    """Options of softmax attention by the modified Nyström method.

    Attributes:
        num_landmarks: Landmarks m, half from the queries and half from the keys (the odd one from the keys).
        gamma: Ridge added to the landmarks' kernel matrix.
        pinv: "iterative", "ridge" or "exact".
        pinv_steps: Iterations of the iterative inverse.
        scale: Factor on the scores, not negative; None means 1 / sqrt(d).
    """

    def __post_init__(self):
        super().__post_init__()
        if self.scale is not None and not self.scale >= 0:
            raise ValueError(f"scale is {self.scale!r}; expected a number of at least 0, for a kernel of distances.")


def skyformer_softmax_attention(
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
) -> Float[Tensor, "b h n e"]:
    """Approximate softmax attention with m landmarks, in time and memory linear in n and s; in float32 at least.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        num_landmarks: Landmarks m; a sequence of at most m real keys or queries gets exact attention.
        keep: Real keys; None where all are.
        query_keep: Real queries; None means `keep` where n == s, else all. Other queries give zeros.
        scale: Factor on the scores, not negative; None means 1 / sqrt(d).
        gamma: Ridge added to the landmarks' kernel matrix.
        pinv: "iterative", "ridge" or "exact".
        pinv_steps: Iterations of the iterative inverse.
        generator: Source of the draws; None takes tokens spread evenly, the same each time.

    Raises:
        ValueError: Shapes, dtypes, masks or options that do not fit.
    """
    options = SkyformerSoftmaxOptions(num_landmarks, gamma, pinv, pinv_steps, scale)
    draws = random_draws(num_landmarks, generator, q.device)
    return _attend(q, k, v, keep, query_keep, draws, options)


class _Sides(NamedTuple):
    keep: Bool[Tensor, "b s"]
    query_keep: Bool[Tensor, "b n"]
    few_keys: Bool[Tensor, "b 1 1 1"]
    few_queries: Bool[Tensor, "b 1 1 1"]


def _attend(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    v: Float[Tensor, "b h s e"],
    keep: Bool[Tensor, "b s"] | None,
    query_keep: Bool[Tensor, "b n"] | None,
    draws: Float[Tensor, " m"] | None,
    options: SkyformerSoftmaxOptions,
) -> Float[Tensor, "b h n e"]:
    keep, query_keep = check_inputs(q, k, v, keep, query_keep)
    m, n, s = options.num_landmarks, q.shape[2], k.shape[2]
    scale = score_scale(q, options.scale)
    known = isinstance(n, int) and isinstance(s, int)
    if known and min(n, s) <= m:
        return softmax_attention(q, k, v, keep=keep, query_keep=query_keep, scale=scale)
    q, k, v = cast_for_autocast(q, k, v)
    dtype = v.dtype
    with without_autocast(q):
        q, k, v = zero_masked(q, query_keep), zero_masked(k, keep), zero_masked(v, keep)
        q, k, v = (at_least_float32(x) for x in (q, k, v))
        landmarks = _landmarks(q, k, keep, query_keep, draws, m)
        if known and keep is None and query_keep is None:
            middle, _ = _middle(landmarks, k, v, None, scale, options)
            sums, total = _left(q, landmarks, _half_norms(landmarks, scale), middle, None, scale)
            return _guarded_ratio(sums, total, v, None).to(dtype)
        sides = _sides(q, k, keep, query_keep, m)
        # A sequence of at most m real queries: they are its landmarks, and the means are their results.
        q_place, _ = first_tokens(sides.query_keep, m)
        landmarks = torch.where(sides.few_queries, take(q, q_place), landmarks)
        middle, means = _middle(landmarks, k, v, sides.keep, scale, options)
        # A sequence of at most m real keys: they are its landmarks without a weight, and their values the middle.
        k_place, k_real = first_tokens(sides.keep, m)
        own = F.pad(zero_masked(take(v, k_place), k_real), (0, 1), value=1.0)
        middle = torch.where(sides.few_keys, own, middle)
        norms = torch.where(sides.few_keys, 0.0, _half_norms(landmarks, scale))
        landmarks = torch.where(sides.few_keys, take(k, k_place), landmarks)
        sums, total = _left(q, landmarks, norms, middle, k_real | ~sides.few_keys[:, 0, :, 0], scale)
        out = _guarded_ratio(sums, total, v, sides.keep)
        results = take(means, ranks(sides.query_keep)[0].clamp(0, m - 1))
        out = torch.where(sides.few_queries, results, out)
        return zero_masked(out, query_keep).to(dtype)


def _sides(q: Tensor, k: Tensor, keep: Tensor | None, query_keep: Tensor | None, m: int) -> _Sides:
    """Both masks, and which sequences have at most m real keys or, these aside, queries."""
    keep = _all_real(k) if keep is None else keep
    query_keep = _all_real(q) if query_keep is None else query_keep
    few_keys, few_queries = ((x.sum(dim=-1) <= m)[:, None, None, None] for x in (keep, query_keep))
    return _Sides(keep, query_keep, few_keys, few_queries & ~few_keys)


def _landmarks(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    keep: Bool[Tensor, "b s"] | None,
    query_keep: Bool[Tensor, "b n"] | None,
    draws: Float[Tensor, " m"] | None,
    m: int,
) -> Float[Tensor, "b h m d"]:
    draws = even_draws(m, q.device) if draws is None else draws
    half = m // 2
    from_queries = uniform(q, half, keep=query_keep, draws=draws[:half])
    return torch.cat([from_queries, uniform(k, m - half, keep=keep, draws=draws[half:])], dim=2)


def _middle(
    landmarks: Float[Tensor, "b h m d"],
    k: Float[Tensor, "b h s d"],
    v: Float[Tensor, "b h s e"],
    keep: Bool[Tensor, "b s"] | None,
    scale: float,
    options: SkyformerSoftmaxOptions,
) -> tuple[Float[Tensor, "b h m f"], Float[Tensor, "b h m e"]]:
    """What the queries sum over the landmarks (values, then the denominator), and the landmarks' own results."""
    means, logs = softmax_and_logsumexp(landmarks, k, v, keep=keep, scale=scale)
    sizes = logs - _half_norms(landmarks, scale)
    sizes = torch.exp(sizes - sizes.detach().amax(dim=2, keepdim=True))
    right = sizes * F.pad(means, (0, 1), value=1.0)
    # Scores between far clouds of queries and of keys are below the rounding of a solver in float32, which would then
    # decide; the products of the iteration keep them.
    wide = landmarks if options.pinv == "iterative" else landmarks.double()
    inverse = ridged_inverse(gaussian_kernel(wide, wide, scale=scale), options)
    return (inverse @ right.to(inverse.dtype)).to(right.dtype), means


def _left(
    q: Float[Tensor, "b h n d"],
    landmarks: Float[Tensor, "b h m d"],
    norms: Float[Tensor, "b h m 1"],
    middle: Float[Tensor, "b h m f"],
    real: Bool[Tensor, "b m"] | None,
    scale: float,
) -> tuple[Float[Tensor, "b h n e"], Float[Tensor, "b h n 1"]]:
    """Sums over the landmarks: numerators, and the denominator, which came as the last column."""
    wide_q = torch.cat([scale * q, torch.ones_like(q[..., :1])], dim=-1)
    out = fused_softmax(wide_q, torch.cat([landmarks, -norms], dim=-1), middle, keep=real, scale=1.0)
    return out[..., :-1], out[..., -1:]


def _guarded_ratio(
    sums: Float[Tensor, "b h n e"],
    total: Float[Tensor, "b h n 1"],
    v: Float[Tensor, "b h s e"],
    keep: Bool[Tensor, "b s"] | None,
) -> Float[Tensor, "b h n e"]:
    """The ratio within the range of each channel's real values, and their mean where there is no positive total."""
    if keep is None:
        least, most, mean = (f(v, dim=2, keepdim=True) for f in (torch.amin, torch.amax, torch.mean))
    else:
        real, count = keep[:, None, :, None], keep.sum(dim=-1)[:, None, None, None]
        least = torch.where(real, v, torch.inf).amin(dim=2, keepdim=True).masked_fill(count == 0, 0.0)
        most = torch.where(real, v, -torch.inf).amax(dim=2, keepdim=True).masked_fill(count == 0, 0.0)
        mean = v.sum(dim=2, keepdim=True) / count.clamp(min=1)
    number = torch.finfo(total.dtype)
    positive = total > number.tiny / number.eps
    # Chosen before the division, so that a row without a ratio has no gradient through one.
    ratio = torch.where(positive, sums, 0.0) / torch.where(positive, total, 1.0)
    return torch.where(positive, ratio.clamp(least, most), mean)


def _half_norms(x: Float[Tensor, "b h m d"], scale: float) -> Float[Tensor, "b h m 1"]:
    # An infinite norm would meet another in a difference.
    return (0.5 * scale * x.square().sum(dim=-1, keepdim=True)).clamp(max=torch.finfo(x.dtype).max / 8)


def _all_real(x: Float[Tensor, "b h n d"]) -> Bool[Tensor, "b n"]:
    return torch.ones(x.shape[0], x.shape[2], dtype=torch.bool, device=x.device)


class SkyformerSoftmaxHeads(nn.Module):
    """Softmax attention by the modified Nyström method over head-split tensors; has no parameters.

    In training, landmarks are drawn from torch's global generator; in evaluation they are spread evenly.
    """

    def __init__(self, num_heads: int, head_dim: int, options: SkyformerSoftmaxOptions | None = None):
        super().__init__()
        self.options = SkyformerSoftmaxOptions() if options is None else options

    def forward(
        self,
        q: Float[Tensor, "b h n d"],
        k: Float[Tensor, "b h s d"],
        v: Float[Tensor, "b h s e"],
        *,
        keep: Bool[Tensor, "b s"] | None = None,
        query_keep: Bool[Tensor, "b n"] | None = None,
    ) -> Float[Tensor, "b h n e"]:
        """Attend; see `skyformer_softmax_attention`."""
        draws = torch.rand(self.options.num_landmarks, device=q.device) if self.training else None
        return _attend(q, k, v, keep, query_keep, draws, self.options)
