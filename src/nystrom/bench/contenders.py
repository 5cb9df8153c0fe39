"""What is timed side by side: one table, from a name to how it is built and what it needs.

A contender is named "softmax" or, with its number of landmarks, "nystrom-64". A further method joins with one entry.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

from nystrom.attention.registry import build_attention
from nystrom.attention.skip import DepthwiseSkip
from nystrom.bench.authors import AuthorsAttention
from nystrom.bench.inputs import Call, Inputs, call_of_heads, check_divides
from nystrom.bench.peers import nystrom_attention_call, transformers_call
from nystrom.shapes import check_names

Build = Callable[[Inputs, int, bool], Call]


@dataclass(frozen=True)
class Contender:
    """What can be timed.

    Attributes:
        summary: What it is, in a few words.
        number: What the number behind its name says, such as "landmarks"; None where it has none.
        build: From inputs, the number (0 where it has none) and whether with its skip, to a call; ValueError where it
            cannot run on them.
        quadratic: Its time grows with the square of n.
        squares: n x n matrices that a forward pass holds at once, per sequence and head.
        strips: n x m matrices that it holds at once, m being its number.
        skip: It has a skip convolution that can be had or left.
        package: Package that it comes from, where that is another than this one.
    """

    summary: str
    number: str | None
    build: Build
    quadratic: bool = False
    squares: int = 0
    strips: int = 0
    skip: bool = False
    package: str | None = None


def _ours(method: str, number_option: str | None = None, form: str | None = None) -> Build:
    """Builder of a method of this library, by its name and the option that takes the number."""

    def build(inputs: Inputs, number: int, skip: bool) -> Call:
        sizes = inputs.sizes
        options: dict[str, object] = {} if number_option is None else {number_option: number}
        if form is not None:
            options["form"] = form
        layer = build_attention(method, num_heads=sizes.heads, head_dim=sizes.width, **options)
        convolve = DepthwiseSkip(sizes.heads, sizes.kernel_size) if skip else None
        return call_of_heads(inputs, layer, convolve)

    return build


def _authors(inputs: Inputs, number: int, skip: bool) -> Call:
    check_divides(inputs.n, number)
    kernel_size = inputs.sizes.kernel_size if skip else None
    return call_of_heads(inputs, AuthorsAttention(inputs.sizes.heads, number, kernel_size), None)


CONTENDERS: dict[str, Contender] = {
    "softmax-materialised": Contender(
        summary='exact attention that stores its n x n matrix: the paper\'s "Transformer"',
        number=None,
        build=_ours("softmax", form="materialised"),
        quadratic=True,
        squares=2,
    ),
    "softmax": Contender(
        summary="exact attention in one fused call", number=None, build=_ours("softmax"), quadratic=True
    ),
    "nystrom": Contender(
        summary="Nyström attention", number="landmarks", build=_ours("nystrom", "num_landmarks"), skip=True
    ),
    "kernelized": Contender(summary="Gaussian kernel, exact", number=None, build=_ours("kernelized"), quadratic=True),
    "skyformer": Contender(
        summary="Gaussian kernel through landmarks", number="landmarks", build=_ours("skyformer", "num_landmarks")
    ),
    "authors": Contender(
        summary="the authors' formula of Nyström attention, three matrices and all",
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
}

DEFAULT = (
    "softmax-materialised",
    "softmax",
    "nystrom-32",
    "nystrom-64",
    "kernelized",
    "skyformer-128",
    "authors-64",
    "transformers-64",
    "nystrom-attention-64",
)


def available() -> tuple[str, ...]:
    """The names in `DEFAULT` whose packages are installed."""
    return tuple(name for name in DEFAULT if installed(CONTENDERS[_parsed(name)[0]]))


def installed(contender: Contender) -> bool:
    """Whether the package that it comes from is here."""
    return contender.package is None or importlib.util.find_spec(contender.package) is not None


def find_contender(name: str) -> tuple[Contender, int]:
    """The contender of a name such as "softmax" or "nystrom-64", and its number, 0 where it has none.

    Raises:
        ValueError: An unknown name, a missing or superfluous number, or a package that is not installed.
    """
    family, number = _parsed(name)
    absent = [each for each, contender in CONTENDERS.items() if not installed(contender)]
    try:
        check_names("method", [family], CONTENDERS)
    except ValueError as error:
        raise ValueError(f"{error} Not installed: {', '.join(absent) or 'none'}.") from None
    contender = CONTENDERS[family]
    if contender.number is None and number is not None:
        raise ValueError(f"method {name!r} ends in a number, but {family!r} takes none: write {family!r}.")
    if contender.number is not None and not number:
        raise ValueError(f"method {name!r} lacks its number of {contender.number}, at least 1: write '{family}-64'.")
    if family in absent:
        raise ValueError(f"method {name!r} needs a package that is not installed: pip install 'nystrom[peers]'.")
    return contender, number or 0


def _parsed(name: str) -> tuple[str, int | None]:
    """A name without the number behind it, and that number."""
    family, _, tail = name.rpartition("-")
    return (family, int(tail)) if tail.isdecimal() else (name, None)
