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
fused call, the sums over p are another: nothing of size n x m is stored.

**In logarithms.** $\rho$ spans more than the range of a dtype where scores are large. So each row f of the middle
is taken relative to a level $t_f$ of its own, which goes over to the weights:
$$\mathrm{out}_i = \frac{\sum_f p'_{if} (B' \rho' C)_f}{\sum_f p'_{if} (B' \rho' \mathbf 1)_f}, \qquad
B' = e^{-t} B e^t, \quad \rho'_f = e^{\ln \rho_f - t_f}, \quad p'_{if} \propto p_{if} e^{t_f}.$$
With $t_f = \max(\ln \rho_f, \max_g \ln \kappa_{fg} + t_g)$ neither $\rho'$ nor $e^{-t} \kappa e^t$ is above 1. The
inverse is taken of the matrix as scaled by these levels, so that its rounding is relative to the level of a row.

**Guard.** Rows of $\hat A$ may have a sum that is tiny or negative. A result is kept within the smallest and the
largest real value of its channel, where every softmax average lies: that never adds to the error, and ends the gradient
of rows that ran away. A row without a positive sum gives the mean of the values.

**Exact limit.** With m at least the number of real keys or queries, exact attention costs no more, and is
returned, sequence by sequence.

Source: Chen et al. (2021), arXiv:2111.00035, sections 4.2, 4.4 and Fig. 1, where it is called "Skyformer".
Departs from the paper: the ridge is added to the Gaussian matrix of the landmarks, with the scaling of Lemma 3, as
`skyformer` does, and so are landmarks drawn, one from each of m/2 segments instead of independently (Definition 1); the
guard. The paper advises against training with it: gradients through the inverse grow with the condition of A.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nystrom.attention.entry import attend
from nystrom.attention.exact_limit import exact_limit
from nystrom.attention.fused import fused_softmax
from nystrom.attention.methods.skyformer import mixed_landmarks
from nystrom.attention.options import SkyformerSoftmaxOptions, documented
from nystrom.attention.parts.by_heads import by_heads
from nystrom.attention.parts.logsumexp import softmax_and_logsumexp
from nystrom.checks import Inverse
from nystrom.kernels import gaussian_logarithm, half_norms
from nystrom.landmarks import all_are_short, draw
from nystrom.linalg.pinv import pinv_similar
from nystrom.precision import at_least_float32
from nystrom.shapes import Generator, Group, Masks, check_generator, score_scale

# Passes over the landmarks' kernel in which levels spread from landmark to landmark.
_LEVEL_STEPS = 8


@documented(SkyformerSoftmaxOptions)
def skyformer_softmax_attention(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    v: Float[Tensor, "b h s e"],
    *,
    num_landmarks: int = 128,
    gamma: float = 0.1,
    pinv: Inverse = "iterative",
    pinv_steps: int = 6,
    scale: float | None = None,
    keep: Bool[Tensor, "b n"] | None = None,
    key_keep: Bool[Tensor, "b s"] | None = None,
    query_keep: Bool[Tensor, "b n"] | None = None,
    cu_seqlens: Int[Tensor, " ends"] | None = None,
    generator: Generator = None,
    group: Group = None,
) -> Float[Tensor, "b h n e"]:
    """Approximate softmax attention with m landmarks, in time and memory linear in n and s; in float32 at least.

    Args:
        **usual: Tensors, masks, generator, group and `SkyformerSoftmaxOptions`.
    """
    check_generator(generator)
    options = SkyformerSoftmaxOptions(
        num_landmarks=num_landmarks, gamma=gamma, pinv=pinv, pinv_steps=pinv_steps, scale=scale
    )
    return attend(
        _skyformer_softmax, q, k, v, Masks(keep, key_keep, query_keep, cu_seqlens), options, generator, group=group
    )


def _skyformer_softmax(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    v: Float[Tensor, "b h s e"],
    keep: Bool[Tensor, "b s"] | None,
    query_keep: Bool[Tensor, "b n"] | None,
    options: SkyformerSoftmaxOptions,
    generator: Generator,
) -> Float[Tensor, "b h n e"]:
    m, scale = options.num_landmarks, score_scale(q, options.scale)
    if all_are_short(q, k, m):
        return fused_softmax(q, k, v, keep=keep, scale=scale)
    q, k, v = (at_least_float32(x) for x in (q, k, v))
    draws = draw(m, generator, q.device)
    return by_heads(lambda _, q, k, v: _by_landmarks(q, k, v, keep, query_keep, draws, options), q, k, v)


def _by_landmarks(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    v: Float[Tensor, "b h s e"],
    keep: Bool[Tensor, "b s"] | None,
    query_keep: Bool[Tensor, "b n"] | None,
    draws: Float[Tensor, " m"],
    options: SkyformerSoftmaxOptions,
) -> Float[Tensor, "b h n e"]:
    m, scale = options.num_landmarks, score_scale(q, options.scale)
    landmarks = mixed_landmarks(q, k, keep, query_keep, draws)
    limit = exact_limit(q, k, keep, query_keep, m)
    if limit is None:
        middle, sizes, _ = _middle(landmarks, k, v, None, scale, options)
        sums, total = _left(q, landmarks, sizes, middle, None, scale)
        return _guarded_ratio(sums, total, v, None)
    landmarks = limit.queries_as_landmarks(landmarks, q)
    middle, sizes, means = _middle(landmarks, k, v, limit.keep, scale, options)
    # Keys that are landmarks have no weight of their own, and their values come with a denominator of 1.
    middle = limit.values_as_middle(middle, F.pad(v, (0, 1), value=1.0))
    sizes = torch.where(limit.few_keys, 0.0, sizes)
    landmarks = limit.keys_as_landmarks(landmarks, k)
    sums, total = _left(q, landmarks, sizes, middle, limit.real_landmarks(), scale)
    return limit.results(_guarded_ratio(sums, total, v, limit.keep), means)


