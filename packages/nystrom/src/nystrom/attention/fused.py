"""Softmax attention as one fused call, and rows of its weights: building blocks of the methods."""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from nystrom.shapes import score_scale


def fused_softmax(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    v: Float[Tensor, "b h s e"],
    *,
    keep: Bool[Tensor, "b s"] | None = None,
    scale: float | None = None,
    is_causal: bool = False,
) -> Float[Tensor, "b h n e"]:
    """One fused call for any widths of keys and values; stores nothing of size n x s except a causal mask with `keep`.

    Masked values must be zero: a sequence without a real key then gives zeros. If causal, the first key must be real.
    """
    d, e = q.shape[-1], v.shape[-1]
    scale = score_scale(q, scale)
    if d != e or (d % 8 and q.device.type == "cuda"):
        # Fused kernels need equal widths, on CUDA a multiple of 8; zeros change neither the scores nor the values.
        width = -(-max(d, e) // 8) * 8
        q, k, v = (F.pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    mask = None if keep is None else unmask_empty_rows(keep)[:, None, None, :]
    if is_causal and mask is not None:
        mask, is_causal = mask & mask.new_ones(q.shape[2], k.shape[2]).tril(), False
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, is_causal=is_causal)[..., :e]


def softmax_rows(
    q: Float[Tensor, "b h r d"],
    k: Float[Tensor, "b h s d"],
    *,
    keep: Bool[Tensor, "b s"] | None = None,
    scale: float | None = None,
) -> Float[Tensor, "b h r s"]:
    """The attention weights of r queries, r x s numbers; zeros for a sequence without a real key."""
    scale = score_scale(q, scale)
    dtype = q.dtype
    if dtype == torch.float16:
        # Scores may overflow float16; fused attention sums them in float32.
        q, k = q.float(), k.float()
    scores = scale * (q @ k.mT)
    if keep is None:
        return scores.softmax(dim=-1).to(dtype)
    weights = scores.masked_fill(~unmask_empty_rows(keep)[:, None, None, :], -torch.inf).softmax(dim=-1)
    return torch.where(keep[:, None, None, :], weights, 0.0).to(dtype)


def unmask_empty_rows(keep: Bool[Tensor, "b s"]) -> Bool[Tensor, "b s"]:
    """Unmask all keys of a sequence without a real one: softmax over no keys is NaN, over zero values it gives zero."""
    return keep | ~keep.any(dim=-1, keepdim=True)
