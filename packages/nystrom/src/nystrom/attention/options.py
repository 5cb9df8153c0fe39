"""The options of every method, each documented once, here. Needs no torch.

A method's function takes the fields of its class as keyword arguments with the same defaults; `documented` adds their
descriptions to the function's docstring.
"""

import functools
import inspect
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, get_args

from nystrom.attention.backend import check_triton
from nystrom.checks import (
    Backend,
    FeatureMap,
    Form,
    Inverse,
    Kernel,
    Landmarks,
    StartValue,
    check_at_least,
    check_choice,
    check_flag,
    check_names,
    check_positive,
)
from nystrom.command_options import option_docs

F = TypeVar("F", bound=Callable[..., object])
# The widest heads that the kernels of each method were measured with.
_MEASURED_WIDTH = 128


def _are_equal(values: dict[str, tuple[object, object]]) -> bool:
    return all(came == wanted for came, wanted in values.values())


def _check_backend(backend: Backend, for_kernels: dict[str, tuple[object, object]]) -> None:
    check_choice("backend", backend, get_args(Backend))
    if backend == "triton":
        check_triton(for_kernels)


def _check_scale(scale: float | None) -> None:
    if scale is not None:
        check_positive("scale", scale)


def check_tolerance(tolerance: float | None) -> None:
    """Raise ValueError for what is neither None nor a number of at least 0."""
    if tolerance is None:
        return
    if isinstance(tolerance, bool) or not isinstance(tolerance, int | float) or not tolerance >= 0:
        raise ValueError(f"tolerance is {tolerance!r}; expected None, or a number of at least 0.")


def refuse_tolerance(tolerance: float | None, why: str) -> None:
    """Raise ValueError for a tolerance where the reason says that it cannot be honoured."""
    if tolerance is not None:
        raise ValueError(f"tolerance is {tolerance}, and {why}: leave the tolerance out.")


@dataclass(frozen=True, kw_only=True)
class SoftmaxOptions:
    """Options of exact attention.

    Attributes:
        form: "fused", or "materialised", the papers' baseline.
        scale: Factor on the scores; None means 1 / sqrt(d).
    """

    form: Form = "fused"
    scale: float | None = None

    def __post_init__(self):
        check_choice("form", self.form, get_args(Form))
        _check_scale(self.scale)


def check_exact_heads(heads: Sequence[int], num_heads: int) -> None:
    """Raise ValueError unless a layer of so many heads has these heads, and others that use its method."""
    for head in heads:
        if head >= num_heads:
            raise ValueError(f"exact_heads names head {head}; the layer has heads 0 to {num_heads - 1}.")
    if len(heads) == num_heads:
        raise ValueError(
            f"exact_heads is {tuple(heads)}, all heads of the layer: use exact attention, 'softmax' ('sdpa' in models "
            "of transformers), or leave a head to the method."
        )


@dataclass(frozen=True, kw_only=True)
class LayerOptions:
    """Options of a layer that the method's function does not take; exact attention has no use for it.

    Attributes:
        exact_heads: Numbers of the heads, from 0, that attend exactly, by fused attention; the others use the method.
    """

    exact_heads: Sequence[int] = ()

    def __post_init__(self):
        heads = self.exact_heads
        right = isinstance(heads, list | tuple) and all(type(head) is int and head >= 0 for head in heads)
        if not right or len({*heads}) != len(heads):
            raise ValueError(f"exact_heads is {heads!r}; expected the numbers of heads, each once, from 0.")
        # JSON has lists alone.
        object.__setattr__(self, "exact_heads", tuple(heads))


