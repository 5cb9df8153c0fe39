r"""Linear attention: a feature map in place of the exponential, so that the keys can be summed first.

$$\mathrm{out}_i = \frac{\phi(q_i)^\top \sum_j \phi(k_j) v_j^\top}{\phi(q_i)^\top \sum_j \phi(k_j)}, \qquad
\phi(x) = \mathrm{ELU}(x) + 1 = e^{\min(x, 0)} (1 + \max(x, 0)).$$

Features below 0 fall like an exponential, so the sums may be too small for any dtype although their ratio is not. With
$z_c = \sum_j \phi(k_{jc})$ per channel c, the same numbers are two averages,
$$\mathrm{out}_i = \sum_c w_{ic}\, C_c, \quad C_c = \sum_j \frac{\phi(k_{jc})}{z_c}\, v_j, \quad
w_{ic} = \frac{\phi(q_{ic})\, z_c}{\sum_{c'} \phi(q_{ic'})\, z_{c'}},$$
whose exponentials are taken relative to the largest: of a channel over the keys, $m_c = \max_j \min(k_{jc}, 0)$, which
goes over to the weights of the queries, and of a query over the channels.

Forward and backward are written by hand: the gradients of the two averages need only the averages themselves, so at
most four numbers per token and channel are kept. The compiler, second derivatives and forward mode use plain operations
instead.

Source: Katharopoulos et al. (2020), arXiv:2006.16236, eq. (5) and (7).
Departs from the authors' code: no constant is added to the denominator. Nyströmformer's code for the Long Range Arena
has no denominator at all, and divides by the square root of the number of positions instead.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nystrom.attention.entry import attend
from nystrom.attention.options import LinearOptions, documented
from nystrom.attention.parts.by_heads import by_heads
from nystrom.autograd_modes import needs_graph, pull_back
from nystrom.checks import FeatureMap
from nystrom.precision import at_least_float32, without_autocast
from nystrom.private_torch import is_forward_mode
from nystrom.shapes import Group, Masks


@documented(LinearOptions)
def linear_attention(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    v: Float[Tensor, "b h s e"],
    *,
    feature_map: FeatureMap = "elu",
    keep: Bool[Tensor, "b n"] | None = None,
    key_keep: Bool[Tensor, "b s"] | None = None,
    query_keep: Bool[Tensor, "b n"] | None = None,
    cu_seqlens: Int[Tensor, " ends"] | None = None,
    group: Group = None,
) -> Float[Tensor, "b h n e"]:
    """Attend by inner products of features over real keys, in time and memory linear in n and s.

    Computed in float32 at least. Scores are not scaled: the feature map is not homogeneous, and the paper has no scale.

    Args:
        **usual: Tensors, masks, group and `LinearOptions`.
    """
    return attend(
        _linear,
        q,
        k,
        v,
        Masks(keep, key_keep, query_keep, cu_seqlens),
        LinearOptions(feature_map=feature_map),
        group=group,
    )


def _linear(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    v: Float[Tensor, "b h s e"],
    keep: Bool[Tensor, "b s"] | None,
    query_keep: Bool[Tensor, "b n"] | None,
    options: LinearOptions,
) -> Float[Tensor, "b h n e"]:
    q, k, v = (at_least_float32(x) for x in (q, k, v))
    if keep is not None:
        # Far below every real key: no weight beside one; without one, equal weights on values of zero.
        k = torch.where(keep[:, None, :, None], k, -torch.finfo(k.dtype).max / 4)
    # A compiler derives the gradient, and fuses the operations between the products.
    if torch.compiler.is_compiling() or is_forward_mode():
        return _two_softmaxes(q, k, v)
    return by_heads(lambda _, q, k, v: _TwoAverages.apply(q, k, v)[0], q, k, v)


def _two_softmaxes(
    q: Float[Tensor, "b h n d"], k: Float[Tensor, "b h s d"], v: Float[Tensor, "b h s e"]
) -> Float[Tensor, "b h n e"]:
    """The two averages in plain operations: a softmax over keys in each channel, one over channels for each query."""
    logs_q, logs_k = (x.clamp(max=0) + x.clamp(min=0).log1p() for x in (q, k))
    return (logs_q + logs_k.logsumexp(dim=2, keepdim=True)).softmax(dim=-1) @ (logs_k.softmax(dim=2).mT @ v)


class _TwoAverages(torch.autograd.Function):
    """Values averaged over the keys in each channel, then over the channels for each query."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        # Exponentials relative to the largest of their channel: the sum of the features is 1 at least. The passes over
        # tokens write where they read, and phi = e + e max(x, 0) is one of them.
        features = k.clamp(max=0)
        shift = features.amax(dim=2, keepdim=True)
        features.sub_(shift).exp_()
        features.addcmul_(features, k.clamp(min=0))
        total = features.sum(dim=2, keepdim=True)
        means = (v.mT @ features).mT / total.mT
        weights = q.clamp(max=0).add_(shift + total.log())
        weights.sub_(weights.amax(dim=-1, keepdim=True)).exp_()
        weights.addcmul_(weights, q.clamp(min=0))
        weights.div_(weights.sum(dim=-1, keepdim=True))
        return weights @ means, features, total, means, weights

    @staticmethod
    def setup_context(ctx, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, *output)

    @staticmethod
    def vmap(info, in_dims: tuple[int | None, ...], *inputs: Tensor) -> tuple[tuple[Tensor, ...], int]:
        """Treat the mapped axis as more sequences."""
        rows = [
            (x if dim is None else x.movedim(dim, 0)).expand(info.batch_size, *x.shape[-4:]).flatten(0, 1)
            for x, dim in zip(inputs, in_dims, strict=True)
        ]
        return tuple(x.unflatten(0, (info.batch_size, -1)) for x in _TwoAverages.apply(*rows)), 0

    @staticmethod
    def backward(ctx, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        grad, (q, k, v, out, features, total, means, weights) = grads[0], ctx.saved_tensors
        if grad is None:
            return None, None, None
        with without_autocast(grad):
            if needs_graph(grad):
                # A second derivative, or a transform of torch.func.
                return pull_back(_two_softmaxes, (q, k, v), grad)
            # The weights are a softmax over channels of ln phi(q) + ln z, the features over z one over keys of
            # ln phi(k); the derivative of ln phi(x) is 1 / (1 + max(x, 0)).
            grad_q = (grad @ means.mT).sub_((grad * out).sum(dim=-1, keepdim=True)).mul_(weights)
            grad_total = grad_q.sum(dim=2, keepdim=True)
            grad_means = weights.mT @ grad
            shared = grad_total - (means * grad_means).sum(dim=-1)[..., None, :]
            grad_means = grad_means / total.mT
            grad_k = (v @ grad_means.mT).add_(shared / total).mul_(features)
            return _over_slope(grad_q, q), _over_slope(grad_k, k), features @ grad_means


def _over_slope(grad: Float[Tensor, "b h n d"], x: Float[Tensor, "b h n d"]) -> Float[Tensor, "b h n d"]:
    return grad.div_(x.clamp(min=0).add_(1))
