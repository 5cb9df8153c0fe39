r"""Exact attention, $\mathrm{softmax}(c\, Q K^\top)\, V$, in two forms.

- "fused": one `scaled_dot_product_attention` call; memory linear in n, time quadratic.
- "materialised": scores, softmax and product one after the other, n x s numbers stored twice: what the papers' tables
  call the Transformer, kept as their baseline. The memory is quadratic by design.

Source: Vaswani et al. (2017), arXiv:1706.03762, eq. (1).
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nystrom.attention.entry import attend
from nystrom.attention.fused import fused_softmax, softmax_rows
from nystrom.attention.options import SoftmaxOptions, documented
from nystrom.attention.parts.biased_softmax import biased_softmax
from nystrom.attention.position_bias import SELF_BIAS, PositionBias, as_bias, real_places
from nystrom.checks import Form
from nystrom.shapes import Group, Masks


@documented(SoftmaxOptions)
def softmax_attention(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    v: Float[Tensor, "b h s e"],
    *,
    form: Form = "fused",
    scale: float | None = None,
    keep: Bool[Tensor, "b n"] | None = None,
    key_keep: Bool[Tensor, "b s"] | None = None,
    query_keep: Bool[Tensor, "b n"] | None = None,
    cu_seqlens: Int[Tensor, " ends"] | None = None,
    bias: PositionBias | None = None,
    group: Group = None,
) -> Float[Tensor, "b h n e"]:
    """Exact attention over real keys; padding queries, and sequences without a real key, give zeros.

    Args:
        **usual: Tensors, masks, group and `SoftmaxOptions`.
        bias: A function of positions that is added to the scores: `nystrom.RelativeBuckets`, `nystrom.Alibi` or
            `nystrom.Alibi2d`; fused self-attention, in one process. It is made for a stretch of queries at a time.
    """
    options = SoftmaxOptions(form=form, scale=scale)
    if bias is not None:
        masks = Masks(keep, key_keep, query_keep, cu_seqlens)
        for what, is_so in {"group is given": group is not None, "form is 'materialised'": form != "fused"}.items():
            if is_so:
                raise ValueError(f"bias is given, and {what}: leave one of them out.")
        return attend(_biased, q, k, v, masks, options, as_bias(bias), same_tokens=SELF_BIAS)
    return attend(_softmax, q, k, v, Masks(keep, key_keep, query_keep, cu_seqlens), options, group=group)


def _softmax(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    v: Float[Tensor, "b h s e"],
    keep: Bool[Tensor, "b s"] | None,
    query_keep: Bool[Tensor, "b n"] | None,
    options: SoftmaxOptions,
) -> Float[Tensor, "b h n e"]:
    if options.form == "fused":
        return fused_softmax(q, k, v, keep=keep, scale=options.scale)
    if v.dtype == torch.float16:
        # The gradient of a weight, an inner product of a value and a gradient, passes the largest float16.
        q, k, v = q.float(), k.float(), v.float()
    return softmax_rows(q, k, keep=keep, scale=options.scale) @ v


def _biased(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h n d"],
    v: Float[Tensor, "b h n e"],
    keep: Bool[Tensor, "b n"] | None,
    query_keep: Bool[Tensor, "b n"] | None,
    options: SoftmaxOptions,
    bias: PositionBias,
) -> Float[Tensor, "b h n e"]:
    return biased_softmax(q, k, v, bias, real_places(bias, q, keep), keep=keep, scale=options.scale)
