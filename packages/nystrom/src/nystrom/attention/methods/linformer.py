r"""Linformer: attention to m learned mixtures of the tokens.

With learned projections E, F (m x L) over the positions,
$$\mathrm{out} = \mathrm{softmax}(c\, Q (E K)^\top)\, F V, \qquad c = 1 / \sqrt d.$$
E K and F V are m x d and m x e; the softmax over them is one fused attention call: nothing of size n x m is stored but
E and F themselves, which are parameters.

**Positions.** A token uses the column of E and F at its position, counted from the first real token of its sequence;
masked tokens count as zeros. L is `max_length`; a shorter sequence uses the first columns, a longer one raises an
error.

**Exact limit.** With E = F the identity and as many real tokens as its size, softmax attention. The mixtures are not
masked, as in the paper: a row of E without a real token is a key of zeros with a value of zeros, which takes its share
of the softmax at score 0. For a shorter sequence, identity projections add L - n such keys to the softmax.

Source: Wang et al. (2020), arXiv:2006.04768, eq. (7) and section 4 (sharing).
Departs from the paper: positions are counted from the first real token. Initial values are those of its theorem 2,
N(0, 1/m). The code of Nyströmformer and of Skyformer has one projection for each head with E = F (`per_head`,
`share_key_value`), N(0, 0.02^2) at the start; the first trains it, one for all layers, and the second does not
(`frozen`), one in each layer.
"""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from nystrom.attention.entry import attend
from nystrom.attention.fused import fused_softmax
from nystrom.attention.options import LinformerOptions, documented
from nystrom.landmarks import take
from nystrom.private_torch import assume
from nystrom.shapes import Group, Masks, check_tensor, check_weight_device, is_number


@documented(LinformerOptions)
def linformer_attention(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    v: Float[Tensor, "b h s e"],
    key_projection: Float[Tensor, "g m length"],
    value_projection: Float[Tensor, "g m length"],
    *,
    scale: float | None = None,
    keep: Bool[Tensor, "b n"] | None = None,
    key_keep: Bool[Tensor, "b s"] | None = None,
    query_keep: Bool[Tensor, "b n"] | None = None,
    cu_seqlens: Int[Tensor, " ends"] | None = None,
    group: Group = None,
) -> Float[Tensor, "b h n e"]:
    """Attend to learned mixtures of the keys, at most as many as E has columns, in time and memory linear in n and s.

    Args:
        **usual: Tensors, masks, group and those of `LinformerOptions` that do not shape the projections.
        key_projection: E, one for each head (g = h) or one for all (g = 1); cast to the dtype of `k`.
        value_projection: F, likewise; the same tensor as E if keys and values share it.
    """
    return attend(
        _linformer,
        q,
        k,
        v,
        Masks(keep, key_keep, query_keep, cu_seqlens),
        key_projection,
        value_projection,
        LinformerOptions(scale=scale),
        group=group,
    )


def _linformer(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    v: Float[Tensor, "b h s e"],
    keep: Bool[Tensor, "b s"] | None,
    query_keep: Bool[Tensor, "b n"] | None,
    key_projection: Float[Tensor, "g m length"],
    value_projection: Float[Tensor, "g m length"],
    options: LinformerOptions,
) -> Float[Tensor, "b h n e"]:
    _check_projection("key_projection", key_projection, k, k.shape[2])
    _check_projection("value_projection", value_projection, k, k.shape[2])
    keys = _project(_from_first_real(k, keep), key_projection)
    values = _project(_from_first_real(v, keep), value_projection)
    return fused_softmax(q.to(keys.dtype), keys, values, scale=options.scale)


def _check_projection(name: str, projection: Tensor, k: Tensor, s: int) -> None:
    """Check shape, device and number of columns of a projection for the heads of k and s keys; raises ValueError."""
    check_tensor(name, projection)
    h = k.shape[1]
    if projection.ndim != 3 or projection.shape[0] not in (1, h) or projection.shape[1] == 0:
        raise ValueError(
            f"{name} has shape {tuple(projection.shape)}; expected (1 or {h} heads, num_features, max_length)."
        )
    check_weight_device(name, projection, k)
    length = projection.shape[2]
    if not is_number(s) or not is_number(length):
        assume(s <= length)
    elif s > length:
        raise ValueError(
            f"k holds {s} tokens but {name} has columns for {length}: build with max_length={s} or more, cut the "
            "sequence, or use a method without a fixed length, such as 'nystrom'."
        )


def _from_first_real(x: Float[Tensor, "b h s d"], keep: Bool[Tensor, "b s"] | None) -> Float[Tensor, "b h s d"]:
    """Roll each sequence until its first real token comes first; what wraps around is masked, and zero."""
    if keep is None:
        return x
    s = x.shape[2]
    first = keep.int().argmax(dim=-1, keepdim=True)
    return take(x, (first + torch.arange(s, device=x.device)) % s)


def _project(x: Float[Tensor, "b h s d"], projection: Float[Tensor, "g m length"]) -> Float[Tensor, "b h m d"]:
    # Sums over a sequence may exceed the largest float16 though no token and no result of exact attention does, and so
    # may what the gradient of a query adds up: both stay in float32.
    wide = torch.float32 if x.dtype == torch.float16 else x.dtype
    # Heads that share a projection are columns of one product: a batched product would copy the projection for each.
    heads = x.to(wide).unflatten(1, (projection.shape[0], -1))
    s = x.shape[2]
    # With a symbolic length, a view would ask whether it is the whole projection.
    used = projection[..., :s] if is_number(s) else projection.index_select(2, torch.arange(s, device=x.device))
    return torch.einsum("gms,bgisd->bgimd", used.to(wide), heads).flatten(1, 2)


class LinformerProjections(nn.Module):
    """The projections of Linformer, learned unless `frozen`.

    Attributes:
        key_projection: E, (h or 1, num_features, max_length).
        value_projection: F, of the same shape; None if one projection serves both.
    """

    def __init__(self, num_heads: int, head_dim: int, options: LinformerOptions):
        super().__init__()
        shape = num_heads if options.per_head else 1, options.num_features, options.max_length
        self.std = options.num_features**-0.5 if options.init_std is None else options.init_std
        self.key_projection = nn.Parameter(torch.empty(shape))
        self.value_projection = None if options.share_key_value else nn.Parameter(torch.empty(shape))
        self.requires_grad_(not options.frozen)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw from N(0, init_std^2); a variance of 1 / num_features keeps lengths, as theorem 2 of the paper asks."""
        for projection in self.parameters():
            nn.init.normal_(projection, std=self.std)

    def forward(self, attend: Callable[[Tensor, Tensor], Tensor] | None = None) -> tuple[Tensor, Tensor] | Tensor:
        """The arguments of `linformer_attention` after the values, or attention with them; see `AttentionHeads`."""
        values = self.key_projection if self.value_projection is None else self.value_projection
        return (self.key_projection, values) if attend is None else attend(self.key_projection, values)
