r"""Performer: softmax attention through positive orthogonal random features (FAVOR+).

With the r rows $\omega_f$ of a random projection, features
$\phi_f(x) = r^{-1/2} \exp(\sqrt c\, \omega_f^\top x - \tfrac c2 \|x\|^2)$ estimate softmax attention by
$$\mathrm{out}_i = \frac{\phi(q_i)^\top \sum_j \phi(k_j) v_j^\top}{\phi(q_i)^\top \sum_j \phi(k_j)}, \qquad
\mathrm E\, \phi(q)^\top \phi(k) = e^{c\, q^\top k}.$$
Rows come in blocks of d that are orthogonal to each other, with directions uniform on the sphere and norms of the
distribution $\chi(d)$: each row by itself is $N(0, I)$, and the variance is below that of independent rows.

Factors of one query cancel, so both sums are softmax attention themselves: over the keys for each feature, with
scores $\sigma_{fj} = \sqrt c\, \omega_f^\top k_j - \tfrac c2 \|k_j\|^2$, and over the features for each query,
$$C_f = \sum_j \mathrm{softmax}_j(\sigma_{fj})\, v_j, \qquad \ell_f = \ln \sum_j e^{\sigma_{fj}}, \qquad
\mathrm{out}_i = \sum_f \mathrm{softmax}_f(\sqrt c\, \omega_f^\top q_i + \ell_f)\, C_f.$$
Each is one fused call: nothing of size n x r is stored, and each exponential is relative to the largest of its own sum,
so that none overflows and no denominator vanishes.

Source: Choromanski et al. (2020), arXiv:2009.14794, Lemma 1, section 2.4 and appendix.
Departs from the authors' code: no constant (1e-4, which biases the estimate towards the mean of the values) is added to
the features; maxima are per feature over real keys and per query over features; the directions are uniform (rows of a
QR factor as it comes are not, without the signs of R); q and k are scaled once.
"""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from nystrom.attention.entry import attend
from nystrom.attention.fused import fused_softmax
from nystrom.attention.options import PerformerOptions, documented
from nystrom.attention.parts.by_heads import by_heads
from nystrom.attention.parts.logsumexp import softmax_and_logsumexp
from nystrom.autograd_modes import is_computed_again
from nystrom.kernels import half_norms
from nystrom.precision import at_least_float32
from nystrom.private_torch import constant_of_graphs, outside_transforms
from nystrom.shapes import Generator, Group, Masks, check_generator, check_tensor, check_weight_device, score_scale


@documented(PerformerOptions)
def performer_attention(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    v: Float[Tensor, "b h s e"],
    projection: Float[Tensor, "r d"] | None = None,
    *,
    num_features: int = 256,
    scale: float | None = None,
    keep: Bool[Tensor, "b n"] | None = None,
    key_keep: Bool[Tensor, "b s"] | None = None,
    query_keep: Bool[Tensor, "b n"] | None = None,
    cu_seqlens: Int[Tensor, " ends"] | None = None,
    generator: Generator = None,
    group: Group = None,
) -> Float[Tensor, "b h n e"]:
    """Estimate softmax attention with r random features, in time and memory linear in n and s.

    Computed in float32 at least. The projection is shared by the batch and the heads.

    Args:
        **usual: Tensors, masks, group, generator (where no projection is given) and `PerformerOptions`.
        projection: Rows of random features, from `draw_projection`; None draws `num_features` of them.
    """
    options = PerformerOptions(num_features=num_features, scale=scale)
    check_generator(generator)
    if projection is not None and generator is not None:
        raise ValueError("projection and generator are both given: pass one of them, the generator draws a projection.")
    return attend(
        _performer, q, k, v, Masks(keep, key_keep, query_keep, cu_seqlens), options, projection, generator, group=group
    )


