r"""Linformer across ranks: each mixes its own tokens by the columns at their positions, and the mixtures are added up.

The ranks exchange m (d + e) numbers, which does not depend on n. The gradients of the projections on a rank come from
its own tokens and queries: sum them over the ranks, as for all weights.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from nystrom.attention.fused import fused_softmax
from nystrom.attention.methods.linformer import check_projection
from nystrom.attention.options import LinformerOptions
from nystrom.parallel.communication import Ranks
from nystrom.parallel.tokens import Tokens
from nystrom.precision import at_least_float32


def linformer_over_ranks(
    ranks: Ranks,
    queries: Tokens,
    keys: Tokens,
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    v: Float[Tensor, "b h s e"],
    key_projection: Float[Tensor, "g m length"],
    value_projection: Float[Tensor, "g m length"],
    options: LinformerOptions,
) -> Float[Tensor, "b h n e"]:
    """`linformer_attention` of the tokens of all ranks."""
    check_projection("key_projection", key_projection, k, keys.total)
    check_projection("value_projection", value_projection, k, keys.total)
    mixed = [_project(keys, x, e) for x, e in ((k, key_projection), (v, value_projection))]
    mixed = ranks.sum(torch.cat(mixed, dim=-1))
    # As in a single process: float16 stays in float32, since the mixtures may overflow it.
    mixed = mixed if k.dtype == torch.float16 else mixed.to(k.dtype)
    mixed_keys, mixed_values = mixed.split((k.shape[-1], v.shape[-1]), dim=-1)
    return fused_softmax(q.to(mixed.dtype), mixed_keys, mixed_values, scale=options.scale)


def _project(
    keys: Tokens, x: Float[Tensor, "b h s d"], projection: Float[Tensor, "g m length"]
) -> Float[Tensor, "b h m d"]:
    x = at_least_float32(x)
    heads = x.unflatten(1, (projection.shape[0], -1))
    if keys.whole:
        # The padding token of a rank without tokens is zero; it may lie beyond the last column.
        used = projection[..., keys.start : keys.start + x.shape[2]].to(x.dtype)
        return torch.einsum("gms,bgisd->bgimd", used, heads[..., : used.shape[-1], :]).flatten(1, 2)
    # One sequence at a time: positions count from its first real token; tokens before it, all zeros, have no column.
    mixed = []
    for sequence, first in zip(heads, keys.first.tolist(), strict=True):
        before = min(max(0, first - keys.start), x.shape[2])
        start = max(0, keys.start - first)
        used = projection[..., start : start + x.shape[2] - before].to(x.dtype)
        mixed.append(torch.einsum("gms,gisd->gimd", used, sequence[..., before : before + used.shape[-1], :]))
    return torch.stack(mixed).flatten(1, 2)
