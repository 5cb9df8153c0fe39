r"""Kernelized attention: a kernel in place of the softmax structure, without a normaliser.

$$\mathrm{out}_i = \sum_j \kappa_{ij} v_j, \qquad \kappa_{ij} = \exp(-\tfrac{c}{2} \|q_i - k_j\|^2)$$
with $c = 1 / \sqrt d$, which is $\kappa(q / d^{1/4}, k / d^{1/4})$. The Gaussian kernel is the paper's; Laplace's and
two of the Matérn class, functions of $\sqrt c\, \|q - k\|$, may replace it.

With the Gaussian kernel one fused softmax call computes the sum. Widen queries and keys to
$q' = (q, -\tfrac12 \|q\|^2, 1)$ and $k' = (k, 1, -\tfrac12 \|k\|^2)$, so that $c\, q'^\top k' = \ln \kappa \le 0$;
add one null key of score 0, whose weight $w_i = 1 / (1 + \sum_j \kappa_{ij})$ comes back through a value column of
its own. Softmax over all of them gives $\sum_j \kappa_{ij} v_j\, w_i$; dividing by $w_i$ undoes the normalisation.
Nothing of size n x s is stored, and the weights never overflow. Time stays quadratic; `skyformer` is its linear
approximation.

For tokens near each other, norms and product nearly cancel, but their rounding errors do not. So tokens are taken
relative to the middle of the keys, and if there are few channels, each of several groups has two columns of its own.

**Kernels of the distance** are computed from differences, not from a matrix product, so the distance of equal tokens is
exactly zero; on a CPU this takes several times as long as the fused call. The n x s weights exist for only a few
queries at a time: a few times as many numbers as the queries or keys have. The backward pass computes them
again. The plain formula, which stores n x s numbers and raises for a second derivative (see `nystrom.kernels`), is used
in a compiler, since the number of stretches would become part of its graph, inside `torch.func`, and if a graph of the
backward pass is recorded.

Not normalised: with $\|q - k\|$ large for every key, output and gradient vanish.

Source: Chen et al. (2021), arXiv:2111.00035, eq. (3).
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nystrom.attention.entry import attend
from nystrom.attention.fused import fused_softmax
from nystrom.attention.options import KernelizedOptions, documented
from nystrom.autograd_modes import needs_graph, pull_back
from nystrom.checks import Kernel
from nystrom.kernels import KERNELS, half_norms
from nystrom.landmarks import middle_of
from nystrom.precision import at_least_float32
from nystrom.shapes import Group, Masks, score_scale

# In few channels a distance may be far below the norms of its two tokens, whose rounding is then an error of the
# distance. With groups of channels the running sum after each group is a distance itself, and norms cancel early. In
# many channels distances are about as large as norms, and one group is enough.
_FEW_CHANNELS = 16
_GROUPS = 4


@documented(KernelizedOptions)
def kernelized_attention(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    v: Float[Tensor, "b h s e"],
    *,
    kernel: Kernel = "gaussian",
    scale: float | None = None,
    keep: Bool[Tensor, "b n"] | None = None,
    key_keep: Bool[Tensor, "b s"] | None = None,
    query_keep: Bool[Tensor, "b n"] | None = None,
    cu_seqlens: Int[Tensor, " ends"] | None = None,
    group: Group = None,
) -> Float[Tensor, "b h n e"]:
    """Attend by a kernel over real keys, in memory linear in n; computed in float32 at least.

    Args:
        **usual: Tensors, masks, group and `KernelizedOptions`.
    """
    return attend(
        _kernelized,
        q,
        k,
        v,
        Masks(keep, key_keep, query_keep, cu_seqlens),
        KernelizedOptions(kernel=kernel, scale=scale),
        group=group,
    )


def _kernelized(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    v: Float[Tensor, "b h s e"],
    keep: Bool[Tensor, "b s"] | None,
    query_keep: Bool[Tensor, "b n"] | None,
    options: KernelizedOptions,
) -> Float[Tensor, "b h n e"]:
    return sum_by_kernel(q, k, v, keep=keep, kernel=options.kernel, scale=score_scale(q, options.scale))


def sum_by_kernel(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    v: Float[Tensor, "b h s e"],
    *,
    keep: Bool[Tensor, "b s"] | None = None,
    kernel: Kernel,
    scale: float,
) -> Float[Tensor, "b h n e"]:
    """Sum of values weighted by a kernel, in float32 at least; values of masked keys must hold zeros."""
    if kernel == "gaussian":
        return gaussian_sum(q, k, v, keep=keep, scale=scale)
    q, k, v = (at_least_float32(x) for x in (q, k, v))
    # Masked keys have values of zero, so that their weights do not matter.
    return sum_by_distance(q, k, v, kernel=kernel, scale=scale)


def gaussian_sum(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    v: Float[Tensor, "b h s e"],
    *,
    keep: Bool[Tensor, "b s"] | None = None,
    scale: float | None = None,
) -> Float[Tensor, "b h n e"]:
    """Sum of values weighted by the Gaussian kernel, in one fused call and in float32 at least."""
    scale = score_scale(q, scale)
    q, k, v = (at_least_float32(x) for x in (q, k, v))
    # No distance changes where all tokens move alike.
    centre = middle_of(k, keep)
    q, k = _widen(q - centre, ones_first=False), _widen(k - centre, ones_first=True)
    # The null key comes last, and a value column of its own gives its weight. One width for all spares copies.
    e = v.shape[-1]
    width = max(q.shape[-1], e + 1)
    null = F.pad(v.new_ones(1, 1), (e, width - e - 1)).expand(*v.shape[:2], -1, -1)
    v = torch.cat([F.pad(v, (0, width - e)), null], dim=2)
    k = F.pad(k, (0, 0, 0, 1))
    # Joined, not padded: torch's C++ code generator mixes up the types of a padded mask.
    keep = None if keep is None else torch.cat([keep, torch.ones_like(keep[:, :1])], dim=1)
    out = fused_softmax(q, k, v, keep=keep, scale=scale)
    # The weight is at least 1 / (1 + s); rounding of huge norms may push it below.
    return out[..., :e] / out[..., e : e + 1].clamp(min=1 / k.shape[-2])


def _widen(x: Float[Tensor, "b h n d"], *, ones_first: bool) -> Float[Tensor, "b h n wide"]:
    """Tokens in groups of channels, each group with two columns: minus half its squared norm, and ones."""
    if x.shape[-1] <= _FEW_CHANNELS:
        width = -(-x.shape[-1] // _GROUPS)
        x = F.pad(x, (0, -x.shape[-1] % width)).unflatten(-1, (-1, width))
    else:
        x = x[..., None, :]
    norms = -half_norms(x)
    ones = torch.ones_like(norms)
    return torch.cat([x, ones, norms] if ones_first else [x, norms, ones], dim=-1).flatten(-2)


# Weights held at a time: at least _FEWEST, or a few times the numbers of the queries or keys if that is more, but no
# more than fit into a cache.
_FEWEST = 2**14
_TIMES_TOKENS = 4
_MOST = 2**20


def sum_by_distance(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    v: Float[Tensor, "b h s e"],
    *,
    kernel: Kernel,
    scale: float,
) -> Float[Tensor, "b h n e"]:
    """Sum the values of all keys, zeros where not real, each weighted by the kernel; in float32 or float64."""
    if torch.compiler.is_compiling() or not all(isinstance(x.shape[2], int) for x in (q, k)):
        return _weighed(q, k, v, KERNELS[kernel], scale)
    return _SumByDistance.apply(q, k, v, KERNELS[kernel], scale)


def _weighed(q: Tensor, k: Tensor, v: Tensor, kernel: Callable[..., Tensor], scale: float) -> Tensor:
    return kernel(q, k, scale=scale) @ v


def _stretch(q: Tensor, k: Tensor) -> int:
    """How many queries to take at a time."""
    numbers = min(max(_FEWEST, _TIMES_TOKENS * max(q.numel(), k.numel())), _MOST)
    return max(1, numbers // (k.shape[:3].numel()))


class _SumByDistance(torch.autograd.Function):
    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, kernel: Callable[..., Tensor], scale: float) -> Tensor:
        return torch.cat([_weighed(part, k, v, kernel, scale) for part in q.split(_stretch(q, k), dim=2)], dim=2)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        q, k, v, ctx.kernel, ctx.scale = inputs
        ctx.save_for_backward(q, k, v)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad,), (q, k, v) = grads, ctx.saved_tensors
        if needs_graph(grad):
            gradients = pull_back(lambda q, k, v: _weighed(q, k, v, ctx.kernel, ctx.scale), (q, k, v), grad)
            return *gradients, None, None
        grad_q, grad_k, grad_v = [], torch.zeros_like(k), torch.zeros_like(v)
        length = _stretch(q, k)
        for part, coming in zip(q.split(length, dim=2), grad.split(length, dim=2), strict=True):
            leaves = part.detach().requires_grad_(), k.detach().requires_grad_()
            with torch.enable_grad():
                weights = ctx.kernel(*leaves, scale=ctx.scale)
            here, there = torch.autograd.grad(weights, leaves, coming @ v.mT)
            grad_q.append(here)
            # Not in place: what comes may be a batch of gradients.
            grad_k = grad_k + there
            grad_v = grad_v + weights.detach().mT @ coming
        return torch.cat(grad_q, dim=2), grad_k, grad_v, None, None

    @staticmethod
    def vmap(info, in_dims, *inputs):  # pyright: ignore[reportIncompatibleMethodOverride]
        return torch.vmap(_weighed, in_dims)(*inputs), 0
