"""The contenders of the speed measurements: one table, from a name to how the contender is built and what it needs.

A contender has a name such as "softmax" or, with its number of landmarks, "nystrom-64". A method of the registry has
its entry by itself; another implementation is one line.
"""

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace

import torch

from nystrom.attention.backend import check_triton
from nystrom.attention.heads import build_attention
from nystrom.attention.method_names import SIZES, reformer_buckets, size_options, split_name
from nystrom.attention.options import NearFarOptions, near_far_sizes
from nystrom.attention.parts.clusters import QUERY_MEANS
from nystrom.attention.registry import METHODS
from nystrom.attention.skip import DepthwiseSkip
from nystrom.checks import check_names
from nystrom_papers.bench.inputs import Call, Inputs, call_of_heads
from nystrom_papers.bench.peers import (
    CHUNK,
    authors_call,
    bigbird_call,
    linformer_call,
    longformer_call,
    nystrom_attention_call,
    performer_call,
    reformer_call,
    transformers_call,
)


@dataclass(frozen=True)
class Contender:
    """Something that can be timed.

    Attributes:
        build: Makes a call from inputs, the number (0 if it has none) and whether to include the skip; raises
            ValueError if it cannot run on them.
        number: Meaning of the number after its name, such as "landmarks"; None if it has none.
        default: Whether its number may be omitted, for the method's default options.
        quadratic: Whether its time grows with the square of n.
        squares: n x n matrices that a forward pass holds at once, per sequence and head.
        strips: n x m matrices that it holds at once, m being its number.
        skip: Whether it has a skip convolution that can be included or left out.
        package: The package that it comes from, if not this one.
        kernels: Whether it runs the kernels of `nystrom.gpu`: on a GPU, or where Triton interprets them.
    """

    build: Callable[[Inputs, int, bool], Call]
    number: str | None = None
    default: bool = False
    quadratic: bool = False
    squares: int = 0
    strips: int = 0
    skip: bool = False
    package: str | None = None
    kernels: bool = False


@dataclass(frozen=True)
class Ours:
    """Builder of a method of this library.

    `more` are its options for n tokens, beside what its number sets.
    """

    method: str
    more: Callable[[int], Mapping[str, object]] = lambda n: {}

    def options(self, number: int, n: int) -> dict[str, object]:
        """The method's options for a number, 0 for none, and n tokens."""
        return {**size_options(self.method, number or None), **self.more(n)}

    def options_at(self, number: int, n: int) -> dict[str, object]:
        """The same, with torch in place of "auto", which may mean the kernels."""
        has_backend = "backend" in {option.name for option in fields(METHODS[self.method].options)}
        return {**({"backend": "torch"} if has_backend else {}), **self.options(number, n)}

    def __call__(self, inputs: Inputs, number: int, skip: bool) -> Call:
        """Build it, see `Contender.build`."""
        sizes, options = inputs.sizes, self.options_at(number, inputs.n)
        layer = build_attention(self.method, num_heads=sizes.heads, head_dim=sizes.width, **options)
        return call_of_heads(inputs, layer, DepthwiseSkip(sizes.heads, sizes.kernel_size) if skip else None)


# Options that depend on the length, or that replace a default.
_MORE: dict[str, Callable[[int], Mapping[str, object]]] = {
    "linformer": lambda n: {"max_length": n},
    "reformer": lambda n: {"chunk_size": CHUNK, "num_buckets": reformer_buckets(n, CHUNK)},
    "bigbird": lambda n: {"block_size": CHUNK},
}
_OURS = {
    name: Contender(
        Ours(name, _MORE.get(name, lambda n: {})),
        SIZES[name][1] if name in SIZES else None,
        default=name == "near_far",
        quadratic=name in ("softmax", "kernelized"),
        skip=name == "nystrom",
    )
    for name in METHODS
}


def _growing(n: int) -> Mapping[str, object]:
    """near_far with sizes that grow as the square root of n."""
    return {**near_far_sizes(n, selects=False), "exact_up_to": 0}


def _choice(inputs: Inputs, number: int, skip: bool) -> Call:
    """The choice of near_far with growing sizes, by the kernels, without the attention; see `Contender.build`."""
    from nystrom.gpu.near_far.choice import ChoiceOptions, choose_by_kernels

    (q, k, _), sizes = (x.detach() for x in inputs.heads()), near_far_sizes(inputs.n, selects=False)
    iterations, scale = NearFarOptions().iterations, inputs.sizes.width**-0.5
    options = ChoiceOptions(QUERY_MEANS, sizes["num_heavy"], sizes["num_clusters"], iterations, scale)
    return Call(lambda: choose_by_kernels(q, k, None, None, options)[-1], inputs.leaves)