@dataclass(frozen=True, kw_only=True)
class NystromOptions(LayerOptions):
    """Options of Nyström attention.

    Attributes:
        num_landmarks: Landmarks m; a sequence of at most m real keys or queries gets exact attention.
        landmarks: "segment_means" (the paper), "uniform" or "kmeans", each over real tokens only.
        pinv: "iterative" (eq. 14), "ridge" (regularised, exact where the matrix is well conditioned) or "exact"
            (singular values above the square root of the rounding unit, for study).
        pinv_steps: Iterations of eq. (14).
        z0: Initial value of the iteration: "paper" (per matrix), "authors" (largest column sum over batch and heads, as
            published checkpoints were trained; a result then depends on the rest of the batch) or "sequence" (largest
            column sum over the heads of one sequence: what "authors" gives for a sequence alone).
        scale: Factor on the scores; None means 1 / sqrt(d).
        backend: "torch", "triton" (GPU kernels: segment means and the iterative inverse) or "auto" (the kernels where
            they were measured to be faster); an explicit choice that cannot run raises an error.
        tolerance: Most relative error of a head's output in one call. Each call computes 32 queries of each head
            exactly, too; where the error that they estimate is not below the tolerance, the head attends exactly.
            None does without. In calls whose values are known: neither compiled, exported nor transformed.
    """

    num_landmarks: int = 64
    landmarks: Landmarks = "segment_means"
    pinv: Inverse = "iterative"
    pinv_steps: int = 6
    z0: StartValue = "paper"
    scale: float | None = None
    backend: Backend = "auto"
    tolerance: float | None = None

    def __post_init__(self):
        super().__post_init__()
        check_at_least("num_landmarks", self.num_landmarks, 1)
        check_choice("landmarks", self.landmarks, get_args(Landmarks))
        check_choice("pinv", self.pinv, get_args(Inverse))
        check_at_least("pinv_steps", self.pinv_steps, 0)
        check_choice("z0", self.z0, get_args(StartValue))
        _check_scale(self.scale)
        _check_backend(self.backend, self._for_kernels())
        check_tolerance(self.tolerance)

    def _for_kernels(self) -> dict[str, tuple[object, object]]:
        return {"landmarks": (self.landmarks, "segment_means"), "pinv": (self.pinv, "iterative")}

    @property
    def measured_width(self) -> int:
        """The widest head measured with these options, see `nystrom.attention.entry.picks_triton`."""
        measured = self.num_landmarks <= 64 and self.z0 == "paper" and _are_equal(self._for_kernels())
        return _MEASURED_WIDTH if measured else 0


@dataclass(frozen=True, kw_only=True)
class KernelizedOptions(LayerOptions):
    """Options of kernelized attention.

    Attributes:
        kernel: "gaussian" (the paper), or "laplace", "matern32" or "matern52" of the Euclidean distance, whose second
            derivatives raise.
        scale: Factor c on squared distances, as in exp(-c |q - k|^2 / 2); None means 1 / sqrt(d).
    """

    kernel: Kernel = "gaussian"
    scale: float | None = None

    def __post_init__(self):
        super().__post_init__()
        check_choice("kernel", self.kernel, get_args(Kernel))
        _check_scale(self.scale)


@dataclass(frozen=True, kw_only=True)
class SkyformerOptions(LayerOptions):
    """Options of Skyformer.

    Attributes:
        num_landmarks: Landmarks m, half from the queries and half from the keys (the odd one from the keys); a sequence
            of at most m real keys or queries gets kernelized attention itself.
        kernel: "gaussian" (the paper), or "laplace", "matern32" or "matern52" of the Euclidean distance, whose second
            derivatives raise.
        gamma: Ridge added to the landmarks' kernel matrix.
        pinv: "iterative", "ridge" or "exact".
        pinv_steps: Iterations of the iterative inverse.
        scale: Factor c on squared distances, as in exp(-c |q - k|^2 / 2); None means 1 / sqrt(d).
        backend: "torch", "triton" (GPU kernels: the Gaussian kernel and the iterative inverse) or "auto" (the kernels
            where they were measured to be faster); an explicit choice that cannot run raises an error.
    """

    num_landmarks: int = 128
    kernel: Kernel = "gaussian"
    gamma: float = 0.1
    pinv: Inverse = "iterative"
    pinv_steps: int = 6
    scale: float | None = None
    backend: Backend = "auto"

    def __post_init__(self):
        super().__post_init__()
        _check_ridged(self)
        check_choice("kernel", self.kernel, get_args(Kernel))
        _check_backend(self.backend, self._for_kernels())

    def _for_kernels(self) -> dict[str, tuple[object, object]]:
        return {"kernel": (self.kernel, "gaussian"), "pinv": (self.pinv, "iterative")}

    @property
    def measured_width(self) -> int:
        """The widest head measured with these options, see `nystrom.attention.entry.picks_triton`."""
        return _MEASURED_WIDTH if self.num_landmarks <= 128 and _are_equal(self._for_kernels()) else 0