def _performer(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    v: Float[Tensor, "b h s e"],
    keep: Bool[Tensor, "b s"] | None,
    query_keep: Bool[Tensor, "b n"] | None,
    options: PerformerOptions,
    projection: Float[Tensor, "r d"] | None,
    generator: Generator,
) -> Float[Tensor, "b h n e"]:
    projection = _projection_of(q, options, projection, generator)
    q, k, v = (at_least_float32(x) for x in (q, k, v))
    scale = score_scale(q, options.scale)

    def some(heads: slice, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = (scale**0.5 * projection.to(q.dtype)).expand(*q.shape[:2], -1, -1)
        means, logs = softmax_and_logsumexp(rows, k, v, keep=keep, scale=1.0, bias=-half_norms(k, scale=scale))
        wide_q = torch.cat([q, torch.ones_like(q[..., :1])], dim=-1)
        return fused_softmax(wide_q, torch.cat([rows, logs], dim=-1), means, scale=1.0)

    # A projection that learns gets its gradient from all heads at once.
    return some(slice(None), q, k, v) if projection.requires_grad else by_heads(some, q, k, v)


def _projection_of(
    q: Float[Tensor, "b h n d"],
    options: PerformerOptions,
    projection: Float[Tensor, "r d"] | None,
    generator: Generator,
) -> Float[Tensor, "r d"]:
    """The given projection, checked, or a drawn one."""
    d = q.shape[-1]
    if projection is None:
        return _draw(options.num_features, d, generator, q.device)
    check_tensor("projection", projection)
    if not projection.is_floating_point():
        raise ValueError(f"projection has dtype {projection.dtype}; expected floats: masks are given by name.")
    if projection.ndim != 2 or projection.shape[1] != d or projection.shape[0] == 0:
        raise ValueError(
            f"projection has shape {tuple(projection.shape)}; expected (features, {d}) for head width {d}."
        )
    check_weight_device("projection", projection, q)
    return projection


def _draw(num_features: int, head_dim: int, generator: Generator, device: torch.device) -> Float[Tensor, "r d"]:
    if generator is None:
        return _fixed_projection(num_features, head_dim).to(device)
    if generator == "global":
        return draw_projection(num_features, head_dim, device=device)
    return draw_projection(num_features, head_dim, generator=generator).to(device)


def draw_projection(
    num_features: int,
    head_dim: int,
    *,
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
) -> Float[Tensor, "r d"]:
    """Draw r normally distributed rows of width d that are orthogonal to each other in blocks of d.

    Without a generator they are drawn on `device`; None means torch's default device.
    """
    device = device if generator is None else generator.device
    blocks = -(-num_features // head_dim)
    # In float32 regardless of torch's default, so that draws are the same under all of them.
    drawn = {"generator": generator, "device": device, "dtype": torch.float32}
    normal = torch.randn(blocks, head_dim, head_dim, **drawn)
    norms = torch.randn(num_features, head_dim, **drawn).norm(dim=-1, keepdim=True)
    q, r = torch.linalg.qr(normal)
    # Householder's signs make a column lean to one side; with those of R it is uniform on the sphere.
    diagonal = r.diagonal(dim1=-2, dim2=-1)
    signs = torch.ones_like(diagonal).masked_fill(diagonal < 0, -1.0)
    return norms * (q * signs[:, None, :]).mT.flatten(0, 1)[:num_features]


# A compiler cannot make a generator.
@constant_of_graphs
def _fixed_projection(num_features: int, head_dim: int) -> Tensor:
    # A map of `torch.func` would refuse the draw, or draw for each of its copies.
    with outside_transforms():
        return draw_projection(num_features, head_dim, generator=torch.Generator().manual_seed(0))


class PerformerFeatures(nn.Module):
    """The projection of a Performer: a buffer, drawn from torch's global generator.

    It stays the same until `redraw`, or in training for `redraw_steps` forward passes. With that option every training
    forward draws, but uses the draw only when it is due: this compiles without a branch.
    """

    projection: Tensor
    forwards: Tensor

    def __init__(self, num_heads: int, head_dim: int, options: PerformerOptions):
        super().__init__()
        self.redraw_steps = options.redraw_steps
        self.register_buffer("projection", torch.empty(options.num_features, head_dim))
        # Part of a checkpoint: a loader that found a buffer missing would start this module anew, projection and all.
        self.register_buffer("forwards", torch.zeros((), dtype=torch.int64))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the projection from torch's global generator, and count from the start."""
        self.redraw()
        self.forwards.zero_()

    @torch.no_grad()
    def redraw(self, generator: torch.Generator | None = None) -> None:
        """Draw a new projection, from torch's global generator if none is given."""
        self.projection.copy_(
            draw_projection(*self.projection.shape, generator=generator, device=self.projection.device)
        )

    def forward(self, attend: Callable[[Tensor], Tensor] | None = None) -> tuple[Tensor] | Tensor:
        """The argument of `performer_attention` after the values, or attention with it; see `AttentionHeads`."""
        if self.training and self.redraw_steps is not None:
            self._redraw_where_due(self.redraw_steps)
        return (self.projection,) if attend is None else attend(self.projection)

    @torch.no_grad()
    def _redraw_where_due(self, steps: int) -> None:
        drawn = draw_projection(*self.projection.shape, device=self.projection.device).to(self.projection.dtype)
        if is_computed_again():
            # The projection of the step stays, and torch's generator goes on as it did in the step.
            return
        self.forwards += 1
        self.projection.copy_(torch.where(self.forwards % steps == 0, drawn, self.projection))