CONTENDERS: dict[str, Contender] = {
    **_OURS,
    # Exact attention that stores its n x n matrix: the papers' "Transformer"; the plain one is one fused call.
    "softmax-materialised": Contender(Ours("softmax", lambda n: {"form": "materialised"}), quadratic=True, squares=2),
    # Triton kernels, with the skip of nystrom in the same pass.
    **{
        f"{name}-triton": replace(_OURS[name], build=Ours(name, lambda n: {"backend": "triton"}), kernels=True)
        for name in ("nystrom", "near_far", "skyformer")
    },
    "near_far-growing": Contender(Ours("near_far", _growing)),
    "near_far-growing-triton": Contender(
        Ours("near_far", lambda n: {**_growing(n), "backend": "triton"}), kernels=True
    ),
    "near_far-growing-choice": Contender(_choice, kernels=True),
    # On a GPU, torch's operators compute this one.
    "near_far-selected": Contender(Ours("near_far", lambda n: {**near_far_sizes(n), "exact_up_to": 0})),
    "near_far-heads-triton": Contender(
        Ours("near_far", lambda n: {"exact_heads": [0], "backend": "triton"}), quadratic=True, kernels=True
    ),
    "authors": Contender(authors_call, "landmarks", strips=3, skip=True),
    "transformers": Contender(transformers_call, "landmarks", strips=3, skip=True, package="transformers"),
    "nystrom-attention": Contender(
        nystrom_attention_call, "landmarks", strips=3, skip=True, package="nystrom_attention"
    ),
    "linformer-package": Contender(linformer_call, "projections", strips=2, package="linformer"),
    "transformers-longformer": Contender(longformer_call, "tokens of its window", strips=2, package="transformers"),
    "performer-pytorch": Contender(performer_call, "features", strips=2, package="performer_pytorch"),
    "reformer-pytorch": Contender(reformer_call, "hashes", package="reformer_pytorch"),
    "transformers-bigbird": Contender(bigbird_call, "random blocks", package="transformers"),
}

DEFAULT = (
    "softmax-materialised", "softmax", "nystrom-32", "nystrom-64", "near_far", "kernelized", "skyformer-128", "linear",
    "linformer-256", "longformer-257", "performer-256", "reformer-2", "informer-128", "bigbird-3", "authors-64",
    "transformers-64", "nystrom-attention-64",
)  # fmt: skip
# Also measured on a GPU.
DEFAULT_ON_GPU = ("nystrom-triton-64", "near_far-triton", "skyformer-triton-128")


def available(device: str = "cpu", contenders: Mapping[str, Contender] = CONTENDERS) -> tuple[str, ...]:
    """The names in `DEFAULT` whose packages are installed, and on a GPU those in `DEFAULT_ON_GPU`."""
    names = DEFAULT + (DEFAULT_ON_GPU if device == "cuda" else ())
    return tuple(name for name in names if installed(contenders[split_name(name)[0]]))


def installed(contender: Contender) -> bool:
    """Whether its package is installed."""
    return contender.package is None or importlib.util.find_spec(contender.package) is not None


def find_contender(name: str, contenders: Mapping[str, Contender] = CONTENDERS) -> tuple[Contender, int]:
    """The contender of a name such as "softmax" or "nystrom-64", and its number, 0 if it has none.

    Raises:
        ValueError: An unknown name, a missing or superfluous number, or a package that is not installed.
    """
    family, number = split_name(name)
    absent = [each for each, contender in contenders.items() if not installed(contender)]
    try:
        check_names("method", [family], contenders)
    except ValueError as error:
        raise ValueError(f"{error} Not installed: {', '.join(absent) or 'none'}.") from None
    contender = contenders[family]
    if contender.number is None and number is not None:
        raise ValueError(f"method {name!r} ends in a number, but {family!r} takes none: write {family!r}.")
    if contender.number is not None and not number and not (contender.default and number is None):
        raise ValueError(f"method {name!r} lacks its number of {contender.number}, at least 1: write '{family}-64'.")
    if family in absent:
        raise ValueError(f"method {name!r} needs a package that is not installed: pip install 'nystrom-papers[peers]'.")
    return contender, number or 0


def find_method(name: str) -> tuple[Ours, int]:
    """The method of this library that a name such as "nystrom-128" means, and its number, for a whole model.

    Raises:
        ValueError: The name is unknown, or belongs to another package: models use this library's methods only.
    """
    contender, number = find_contender(name)
    if not isinstance(contender.build, Ours):
        raise ValueError(
            f"method {name!r} is not a method of this library, as `nystrom methods` lists them: whole models are "
            "measured with these only."
        )
    return contender.build, number


def check_kernels(name: str, contender: Contender, device: torch.device) -> None:
    """Raise an error for a contender whose kernels the device cannot run.

    Raises:
        ValueError: No Triton, or a CPU where Triton does not interpret.
    """
    if not contender.kernels:
        return
    check_triton({})
    from nystrom.gpu.arithmetic import INTERPRETED

    if device.type != "cuda" and not INTERPRETED.value:
        raise ValueError(
            f"method {name!r} needs a CUDA device but device is {device.type!r}: pass device='cuda', leave it out, or "
            "set TRITON_INTERPRET=1 to have its kernels interpreted, which says nothing about their speed."
        )