def _middle(
    landmarks: Float[Tensor, "b h m d"],
    k: Float[Tensor, "b h s d"],
    v: Float[Tensor, "b h s e"],
    keep: Bool[Tensor, "b s"] | None,
    scale: float,
    options: SkyformerSoftmaxOptions,
) -> tuple[Float[Tensor, "b h m f"], Float[Tensor, "b h m 1"], Float[Tensor, "b h m e"]]:
    """Sums of the queries over the landmarks: values, then the denominator, relative to a size; its logarithm, less
    that of the landmark's own factor; and the landmarks' own results.
    """
    means, logs = softmax_and_logsumexp(landmarks, k, v, keep=keep, scale=scale)
    norms = half_norms(landmarks, scale=scale)
    logs = logs - norms
    logs = logs - logs.detach().amax(dim=2, keepdim=True)
    # A solver needs float64 where the products of the iteration do not.
    wide = landmarks if options.pinv == "iterative" else landmarks.double()
    kernel = gaussian_logarithm(wide, wide, scale=scale)
    levels = _levels(logs.to(kernel.dtype), kernel)
    right = torch.exp(logs - levels) * F.pad(means, (0, 1), value=1.0)
    middle = _levelled_inverse(kernel, levels, options) @ right
    sizes = levels.to(norms.dtype) - norms
    return middle.to(means.dtype), sizes - sizes.detach().amax(dim=2, keepdim=True), means


@torch.no_grad()
def _levels(logs: Float[Tensor, "b h m 1"], kernel: Float[Tensor, "b h m m"]) -> Float[Tensor, "b h m 1"]:
    r"""Logarithms t of about the size of each row of the middle: $t \ge \ln \rho$, $t_f \ge \ln \kappa_{fg} + t_g$."""
    levels = logs
    for _ in range(_LEVEL_STEPS):
        levels = torch.maximum(levels, (kernel + levels.mT).amax(dim=-1, keepdim=True))
    # Levels that have not settled (long chains of near landmarks) move towards the largest of all, 0, as far as
    # the worst pair needs. Beyond the rounding of a level, that is: relative to a small rise it would be a large share.
    number = torch.finfo(levels.dtype)
    rise, limit = levels.mT - levels, -kernel - 4 * number.eps * levels.amin(dim=2, keepdim=True)
    share = torch.where(rise > limit, limit / rise.clamp(min=number.tiny), 1.0)
    return levels * share.amin(dim=(-2, -1), keepdim=True)


def _levelled_inverse(
    kernel: Float[Tensor, "b h m m"], levels: Float[Tensor, "b h m 1"], options: SkyformerSoftmaxOptions
) -> Float[Tensor, "b h m m"]:
    r"""$e^{-t} (\kappa + \gamma I)^{-1} e^t$ through the scaling of Lemma 3, from $\ln \kappa$."""
    ridge = options.gamma * torch.eye(kernel.shape[-1], dtype=kernel.dtype, device=kernel.device)
    plain = torch.exp(kernel) + ridge
    root = plain.sum(dim=-1, keepdim=True).rsqrt()
    # The levels' difference first: beside a level as such a small logarithm would be lost. An excess above 0 is
    # rounding, which must not decide whether there is a gradient.
    logs = kernel + (levels.mT - levels)
    levelled = root * (torch.exp(logs - logs.detach().clamp(min=0)) + ridge) * root.mT
    inverse = pinv_similar(levelled, root * plain * root.mT, inverse=options.pinv, steps=options.pinv_steps)
    return root * inverse * root.mT


def _left(
    q: Float[Tensor, "b h n d"],
    landmarks: Float[Tensor, "b h m d"],
    sizes: Float[Tensor, "b h m 1"],
    middle: Float[Tensor, "b h m f"],
    real: Bool[Tensor, "b m"] | None,
    scale: float,
) -> tuple[Float[Tensor, "b h n e"], Float[Tensor, "b h n 1"]]:
    """Sums over the landmarks: numerators, and the denominator, which came as the last column."""
    wide_q = torch.cat([scale * q, torch.ones_like(q[..., :1])], dim=-1)
    out = fused_softmax(wide_q, torch.cat([landmarks, sizes], dim=-1), middle, keep=real, scale=1.0)
    return out[..., :-1], out[..., -1:]


def _guarded_ratio(
    sums: Float[Tensor, "b h n e"],
    total: Float[Tensor, "b h n 1"],
    v: Float[Tensor, "b h s e"],
    keep: Bool[Tensor, "b s"] | None,
) -> Float[Tensor, "b h n e"]:
    """The ratio within the range of each channel's real values, and their mean where there is no positive total."""
    if keep is None:
        smallest, largest, mean = (f(v, dim=2, keepdim=True) for f in (torch.amin, torch.amax, torch.mean))
    else:
        real, count = keep[:, None, :, None], keep.sum(dim=-1)[:, None, None, None]
        smallest = torch.where(real, v, torch.inf).amin(dim=2, keepdim=True).masked_fill(count == 0, 0.0)
        largest = torch.where(real, v, -torch.inf).amax(dim=2, keepdim=True).masked_fill(count == 0, 0.0)
        mean = v.sum(dim=2, keepdim=True) / count.clamp(min=1)
    number = torch.finfo(total.dtype)
    positive = total > number.tiny / number.eps
    # Chosen before the division, so that a row without a ratio has no gradient through one.
    ratio = torch.where(positive, sums, 0.0) / torch.where(positive, total, 1.0)
    return torch.where(positive, ratio.clamp(smallest, largest), mean)