@dataclass(frozen=True, kw_only=True)
class SkyformerSoftmaxOptions(LayerOptions):
    """Options of softmax attention by the modified Nyström method.

    Attributes:
        num_landmarks: Landmarks m, half from the queries and half from the keys (the odd one from the keys); a sequence
            of at most m real keys or queries gets exact attention.
        gamma: Ridge added to the landmarks' kernel matrix.
        pinv: "iterative", "ridge" or "exact".
        pinv_steps: Iterations of the iterative inverse.
        scale: Factor on the scores; None means 1 / sqrt(d).
    """

    num_landmarks: int = 128
    gamma: float = 0.1
    pinv: Inverse = "iterative"
    pinv_steps: int = 6
    scale: float | None = None

    def __post_init__(self):
        super().__post_init__()
        _check_ridged(self)


def _check_ridged(options: SkyformerOptions | SkyformerSoftmaxOptions) -> None:
    check_at_least("num_landmarks", options.num_landmarks, 2)
    check_positive("gamma", options.gamma)
    check_choice("pinv", options.pinv, get_args(Inverse))
    check_at_least("pinv_steps", options.pinv_steps, 0)
    _check_scale(options.scale)


@dataclass(frozen=True, kw_only=True)
class LinearOptions(LayerOptions):
    """Options of linear attention.

    Attributes:
        feature_map: "elu", ELU + 1 as in the paper.
    """

    feature_map: FeatureMap = "elu"

    def __post_init__(self):
        super().__post_init__()
        check_choice("feature_map", self.feature_map, get_args(FeatureMap))


@dataclass(frozen=True, kw_only=True)
class PerformerOptions(LayerOptions):
    """Options of the Performer.

    Attributes:
        num_features: Random features r.
        redraw_steps: In training the Module draws a new projection every `redraw_steps` forward passes; None means
            never. With gradient checkpointing, recomputation uses the latest projection, so each forward must be
            followed by its backward.
        scale: Factor on the scores; None means 1 / sqrt(d).
    """

    num_features: int = 256
    redraw_steps: int | None = None
    scale: float | None = None

    def __post_init__(self):
        super().__post_init__()
        check_at_least("num_features", self.num_features, 1)
        if self.redraw_steps is not None:
            check_at_least("redraw_steps", self.redraw_steps, 1)
        _check_scale(self.scale)


@dataclass(frozen=True, kw_only=True)
class LinformerOptions(LayerOptions):
    """Options of Linformer.

    Attributes:
        num_features: Mixtures m of the tokens.
        max_length: Longest sequence of keys L, padding included.
        per_head: Whether each head has its own projections; otherwise all heads share them (headwise sharing).
        share_key_value: Whether one projection serves keys and values, E = F (key-value sharing).
        init_std: Standard deviation of the projections' initial values; None means 1 / sqrt(num_features).
        frozen: Whether the projections keep their initial values in training.
        scale: Factor on the scores; None means 1 / sqrt(d).
    """

    num_features: int = 256
    max_length: int = 4096
    per_head: bool = False
    share_key_value: bool = False
    init_std: float | None = None
    frozen: bool = False
    scale: float | None = None

    def __post_init__(self):
        super().__post_init__()
        check_at_least("num_features", self.num_features, 1)
        check_at_least("max_length", self.max_length, 1)
        check_flag("per_head", self.per_head)
        if self.per_head and self.exact_heads:
            raise ValueError(
                f"exact_heads is {self.exact_heads} and per_head is True: the projections belong to all heads. Leave "
                "one of them out."
            )
        check_flag("share_key_value", self.share_key_value)
        if self.init_std is not None:
            check_positive("init_std", self.init_std)
        check_flag("frozen", self.frozen)
        _check_scale(self.scale)


@dataclass(frozen=True, kw_only=True)
class InformerOptions(LayerOptions):
    """Options of ProbSparse attention.

    Attributes:
        num_queries: Queries u of each head that get exact attention; a sequence of at most u gets it for all.
        num_samples: Keys |S| that decide which queries these are.
        scale: Factor on the scores; None means 1 / sqrt(d).
    """

    num_queries: int = 128
    num_samples: int = 128
    scale: float | None = None

    def __post_init__(self):
        super().__post_init__()
        check_at_least("num_queries", self.num_queries, 1)
        check_at_least("num_samples", self.num_samples, 1)
        _check_scale(self.scale)


