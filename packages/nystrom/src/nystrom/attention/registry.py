"""Every attention method of the library, by name, in one table. Needs no torch."""

from dataclasses import dataclass, fields

from nystrom.attention.options import (
    BigBirdOptions,
    InformerOptions,
    KernelizedOptions,
    LinearOptions,
    LinformerOptions,
    LongformerOptions,
    NearFarOptions,
    NystromOptions,
    PerformerOptions,
    ReformerOptions,
    SkyformerOptions,
    SkyformerSoftmaxOptions,
    SoftmaxOptions,
)
from nystrom.checks import check_names


@dataclass(frozen=True, kw_only=True)
class Method:
    """One attention method; its functions are in `nystrom.attention.functions`."""

    summary: str  # The method in a few words
    options: type  # Dataclass of its options
    cost: str  # Order of its time, in the letters of `nystrom.shapes`
    exact_limit: str  # When it equals what it approximates
    source: str  # Paper
    weights: bool = False  # A Module supplies the function's tensor arguments after the values
    weight_options: tuple[str, ...] = ()  # Options of these weights, which the function does not take
    random: bool = False  # The function can draw at random from `generator`
    cross_attention: bool = True  # It supports cross-attention, where queries and keys are different tokens
    positional: bool = False  # It depends on positions, so masked holes inside a sequence count
    takes_skip: bool = False  # The function adds the skip convolution itself
    causal: bool = False  # The function takes `is_causal`
    over_ranks: bool = False  # Tokens may be split across the ranks of a process group, see `nystrom.parallel`
    bias: bool = False  # The function takes a bias of positions, see `nystrom.attention.position_bias`
    rows: bool = False  # A function gives rows of its attention matrix
    second_derivatives: str = "never"  # The option required for second derivatives; "always", or "never" if they raise

    def abilities(self) -> tuple[list[str], list[str]]:
        """Capabilities that differ between methods; unsupported ones raise an error."""
        options = {field.name for field in fields(self.options)}
        able = {
            "cross-attention": self.cross_attention,
            "causal masks": self.causal,
            "a bias of positions": self.bias,
            "rows of its matrix": self.rows,
            "ranks of a process group": self.over_ranks,
            "Triton kernels": "backend" in options,
            "second derivatives": self.second_derivatives == "always",
        }
        can, cannot = ([name for name in able if able[name] is has] for has in (True, False))
        cannot = ["masks per pair of tokens", *cannot]
        if self.second_derivatives not in ("always", "never"):
            cannot[cannot.index("second derivatives")] += f" (those of {self.second_derivatives} excepted)"
        if "max_length" in options:
            cannot.append("more keys than max_length")
        return can, cannot


