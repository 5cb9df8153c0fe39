"""Every attention method of the library, by name, in one literal table."""

from collections.abc import Callable
from dataclasses import dataclass, fields

from torch import Tensor, nn

from nystrom.attention.methods.bigbird import BigBirdHeads, BigBirdOptions, bigbird_attention
from nystrom.attention.methods.informer import InformerHeads, InformerOptions, informer_attention
from nystrom.attention.methods.kernelized import KernelizedHeads, KernelizedOptions, kernelized_attention
from nystrom.attention.methods.linear import LinearHeads, LinearOptions, linear_attention
from nystrom.attention.methods.linformer import LinformerHeads, LinformerOptions, linformer_attention
from nystrom.attention.methods.longformer import LongformerHeads, LongformerOptions, longformer_attention
from nystrom.attention.methods.nystrom import NystromHeads, NystromOptions, nystrom_attention
from nystrom.attention.methods.performer import PerformerHeads, PerformerOptions, performer_attention
from nystrom.attention.methods.reformer import ReformerHeads, ReformerOptions, reformer_attention
from nystrom.attention.methods.skyformer import SkyformerHeads, SkyformerOptions, skyformer_attention
from nystrom.attention.methods.skyformer_softmax import (
    SkyformerSoftmaxHeads,
    SkyformerSoftmaxOptions,
    skyformer_softmax_attention,
)
from nystrom.attention.methods.softmax import SoftmaxHeads, SoftmaxOptions, softmax_attention
from nystrom.checks import check_at_least, check_names


@dataclass(frozen=True)
class Method:
    """One attention method.

    Attributes:
        summary: What it is, in a few words.
        options: Frozen dataclass of its options; their defaults are the method's.
        function: The pure function over (q, k, v); one with weights takes those of `module.weights()` behind them.
        module: The Module over head-split tensors, built from (num_heads, head_dim, options).
        cost: Time, in the letters of `nystrom.shapes`.
        exact_limit: When it equals what it approximates.
        source: Paper.
        weight_options: Options that shape the Module's weights; the function takes the weights instead.
    """

    summary: str
    options: type
    function: Callable[..., Tensor]
    module: type[nn.Module]
    cost: str
    exact_limit: str
    source: str
    weight_options: tuple[str, ...] = ()


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
    "skyformer_softmax": Method(
        summary="softmax attention through Skyformer's landmarks",
        options=SkyformerSoftmaxOptions,
        function=skyformer_softmax_attention,
        module=SkyformerSoftmaxHeads,
        cost="(n + s) m d + m^3",
        exact_limit="softmax, where m >= real tokens",
        source="Chen et al. 2021, arXiv:2111.00035, section 4.2 and Fig. 1",
    ),
    "linear": Method(
        summary="a feature map in place of the exponential",
        options=LinearOptions,
        function=linear_attention,
        module=LinearHeads,
        cost="(n + s) d^2",
        exact_limit="its own kernel, always",
        source="Katharopoulos et al. 2020, arXiv:2006.16236",
    ),
    "performer": Method(
        summary="softmax attention through positive random features",
        options=PerformerOptions,
        function=performer_attention,
        module=PerformerHeads,
        cost="(n + s) num_features d",
        exact_limit="softmax, as num_features grows",
        source="Choromanski et al. 2020, arXiv:2009.14794",
        weight_options=("num_features", "redraw_steps"),
    ),
    "linformer": Method(
        summary="softmax over learned mixtures of the tokens",
        options=LinformerOptions,
        function=linformer_attention,
        module=LinformerHeads,
        cost="(n + s) num_features d",
        exact_limit="softmax, where the projections are the identity and n = num_features",
        source="Wang et al. 2020, arXiv:2006.04768",
        weight_options=("num_features", "max_length", "per_head", "share_key_value"),
    ),
    "informer": Method(
        summary="softmax for the queries that stand out, the mean for the rest",
        options=InformerOptions,
        function=informer_attention,
        module=InformerHeads,
        cost="(n num_samples + num_queries s) d",
        exact_limit="softmax, where num_queries >= real queries",
        source="Zhou et al. 2020, arXiv:2012.07436",
    ),
    "reformer": Method(
        summary="softmax among the tokens of the same hash bucket",
        options=ReformerOptions,
        function=reformer_attention,
        module=ReformerHeads,
        cost="n num_hashes (chunk_size + num_buckets) d + n log n",
        exact_limit="softmax over the other tokens, where one bucket and one chunk hold all",
        source="Kitaev et al. 2020, arXiv:2001.04451",
    ),
    "longformer": Method(
        summary="softmax within a sliding window, with a few global tokens",
        options=LongformerOptions,
        function=longformer_attention,
        module=LongformerHeads,
        cost="n (window + num_global) d",
        exact_limit="softmax, where window >= 2 n - 1",
        source="Beltagy et al. 2020, arXiv:2004.05150",
    ),
    "bigbird": Method(
        summary="softmax over blocks: a window, random ones and two global ones",
        options=BigBirdOptions,
        function=bigbird_attention,
        module=BigBirdHeads,
        cost="n (num_random_blocks + 5) block_size d",
        exact_limit="softmax, where num_random_blocks + 4 blocks hold all tokens",
        source="Zaheer et al. 2020, arXiv:2007.14062",
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