@dataclass(frozen=True, kw_only=True)
class ReformerOptions(LayerOptions):
    """Options of LSH attention.

    Attributes:
        num_hashes: Rounds of hashing.
        chunk_size: Tokens m of a chunk; a query reaches its chunk and the one before.
        num_buckets: Buckets B, 1 or an even number; about 2 n / chunk_size is the authors' choice for n tokens.
        shared_qk: Whether keys are the normalised queries, as in the paper; `k` is then ignored.
        across_buckets: Whether a query also attends to other buckets within its reach, as in the authors' code.
        scale: Factor on the scores; None means 1 / sqrt(d).
    """

    num_hashes: int = 2
    chunk_size: int = 64
    num_buckets: int = 64
    shared_qk: bool = True
    across_buckets: bool = False
    scale: float | None = None

    def __post_init__(self):
        super().__post_init__()
        check_at_least("num_hashes", self.num_hashes, 1)
        check_at_least("chunk_size", self.chunk_size, 1)
        check_at_least("num_buckets", self.num_buckets, 1)
        if self.num_buckets > 1 and self.num_buckets % 2:
            raise ValueError(
                f"num_buckets is {self.num_buckets}; expected 1 or an even number: each direction has an opposite."
            )
        check_flag("shared_qk", self.shared_qk)
        check_flag("across_buckets", self.across_buckets)
        _check_scale(self.scale)


@dataclass(frozen=True, kw_only=True)
class LongformerOptions(LayerOptions):
    """Options of Longformer.

    Attributes:
        window: Full width of the window, odd: the token itself and (window - 1) / 2 on either side.
        num_global: Number of global tokens, the first real ones: they attend to all tokens, and all attend to them.
        scale: Factor on the scores; None means 1 / sqrt(d).
    """

    window: int = 257
    num_global: int = 0
    scale: float | None = None

    def __post_init__(self):
        super().__post_init__()
        check_at_least("window", self.window, 1)
        check_at_least("num_global", self.num_global, 0)
        if self.window % 2 == 0:
            raise ValueError(
                f"window is {self.window}; expected an odd number, so that a token has a middle: "
                f"{self.window + 1} is what others call an attention window of {self.window}."
            )
        _check_scale(self.scale)


@dataclass(frozen=True, kw_only=True)
class BigBirdOptions(LayerOptions):
    """Options of BigBird.

    Attributes:
        block_size: Tokens of a block.
        num_random_blocks: Blocks r that each block attends to in addition to its window and the global ones; a
            sequence of at most r + 4 blocks gets exact attention.
        scale: Factor on the scores; None means 1 / sqrt(d).
    """

    block_size: int = 64
    num_random_blocks: int = 3
    scale: float | None = None

    def __post_init__(self):
        super().__post_init__()
        check_at_least("block_size", self.block_size, 1)
        check_at_least("num_random_blocks", self.num_random_blocks, 0)
        _check_scale(self.scale)


@dataclass(frozen=True, kw_only=True)
class NearFarOptions(LayerOptions):
    """Options of near and far attention.

    Attributes:
        block_size: Queries of a block, which all see the same keys.
        reach: Tokens on either side of its own block that a query sees exactly.
        num_heavy: Keys g of each head that all of its queries see exactly.
        num_clusters: Clusters m of the other keys.
        iterations: Steps of k-means; the last one uses all keys, the others a sample.
        exact_up_to: Self-attention of a sequence with at most this many real tokens is exact: up to about 1,024 that is
            faster on a CPU. 0 approximates sequences of any length. In causal attention, the queries of this many first
            tokens, in whole blocks, are exact.
        num_selected: Keys r that each block of queries selects: of those outside its window that are not heavy, the
            ones whose cluster would cost it most. They are exact for the block and leave their cluster; 0 for none.
            For self-attention that is not causal, by torch and on a CPU.
        scale: Factor on the scores; None means 1 / sqrt(d).
        backend: "torch", "triton" (GPU kernels, without selected keys) or "auto" (the kernels where they were measured
            to be faster).
        tolerance: Most relative error of a head's output in one call. Each call computes 32 queries of each head
            exactly, too; where the error that they estimate is not below the tolerance, the head attends exactly.
            None does without. In calls whose values are known: neither causal, compiled, exported nor transformed.
    """

    block_size: int = 64
    reach: int = 8
    num_heavy: int = 48
    num_clusters: int = 64
    iterations: int = 4
    exact_up_to: int = 1024
    num_selected: int = 0
    scale: float | None = None
    backend: Backend = "auto"
    tolerance: float | None = None

    def __post_init__(self):
        super().__post_init__()
        check_at_least("block_size", self.block_size, 1)
        check_at_least("reach", self.reach, 0)
        check_at_least("num_heavy", self.num_heavy, 0)
        check_at_least("num_clusters", self.num_clusters, 1)
        check_at_least("iterations", self.iterations, 1)
        check_at_least("exact_up_to", self.exact_up_to, 0)
        check_at_least("num_selected", self.num_selected, 0)
        _check_scale(self.scale)
        _check_backend(self.backend, {})
        if self.num_selected and self.backend == "triton":
            raise ValueError(
                f"num_selected is {self.num_selected} and backend is 'triton', which has no kernels for selected keys: "
                "pass backend='torch' or num_selected=0."
            )
        check_tolerance(self.tolerance)

    @property
    def measured_width(self) -> int:
        """The widest head measured with these options, see `nystrom.attention.entry.picks_triton`."""
        for length, width in ((16384, _MEASURED_WIDTH), (32768, 64)):
            largest = near_far_sizes(length, selects=False)
            if not self.num_selected and all(getattr(self, name) <= size for name, size in largest.items()):
                return width
        return 0