METHODS: dict[str, Method] = {
    "softmax": Method(
        summary="exact attention, fused or materialised",
        options=SoftmaxOptions,
        cost="n s d",
        exact_limit="always",
        source="Vaswani et al. 2017, arXiv:1706.03762",
        over_ranks=True,
        bias=True,
        second_derivatives="form='materialised'",
    ),
    "nystrom": Method(
        summary="softmax attention through m landmarks",
        options=NystromOptions,
        cost="(n + s) m d + m^3",
        exact_limit="softmax, where m >= real tokens",
        source="Xiong et al. 2021, arXiv:2102.03902",
        random=True,
        takes_skip=True,
        rows=True,
        over_ranks=True,
    ),
    "near_far": Method(
        summary="softmax attention with far keys replaced by the mean of their cluster",
        options=NearFarOptions,
        cost="n (block_size + 2 reach + num_heavy + num_clusters) d + s num_clusters d",
        exact_limit="softmax, where the window and the heavy keys hold all tokens, or each cluster holds one key",
        source="ours; kin to Zhu et al. 2021, arXiv:2107.02192, and Zeng et al. 2022, arXiv:2207.10284",
        positional=True,
        causal=True,
        bias=True,
        rows=True,
        over_ranks=True,
    ),
    "kernelized": Method(
        summary="a kernel, Gaussian by default, in place of softmax",
        options=KernelizedOptions,
        cost="n s d",
        exact_limit="its own kernel, always",
        source="Chen et al. 2021, arXiv:2111.00035",
    ),
    "skyformer": Method(
        summary="kernelized attention through m landmarks",
        options=SkyformerOptions,
        cost="(n + s) m d + m^3",
        exact_limit="kernelized, where m >= real tokens",
        source="Chen et al. 2021, arXiv:2111.00035",
        random=True,
        over_ranks=True,
    ),
    "skyformer_softmax": Method(
        summary="softmax attention through Skyformer's landmarks",
        options=SkyformerSoftmaxOptions,
        cost="(n + s) m d + m^3",
        exact_limit="softmax, where m >= real tokens",
        source="Chen et al. 2021, arXiv:2111.00035, section 4.2 and Fig. 1",
        random=True,
    ),
    "linear": Method(
        summary="a feature map in place of the exponential",
        options=LinearOptions,
        cost="(n + s) d^2",
        exact_limit="its own kernel, always",
        source="Katharopoulos et al. 2020, arXiv:2006.16236",
        second_derivatives="always",
    ),
    "performer": Method(
        summary="softmax attention through positive random features",
        options=PerformerOptions,
        cost="(n + s) num_features d",
        exact_limit="softmax, as num_features grows",
        source="Choromanski et al. 2020, arXiv:2009.14794",
        weights=True,
        weight_options=("redraw_steps",),
        random=True,
    ),
    "linformer": Method(
        summary="softmax over learned mixtures of the tokens",
        options=LinformerOptions,
        cost="(n + s) num_features d",
        exact_limit="softmax, where the projections are the identity and n = num_features",
        source="Wang et al. 2020, arXiv:2006.04768",
        weights=True,
        weight_options=("num_features", "max_length", "per_head", "share_key_value", "init_std", "frozen"),
        positional=True,
    ),
    "informer": Method(
        summary="softmax for the queries that stand out, the mean for the rest",
        options=InformerOptions,
        cost="(n num_samples + num_queries s) d",
        exact_limit="softmax, where num_queries >= real queries",
        source="Zhou et al. 2020, arXiv:2012.07436",
        random=True,
    ),
    "reformer": Method(
        summary="softmax among the tokens of the same hash bucket",
        options=ReformerOptions,
        cost="n num_hashes (chunk_size + num_buckets) d + n log n",
        exact_limit="softmax over the other tokens, where one bucket and one chunk hold all",
        source="Kitaev et al. 2020, arXiv:2001.04451",
        random=True,
        cross_attention=False,
        second_derivatives="always",
    ),
    "longformer": Method(
        summary="softmax within a sliding window, with a few global tokens",
        options=LongformerOptions,
        cost="n (window + num_global) d",
        exact_limit="softmax, where window >= 2 n - 1",
        source="Beltagy et al. 2020, arXiv:2004.05150",
        cross_attention=False,
        positional=True,
        over_ranks=True,
    ),
    "bigbird": Method(
        summary="softmax over blocks: a window, random ones and two global ones",
        options=BigBirdOptions,
        cost="n (num_random_blocks + 5) block_size d",
        exact_limit="softmax, where num_random_blocks + 4 blocks hold all tokens",
        source="Zaheer et al. 2020, arXiv:2007.14062",
        random=True,
        cross_attention=False,
        positional=True,
    ),
}


# Methods without learned weights of their own, which can replace another method in a trained model.
WEIGHTLESS = tuple(name for name in METHODS if name != "linformer")


def check_weightless(method: str) -> None:
    """Raise for an unknown method, or one whose projections would have to be learned."""
    check_names("attention method", [method], METHODS)
    if method not in WEIGHTLESS:
        raise ValueError(
            f"method is {method!r}, whose projections would have to be learned; "
            f"expected one of {', '.join(WEIGHTLESS)}."
        )


def check_takes_bias(method: str) -> None:
    """Raise for a method that cannot honour a bias of positions."""
    if not METHODS[method].bias:
        able = " or ".join(repr(name) for name, entry in METHODS.items() if entry.bias)
        raise ValueError(f"bias cannot be honoured: {method} attention has no bias of positions. Use {able}.")
