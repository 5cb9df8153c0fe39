r"""Attention with dropout of its weights in training, as in the papers' code for the Long Range Arena.

$$D(\mathrm{softmax}(c\, Q K^\top))\, V \quad \text{and} \quad D(\kappa(Q, K))\, V,$$
exact and kernelized attention, where D sets each weight to zero with probability p and divides the others by 1 - p. All
n x n weights are stored, as in that code: no fused call would give the same draws with less memory. In evaluation,
nothing is dropped, and attention is computed as if there were no dropout.

Source: the code of Xiong et al. (2021), arXiv:2102.03902, LRA/code/attention.py, and of Chen et al. (2021),
arXiv:2111.00035, code/models.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nystrom.attention.entry import attend
from nystrom.attention.fused import softmax_rows
from nystrom.attention.heads import AttentionHeads, add_skip
from nystrom.attention.options import KernelizedOptions, SoftmaxOptions
from nystrom.attention.position_bias import PositionBias
from nystrom.attention.skip import NEEDS_SAME_TOKENS, check_kernel
from nystrom.kernels import KERNELS
from nystrom.models.parts.dropout import dropout
from nystrom.precision import at_least_float32
from nystrom.shapes import Masks, check_same_tokens, score_scale


class DroppedWeights(AttentionHeads):
    """Attention by "softmax" or "kernelized", with dropout of its weights, by the probability `share`, in training.

    Draws come from torch's global generator, as in other dropout.
    """

    # The draws of the ranks would differ from those of one process.
    over_ranks = False

    def __init__(self, method: str, options: Any, num_heads: int, head_dim: int, *, share: float):
        super().__init__(method, options, num_heads, head_dim)
        assert isinstance(options, SoftmaxOptions | KernelizedOptions), "checked by the configuration"
        if heads := getattr(options, "exact_heads", ()):
            raise ValueError(
                f"exact_heads is {heads} and attention_probs_dropout_prob {share}, but exact heads store no weights "
                "that could be dropped: leave one of them out."
            )
        self.share = share

    def forward(
        self,
        q: Float[Tensor, "b h n d"],
        k: Float[Tensor, "b h s d"],
        v: Float[Tensor, "b h s e"],
        *,
        keep: Bool[Tensor, "b n"] | None = None,
        key_keep: Bool[Tensor, "b s"] | None = None,
        query_keep: Bool[Tensor, "b n"] | None = None,
        cu_seqlens: Int[Tensor, " ends"] | None = None,
        skip: Float[Tensor, "h 1 taps 1"] | None = None,
        is_causal: bool = False,
        bias: PositionBias | None = None,
    ) -> Float[Tensor, "b h n e"]:
        """Attend; see `AttentionHeads`."""
        masks = Masks(keep, key_keep, query_keep, cu_seqlens)
        if not self.training or is_causal:
            return super().forward(q, k, v, **masks._asdict(), skip=skip, is_causal=is_causal, bias=bias)
        if bias is not None:
            raise ValueError(
                f"bias is given, and attention_probs_dropout_prob is {self.share}: weights with a bias of positions "
                "are not stored, and cannot be dropped. Leave one of them out."
            )
        out = attend(_dropped, q, k, v, masks, self.options, self.share)
        if skip is None:
            return out
        check_kernel(v, skip)
        check_same_tokens(NEEDS_SAME_TOKENS, q, k, masks)
        return add_skip(out, v, skip, masks)

    def extra_repr(self) -> str:
        """Method, options and dropout probability, shown by print."""
        return f"{super().extra_repr()}, dropout={self.share}"


def _dropped(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    v: Float[Tensor, "b h s e"],
    keep: Bool[Tensor, "b s"] | None,
    query_keep: Bool[Tensor, "b n"] | None,
    options: SoftmaxOptions | KernelizedOptions,
    share: float,
) -> Float[Tensor, "b h n e"]:
    if isinstance(options, KernelizedOptions):
        q, k, v = (at_least_float32(x) for x in (q, k, v))
        # The values of masked keys are zero, so their weights do not matter.
        weights = KERNELS[options.kernel](q, k, scale=score_scale(q, options.scale))
    else:
        if v.dtype == torch.float16:
            # Exact attention computes in float32, too, when it stores its weights.
            q, k, v = q.float(), k.float(), v.float()
        weights = softmax_rows(q, k, keep=keep, scale=options.scale)
    return dropout(weights, share) @ v