def near_far_sizes(n: int, *, is_causal: bool = False, selects: bool = True) -> dict[str, Any]:
    r"""Sizes of `near_far` with which its error hardly grows with the length: the square root of n, in time $n^{3/2}$.

    $32 \sqrt{n / 2048}$ heavy keys, $88 \sqrt{n / 2048}$ clusters and $120 \sqrt{n / 2048}$ selected keys in multiples
    of 8, blocks of 64 and a reach of 8; without selected keys $64 \sqrt{n / 2048}$ heavy keys,
    $160 \sqrt{n / 2048}$ clusters, blocks of 128 and a reach of 16, which take about as long. They are meant as fixed
    options of a model, for inputs of any length. A causal query sees more tokens exactly, so half the heavy keys and
    clusters suffice, none are selected, and the first 2,048 tokens are exact, which takes no longer.

    Args:
        n: Tokens of the longest input.
        is_causal: Whether the sizes are for causal attention.
        selects: Whether blocks of queries select keys, which makes self-attention on a CPU nearer. False for what does
            not support it: kernels of a GPU, ranks, contexts, ONNX and cross-attention.

    Returns:
        Options of `near_far_attention`.
    """
    check_at_least("n", n, 1)
    check_flag("is_causal", is_causal)
    check_flag("selects", selects)
    growth = math.sqrt(max(n, 512) / 512) / (2 if is_causal else 1)

    def grown(size: int) -> int:
        return 8 * math.ceil(size * growth / 8)

    if selects and not is_causal:
        sizes = {"num_heavy": grown(16), "num_clusters": grown(44), "num_selected": grown(60)}
        return {"block_size": 64, "reach": 8, **sizes}
    sizes = {"block_size": 128, "reach": 16, "num_heavy": grown(32), "num_clusters": grown(80)}
    return sizes | ({"exact_up_to": 2048} if is_causal else {})


# The masks of every function, see `nystrom.shapes.Masks`.
MASK_DOCS = {
    "keep": (
        "Real tokens of self-attention, True = real, of queries and keys alike; None where all are. Other queries\n"
        "give zeros, and so does a sequence without a real token. The `key_padding_mask` of layers is the other way\n"
        "round, True = ignore: pass ~key_padding_mask."
    ),
    "key_keep": "Real keys of cross-attention, True = real; None where all are. Without a real key there are zeros.",
    "query_keep": "Real queries of cross-attention, True = real; None where all are. Other queries give zeros.",
    "cu_seqlens": (
        "Start of each packed sequence in a batch of one, and the end of the last: 0, ..., n, as in flash-attn. Each\n"
        "attends only to itself."
    ),
}

_USUAL_DOCS = {
    "q": "Queries.",
    "k": "Keys.",
    "v": "Values.",
    **MASK_DOCS,
    "generator": (
        'Source of the draws; None spreads them evenly, the same each time, "global" uses torch\'s global generator.'
    ),
    "group": (
        "Process group across which the tokens are split, for the methods of `nystrom.parallel`; the others raise.\n"
        "None for a single process."
    ),
}
_ERRORS_DOC = """

Raises:
    ValueError: Invalid shapes, dtypes, masks or options, or an argument that the method cannot honour."""


def documented(options: type) -> Callable[[F], F]:
    """Decorate a method's function: document its options, and raise a named error for unsupported arguments.

    In place of the line `**usual: ...` of the docstring come the tensors, the masks, generator and group, and the
    fields of `options`, as far as the function takes them: fields that shape weights concern only its Module. Other
    arguments raise an error, see `refusing`.
    """
    docs = _USUAL_DOCS | option_docs(options)

    def document(function: F) -> F:
        attention, text = refusing(function), inspect.getdoc(function) or ""
        taken = [name for name in inspect.signature(function).parameters if name in docs]
        usual = "\n".join(f"    {name}: " + docs[name].replace("\n", "\n        ") for name in taken)
        attention.__doc__ = re.sub(r"    \*\*usual: .*", lambda _: usual, text) + _ERRORS_DOC
        return attention

    return document


