"""Every attention method of the library, by name, in one literal table."""

from collections.abc import Callable
from dataclasses import dataclass, fields

from torch import Tensor, nn

from nystrom.attention.kernelized import KernelizedHeads, KernelizedOptions, kernelized_attention
from nystrom.attention.nystrom import NystromHeads, NystromOptions, nystrom_attention
from nystrom.attention.skyformer import SkyformerHeads, SkyformerOptions, skyformer_attention
from nystrom.attention.softmax import SoftmaxHeads, SoftmaxOptions, softmax_attention
from nystrom.shapes import check_at_least, check_names


@dataclass(frozen=True)
class Method:
    """One attention method.

    Attributes:
        summary: What it is, in a few words.
        options: Frozen dataclass of its options; their defaults are the method's.
        function: The pure function over (q, k, v).
        module: The Module over head-split tensors, built from (num_heads, head_dim, options).
        cost: Time, in the letters of `nystrom.shapes`.
        exact_limit: When it equals what it approximates.
        source: Paper.
    """

    summary: str
    options: type
    function: Callable[..., Tensor]
    module: type[nn.Module]
    cost: str
    exact_limit: str
    source: str


METHODS: dict[str, Method] = {
    "softmax": Method(
        summary="exact attention, fused or materialised",
        options=SoftmaxOptions,
        function=softmax_attention,
        module=SoftmaxHeads,
        cost="n s d",
        exact_limit="always",
        source="Vaswani et al. 2017, arXiv:1706.03762",
    ),
    "nystrom": Method(
        summary="softmax attention through m landmarks",
        options=NystromOptions,
        function=nystrom_attention,
        module=NystromHeads,
        cost="(n + s) m d + m^3",
        exact_limit="softmax, where m >= real tokens",
        source="Xiong et al. 2021, arXiv:2102.03902",
    ),
    "kernelized": Method(
        summary="a Gaussian kernel in place of softmax",
        options=KernelizedOptions,
        function=kernelized_attention,
        module=KernelizedHeads,
        cost="n s d",
        exact_limit="its own kernel, always",
        source="Chen et al. 2021, arXiv:2111.00035",
    ),
    "skyformer": Method(
        summary="kernelized attention through m landmarks",
        options=SkyformerOptions,
        function=skyformer_attention,
        module=SkyformerHeads,
        cost="(n + s) m d + m^3",
        exact_limit="kernelized, where m >= real tokens",
        source="Chen et al. 2021, arXiv:2111.00035",
    ),
}


def build_attention(name: str, *, num_heads: int, head_dim: int, **options: object) -> nn.Module:
    """Build the Module of a method: `forward(q, k, v, *, keep=None, query_keep=None)` gives (b, h, n, e).

    Args:
        name: A key of `METHODS`.
        num_heads: Heads h.
        head_dim: Width d of a query or key in one head.
        **options: Fields of the method's options dataclass.

    Raises:
        ValueError: An unknown method or option, or a value that the method refuses.
    """
    check_at_least("num_heads", num_heads, 1)
    check_at_least("head_dim", head_dim, 1)
    check_names("attention method", [name], METHODS)
    method = METHODS[name]
    check_names(f"option of {name}", options, {field.name for field in fields(method.options)})
    return method.module(num_heads, head_dim, method.options(**options))
