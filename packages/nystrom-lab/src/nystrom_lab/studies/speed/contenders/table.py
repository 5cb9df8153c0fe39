"""The contenders of the speed measurements: one table, from a name to how the contender is built and what it needs.

A contender has a name such as "softmax" or, with its number of landmarks, "nystrom-64". A new method is one more entry.
"""

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

import torch

from nystrom.attention.backend import check_triton
from nystrom.attention.heads import build_attention
from nystrom.attention.method_names import reformer_buckets, size_options, split_name
from nystrom.attention.options import near_far_sizes
from nystrom.attention.registry import METHODS
from nystrom.attention.skip import DepthwiseSkip
from nystrom.checks import check_names
from nystrom_lab.studies.speed.contenders.authors import AuthorsAttention
from nystrom_lab.studies.speed.contenders.inputs import Call, Inputs, call_of_heads, check_divides
from nystrom_lab.studies.speed.contenders.peers import nystrom_attention_call, transformers_call
from nystrom_lab.studies.speed.contenders.peers_of_others import (
    BIGBIRD_BLOCK,
    REFORMER_CHUNK,
    bigbird_call,
    linformer_call,
    longformer_call,
    performer_call,
    reformer_call,
)

Build = Callable[[Inputs, int, bool], Call]


@dataclass(frozen=True)
class Contender:
    """Something that can be timed.

    Attributes:
        summary: What it is, in a few words.
        number: Meaning of the number after its name, such as "landmarks"; None if it has none.
        default: Whether its number may be omitted, for the method's default options.
        build: Makes a call from inputs, the number (0 if it has none) and whether to include the skip; raises
            ValueError if it cannot run on them.
        quadratic: Whether its time grows with the square of n.
        squares: n x n matrices that a forward pass holds at once, per sequence and head.
        strips: n x m matrices that it holds at once, m being its number.
        skip: Whether it has a skip convolution that can be included or left out.
        package: The package that it comes from, if not this one.
        kernels: Whether it runs the kernels of `nystrom.gpu`: on a GPU, or where Triton interprets them.
    """

    summary: str
    number: str | None
    build: Build
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

    Attributes:
        method: Its name in the registry.
        options: Its options for a number and n tokens.
        compiled: Whether it is compiled by `torch.compile`, for its length only.
        backend: The compiler's backend.
    """

    method: str
    options: Callable[[int, int], dict[str, object]] = lambda number, n: {}
    compiled: bool = False
    backend: str = "inductor"

    def options_at(self, number: int, n: int) -> dict[str, object]:
        """Its options for a number and n tokens, with torch in place of "auto", which may mean the kernels."""
        own = self.options(number, n)
        has_backend = "backend" in {option.name for option in fields(METHODS[self.method].options)}
        return {"backend": "torch", **own} if has_backend else own

    def __call__(self, inputs: Inputs, number: int, skip: bool) -> Call:
        """Build it, see `Contender.build`."""
        sizes = inputs.sizes
        options = self.options_at(number, inputs.n)
        layer = build_attention(self.method, num_heads=sizes.heads, head_dim=sizes.width, **options)
        convolve = DepthwiseSkip(sizes.heads, sizes.kernel_size) if skip else None
        call = call_of_heads(inputs, layer, convolve)
        if not self.compiled:
            return call
        return Call(torch.compile(call.forward, fullgraph=True, dynamic=False, backend=self.backend), call.leaves)


def _sized(method: str) -> Callable[[int, int], dict[str, object]]:
    """The options of a method for the number after its name; the default options without a number."""
    return lambda number, n: size_options(method, number or None)


def _triton(method: str) -> Callable[[int, int], dict[str, object]]:
    sized = _sized(method)
    return lambda number, n: sized(number, n) | {"backend": "triton"}


def _growing(number: int, n: int) -> dict[str, object]:
    return {**near_far_sizes(n), "exact_up_to": 0}


def _hashes(number: int, n: int) -> dict[str, object]:
    buckets = reformer_buckets(n, REFORMER_CHUNK)
    return size_options("reformer", number) | {"chunk_size": REFORMER_CHUNK, "num_buckets": buckets}


def _authors(inputs: Inputs, number: int, skip: bool) -> Call:
    check_divides(inputs.n, number)
    kernel_size = inputs.sizes.kernel_size if skip else None
    return call_of_heads(inputs, AuthorsAttention(inputs.sizes.heads, number, kernel_size), None)


CONTENDERS: dict[str, Contender] = {
    "softmax-materialised": Contender(
        summary='exact attention that stores its n x n matrix: the paper\'s "Transformer"',
        number=None,
        build=Ours("softmax", lambda number, n: {"form": "materialised"}),
        quadratic=True,
        squares=2,
    ),
    "softmax": Contender(
        summary="exact attention in one fused call", number=None, build=Ours("softmax"), quadratic=True
    ),
    "nystrom": Contender(
        summary="Nyström attention", number="landmarks", build=Ours("nystrom", _sized("nystrom")), skip=True
    ),
    "nystrom-triton": Contender(
        summary="Nyström attention by Triton kernels, the skip in the same pass",
        number="landmarks",
        build=Ours("nystrom", _triton("nystrom")),
        skip=True,
        kernels=True,
    ),
    "nystrom-compiled": Contender(
        summary="Nyström attention by torch.compile",
        number="landmarks",
        build=Ours("nystrom", _sized("nystrom"), compiled=True),
        skip=True,
    ),
    "near_far": Contender(
        summary="near tokens and heavy keys exactly, the other keys in clusters",
        number="heavy keys and clusters",
        build=Ours("near_far", _sized("near_far")),
        default=True,
    ),
    "near_far-triton": Contender(
        summary="near_far by Triton kernels",
        number="heavy keys and clusters",
        build=Ours("near_far", _triton("near_far")),
        default=True,
        kernels=True,
    ),
    "near_far-growing": Contender(
        summary="near_far with sizes that grow as the square root of n",
        number=None,
        build=Ours("near_far", _growing),
    ),
    "near_far-growing-triton": Contender(
        summary="the same by Triton kernels",
        number=None,
        build=Ours("near_far", lambda number, n: _growing(number, n) | {"backend": "triton"}),
        kernels=True,
    ),
    "kernelized": Contender(summary="Gaussian kernel, exact", number=None, build=Ours("kernelized"), quadratic=True),
    "skyformer": Contender(
        summary="Gaussian kernel through landmarks", number="landmarks", build=Ours("skyformer", _sized("skyformer"))
    ),
    "skyformer-triton": Contender(
        summary="Skyformer by Triton kernels",
        number="landmarks",
        build=Ours("skyformer", _triton("skyformer")),
        kernels=True,
    ),
    "skyformer_softmax": Contender(
        summary="softmax attention through Skyformer's landmarks",
        number="landmarks",
        build=Ours("skyformer_softmax", _sized("skyformer_softmax")),
    ),
    "linear": Contender(summary="linear attention, ELU + 1", number=None, build=Ours("linear")),
    "linformer": Contender(
        summary="Linformer, shared by the heads",
        number="projections",
        build=Ours("linformer", lambda number, n: size_options("linformer", number) | {"max_length": n}),
    ),
    "longformer": Contender(
        summary="Longformer",
        number="tokens of its window",
        build=Ours("longformer", _sized("longformer")),
    ),
    "performer": Contender(summary="Performer", number="features", build=Ours("performer", _sized("performer"))),
    "reformer": Contender(
        summary="Reformer, queries and keys shared, chunks of 64", number="hashes", build=Ours("reformer", _hashes)
    ),
    "informer": Contender(
        summary="Informer, as many sampled keys as queries",
        number="queries",
        build=Ours("informer", _sized("informer")),
    ),
    "bigbird": Contender(
        summary="BigBird, blocks of 64",
        number="random blocks",
        build=Ours("bigbird", lambda number, n: size_options("bigbird", number) | {"block_size": BIGBIRD_BLOCK}),
    ),
    "authors": Contender(
        summary="the authors' formula of Nyström attention, which stores three matrices",
        number="landmarks",
        build=_authors,
        strips=3,
        skip=True,
    ),
    "transformers": Contender(
        summary="Nyströmformer's self-attention in Hugging Face transformers",
        number="landmarks",
        build=transformers_call,
        strips=3,
        skip=True,
        package="transformers",
    ),
    "nystrom-attention": Contender(
        summary="NystromAttention of the package nystrom-attention",
        number="landmarks",
        build=nystrom_attention_call,
        strips=3,
        skip=True,
        package="nystrom_attention",
    ),
    "linformer-package": Contender(
        summary="LinformerSelfAttention of the package linformer",
        number="projections",
        build=linformer_call,
        package="linformer",
        strips=2,
    ),
    "transformers-longformer": Contender(
        summary="Longformer's self-attention in Hugging Face transformers",
        number="tokens of its window",
        build=longformer_call,
        package="transformers",
        strips=2,
    ),
    "performer-pytorch": Contender(
        summary="FastAttention of the package performer-pytorch",
        number="features",
        build=performer_call,
        package="performer_pytorch",
        strips=2,
    ),
    "reformer-pytorch": Contender(
        summary="LSHAttention of the package reformer-pytorch, buckets of 64",
        number="hashes",
        build=reformer_call,
        package="reformer_pytorch",
    ),
    "transformers-bigbird": Contender(
        summary="BigBird's block-sparse attention in Hugging Face transformers, blocks of 64",
        number="random blocks",
        build=bigbird_call,
        package="transformers",
    ),
}

DEFAULT = (
    "softmax-materialised",
    "softmax",
    "nystrom-32",
    "nystrom-64",
    "near_far",
    "kernelized",
    "skyformer-128",
    "linear",
    "linformer-256",
    "longformer-257",
    "performer-256",
    "reformer-2",
    "informer-128",
    "bigbird-3",
    "authors-64",
    "transformers-64",
    "nystrom-attention-64",
)
# Also measured on a GPU.
DEFAULT_ON_GPU = ("nystrom-triton-64", "nystrom-compiled-64", "near_far-triton", "skyformer-triton-128")


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
        raise ValueError(f"method {name!r} needs a package that is not installed: pip install 'nystrom-lab[peers]'.")
    return contender, number or 0


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