_MASKS = "Use torch.nn.functional.scaled_dot_product_attention for n x s masks, and keep for padding."
_CAUSAL = (
    "attends to whole sequences. Use near_far_attention, which takes it in linear time, or "
    "torch.nn.functional.scaled_dot_product_attention."
)
_SELF = "is self-attention, with one mask for queries and keys. Pass keep, or use 'nystrom' or 'softmax'."
# Arguments that a method may not support, including those of `scaled_dot_product_attention`, and what to do instead.
_CANNOT_HONOUR = {
    "is_causal": _CAUSAL,
    "attn_mask": f"attends to whole sequences. {_MASKS}",
    "attn_bias": f"attends to whole sequences. {_MASKS}",
    "bias": "has no bias of positions. Use near_far_attention or softmax_attention.",
    "dropout_p": "has no n x s weights to drop. Put nn.Dropout on the output.",
    "cu_seqlens": "takes one sequence. Pass the sequences one by one.",
    "key_keep": _SELF,
    "query_keep": _SELF,
    "key_padding_mask": "takes keep, which is True for real tokens. Pass keep=~key_padding_mask.",
    "attention_mask": "takes keep, which is True for real tokens. Pass keep=attention_mask.bool().",
    "mask": "takes keep, which is True for real tokens. Pass keep=mask if it is so.",
    "enable_gqa": "takes as many heads of keys as of queries. Repeat grouped heads before the call.",
}
# Arguments of the package nystrom-attention, and what a layer here takes.
_OF_THE_PACKAGE = {
    "dim": "embed_dim",
    "heads": "num_heads",
    "dim_head": "head_dim",
    "pinv_iterations": "pinv_steps",
    "residual": "conv_kernel_size, None for no skip",
    "residual_conv_kernel": "conv_kernel_size",
    "mask": "key_padding_mask=~mask, which is True for padding",
    "return_attn": "need_weights=True with weight_queries",
}
# Arguments that a layer's call no longer takes, and the call that replaces each.
_CALLED_THEMSELVES = {"context": "context(query)", "cache": "cache(x)"}


def refusing(function: F) -> F:
    """Wrap an attention function so that unsupported arguments raise a ValueError that names them.

    These are: arguments of `scaled_dot_product_attention` that the method does not support, if they are set; unknown
    names, with the nearest known one; and positional arguments after the tensors.
    """
    parameters = inspect.signature(function).parameters.values()
    taken = [parameter.name for parameter in parameters]
    positional = [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    tensors = [name for name in positional if name != "self"]

    @functools.wraps(function)
    def attention(*args: Any, **kwargs: Any) -> Any:
        if len(args) > len(positional):
            count = len(args) - len(positional) + len(tensors)
            raise ValueError(
                f"got {count} positional arguments; expected {', '.join(tensors)}, and all others by name: keep says "
                "which tokens are real."
            )
        for name in [name for name in kwargs if name not in taken]:
            value = kwargs.pop(name)
            if name not in _CANNOT_HONOUR:
                check_names("argument", [name], [each for each in taken if each != "self"])
            if value is not None and value is not False and not (name == "dropout_p" and value == 0):
                raise ValueError(f"{name} cannot be honoured: {function.__qualname__} {_CANNOT_HONOUR[name]}")
        return function(*args, **kwargs)

    return attention  # pyright: ignore[reportReturnType]


def refusing_names_of_the_package(method: F) -> F:
    """Wrap a method of a layer so that an argument that is not ours, or not any more, raises a ValueError with ours."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        for name, ours in _OF_THE_PACKAGE.items():
            if name in kwargs:
                raise ValueError(
                    f"{name} is an argument of the package nystrom-attention: pass {ours} here, or convert a model "
                    "with nystrom.integrations.from_nystrom_attention (docs/from-nystrom-attention.md)."
                )
        for name, ours in _CALLED_THEMSELVES.items():
            if name in kwargs:
                raise ValueError(f"{name} is no argument of a layer: it knows its layer, so call {ours}.")
        return method(*args, **kwargs)

    return call  # pyright: ignore[reportReturnType]
