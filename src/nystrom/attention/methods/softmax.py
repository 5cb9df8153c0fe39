r"""Exact attention, $\mathrm{softmax}(c\, Q K^\top)\, V$, in two forms.

- "fused": one `scaled_dot_product_attention` call; memory linear in n, time quadratic.
- "materialised": scores, softmax and product one after the other, n x s numbers stored twice: what the papers' tables
  call the Transformer, kept as their baseline. Its memory is quadratic by design.

Source: Vaswani et al. (2017), arXiv:1706.03762, eq. (1).
"""

from dataclasses import dataclass
from typing import Literal, get_args

from jaxtyping import Bool, Float
from torch import Tensor, nn

from nystrom.attention.fused import fused_softmax, softmax_rows
from nystrom.checks import check_choice
from nystrom.precision import cast_for_autocast, without_autocast
from nystrom.shapes import check_inputs, zero_masked

Form = Literal["fused", "materialised"]


@dataclass(frozen=True)
class SoftmaxOptions:
    """Options of exact attention.

    Attributes:
        form: "fused", or "materialised" as the papers' baseline.
        scale: Factor on the scores; None means 1 / sqrt(d).
    """

    form: Form = "fused"
    scale: float | None = None

    def __post_init__(self):
        check_choice("form", self.form, get_args(Form))


def softmax_attention(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    v: Float[Tensor, "b h s e"],
    *,
    keep: Bool[Tensor, "b s"] | None = None,
    query_keep: Bool[Tensor, "b n"] | None = None,
    scale: float | None = None,
    form: Form = "fused",
) -> Float[Tensor, "b h n e"]:
    """Exact attention over real keys; queries that are not real, and sequences without a real key, give zeros.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        keep: Real keys; None where all are.
        query_keep: Real queries; None means `keep` where n == s, else all.
        scale: Factor on the scores; None means 1 / sqrt(d).
        form: "fused" or "materialised".

    Raises:
        ValueError: Shapes, dtypes or masks that do not fit, or another form.
    """
    check_choice("form", form, get_args(Form))
    keep, query_keep = check_inputs(q, k, v, keep, query_keep)
    q, k, v = cast_for_autocast(q, k, v)
    with without_autocast(q):
        q, k, v = zero_masked(q, query_keep), zero_masked(k, keep), zero_masked(v, keep)
        attend = fused_softmax if form == "fused" else _materialised_softmax
        return zero_masked(attend(q, k, v, keep=keep, scale=scale), query_keep)


def _materialised_softmax(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    v: Float[Tensor, "b h s e"],
    *,
    keep: Bool[Tensor, "b s"] | None,
    scale: float | None,
) -> Float[Tensor, "b h n e"]:
    return softmax_rows(q, k, keep=keep, scale=scale) @ v


class SoftmaxHeads(nn.Module):
    """Exact attention over head-split tensors; has no parameters."""

    def __init__(self, num_heads: int, head_dim: int, options: SoftmaxOptions | None = None):
        super().__init__()
        self.options = SoftmaxOptions() if options is None else options

    def forward(
        self,
        q: Float[Tensor, "b h n d"],
        k: Float[Tensor, "b h s d"],
        v: Float[Tensor, "b h s e"],
        *,
        keep: Bool[Tensor, "b s"] | None = None,
        query_keep: Bool[Tensor, "b n"] | None = None,
    ) -> Float[Tensor, "b h n e"]:
        """Attend; see `softmax_attention`."""
        options = self.options
        return softmax_attention(q, k, v, keep=keep, query_keep=query_keep, scale=options.scale, form=options.form)
