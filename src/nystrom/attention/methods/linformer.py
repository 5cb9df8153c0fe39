r"""Linformer: attention to m learned mixtures of the tokens.

With learned projections E, F (m x L) over the positions,
$$\mathrm{out} = \mathrm{softmax}(c\, Q (E K)^\top)\, F V, \qquad c = 1 / \sqrt d.$$
E K and F V are m x d and m x e; the softmax over them is one fused attention call: nothing of size n x m is stored but
E and F themselves, which are parameters.

**Positions.** A token's column of E and F is its position, counted from the first real token of its sequence; masked
tokens count as zeros. L is `max_length`; a shorter sequence uses the first columns, a longer one is refused.

**Exact limit.** With E = F the identity and as many real tokens as its size, softmax attention. The mixtures are not
masked, as in the paper: a row of E that sees no real token is a key of zeros with a value of zeros, which takes its
share of the softmax at score 0. A shorter sequence under identity projections is softmax beside L - n such keys.

Source: Wang et al. (2020), arXiv:2006.04768, eq. (7) and section 4 (sharing).
Departs from the paper: positions are counted from the first real token. Start values are those of its theorem 2,
N(0, 1/m). The two papers' own comparison had one projection for each head with E = F (`per_head`,
`share_key_value`), and did not train it: here E and F are parameters like any other.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from nystrom.attention.fused import fused_softmax
from nystrom.checks import check_at_least
from nystrom.landmarks import take
from nystrom.precision import cast_for_autocast, without_autocast
from nystrom.shapes import check_inputs, zero_masked


@dataclass(frozen=True)
class LinformerOptions:
    """Options of Linformer.

    Attributes:
        num_features: Mixtures m of the tokens.
        max_length: Longest sequence of keys L, padding included.
        per_head: Whether each head has its own projections; else all heads share them (headwise sharing).
        share_key_value: Whether one projection serves keys and values, E = F (key-value sharing).
        scale: Factor on the scores; None means 1 / sqrt(d).
    """

    num_features: int = 256
    max_length: int = 4096
    per_head: bool = False
    share_key_value: bool = False
    scale: float | None = None

    def __post_init__(self):
        check_at_least("num_features", self.num_features, 1)
        check_at_least("max_length", self.max_length, 1)


def linformer_attention(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    v: Float[Tensor, "b h s e"],
    key_projection: Float[Tensor, "g m length"],
    value_projection: Float[Tensor, "g m length"],
    *,
    keep: Bool[Tensor, "b s"] | None = None,
    query_keep: Bool[Tensor, "b n"] | None = None,
    scale: float | None = None,
) -> Float[Tensor, "b h n e"]:
    """Attend to learned mixtures of the keys, in time and memory linear in n and s.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        key_projection: E, one for each head (g = h) or one for all (g = 1); cast to the dtype of `k`.
        value_projection: F, likewise; E again for key-value sharing.
        keep: Real keys; None where all are. Holes inside a sequence count as positions.
        query_keep: Real queries; None means `keep` where n == s, else all. Other queries give zeros.
        scale: Factor on the scores; None means 1 / sqrt(d).

    Raises:
        ValueError: Shapes, dtypes or masks that do not fit, or more keys than the projections have columns.
    """
    keep, query_keep = check_inputs(q, k, v, keep, query_keep)
    _check_projection("key_projection", key_projection, k)
    _check_projection("value_projection", value_projection, k)
    q, k, v = cast_for_autocast(q, k, v)
    with without_autocast(q):
        q = zero_masked(q, query_keep)
        keys, values = (
            _project(_from_first_real(zero_masked(x, keep), keep), projection)
            for x, projection in ((k, key_projection), (v, value_projection))
        )
        return zero_masked(fused_softmax(q, keys, values, scale=scale), query_keep)


def _check_projection(name: str, projection: Tensor, k: Tensor) -> None:
    h, s = k.shape[1], k.shape[2]
    if projection.ndim != 3 or projection.shape[0] not in (1, h):
        raise ValueError(
            f"{name} has shape {tuple(projection.shape)}; expected (1 or {h} heads, num_features, max_length)."
        )
    length = projection.shape[2]
    if not isinstance(s, int) or not isinstance(length, int):
        torch._check(s <= length, lambda: f"k holds more tokens than {name} has columns.")
    elif s > length:
        raise ValueError(
            f"k holds {s} tokens but {name} has columns for {length}: build with max_length={s} or more, cut the "
            "sequence, or use a method without a fixed length, such as 'nystrom'."
        )


def _from_first_real(x: Float[Tensor, "b h s d"], keep: Bool[Tensor, "b s"] | None) -> Float[Tensor, "b h s d"]:
    """Turn each sequence until its first real token comes first; what turns round the end is masked, and zero."""
    if keep is None:
        return x
    s = x.shape[2]
    first = keep.int().argmax(dim=-1, keepdim=True)
    return take(x, (first + torch.arange(s, device=x.device)) % s)


def _project(x: Float[Tensor, "b h s d"], projection: Float[Tensor, "g m length"]) -> Float[Tensor, "b h m d"]:
    dtype = x.dtype
    # Sums over a sequence pass the largest float16 where each of its tokens, and exact attention, does not.
    wide = torch.float32 if dtype == torch.float16 else dtype
    # The heads of one projection are columns of one product: a batched product would copy the projection for each.
    heads = x.to(wide).unflatten(1, (projection.shape[0], -1))
    s = x.shape[2]
    # Of a length that is only a symbol, a view would ask whether it is the whole projection.
    used = projection[..., :s] if isinstance(s, int) else projection.index_select(2, torch.arange(s, device=x.device))
    mixed = torch.einsum("gms,bgisd->bgimd", used.to(wide), heads).flatten(1, 2)
    if dtype == torch.float16:
        mixed = mixed.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    return mixed.to(dtype)


class LinformerHeads(nn.Module):
    """Linformer over head-split tensors.

    Attributes:
        key_projection: E, (h or 1, num_features, max_length).
        value_projection: F, the same; absent where one projection serves both.
    """

    def __init__(self, num_heads: int, head_dim: int, options: LinformerOptions | None = None):
        super().__init__()
        self.options = LinformerOptions() if options is None else options
        shape = num_heads if self.options.per_head else 1, self.options.num_features, self.options.max_length
        self.key_projection = nn.Parameter(torch.empty(shape))
        self.value_projection = None if self.options.share_key_value else nn.Parameter(torch.empty(shape))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the projections from N(0, 1 / num_features), which keeps lengths as the paper's theorem 2 wants."""
        for projection in self.parameters():
            nn.init.normal_(projection, std=self.options.num_features**-0.5)

    def weights(self) -> tuple[Tensor, ...]:
        """The tensors that `linformer_attention` takes behind q, k and v."""
        values = self.key_projection if self.value_projection is None else self.value_projection
        return self.key_projection, values

    def forward(
        self,
        q: Float[Tensor, "b h n d"],
        k: Float[Tensor, "b h s d"],
        v: Float[Tensor, "b h s e"],
        *,
        keep: Bool[Tensor, "b s"] | None = None,
        query_keep: Bool[Tensor, "b n"] | None = None,
    ) -> Float[Tensor, "b h n e"]:
        """Attend; see `linformer_attention`."""
        scale = self.options.scale
        return linformer_attention(q, k, v, *self.weights(), keep=keep, query_keep=query_keep, scale=scale)
