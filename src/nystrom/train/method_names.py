"""A method with its size in its name, such as "nystrom-64": the rule of every command that compares methods.

The number sets the option that a method's cost grows with. Needs no torch.
"""

from collections.abc import Mapping

from nystrom.attention.registry import METHODS
from nystrom.checks import check_names

# What the number behind a method's name sets, and what it counts; a method that is missing here takes none.
SIZES: dict[str, tuple[tuple[str, ...], str]] = {
    "nystrom": (("num_landmarks",), "landmarks"),
    "skyformer": (("num_landmarks",), "landmarks"),
    "skyformer_softmax": (("num_landmarks",), "landmarks"),
    "performer": (("num_features",), "features"),
    "linformer": (("num_features",), "projections"),
    "informer": (("num_queries", "num_samples"), "queries"),
    "reformer": (("num_hashes",), "hashes"),
    "longformer": (("window",), "tokens of its window"),
    "bigbird": (("num_random_blocks",), "random blocks"),
}


def split_name(name: str) -> tuple[str, int | None]:
    """A name without the number behind it, and that number; None where there is none."""
    family, _, tail = name.rpartition("-")
    return (family, int(tail)) if tail.isdecimal() else (name, None)


def size_options(method: str, number: int) -> dict[str, object]:
    """The options that a number behind a method's name sets."""
    return dict.fromkeys(SIZES[method][0], number)


def read_method(name: str) -> tuple[str, dict[str, object]]:
    """The method of a name such as "softmax" or "nystrom-64", and the options that its number sets.

    Raises:
        ValueError: An unknown method, or a number behind a method that takes none, or 0.
    """
    method, number = split_name(name)
    check_names("method", [method], METHODS)
    if number is None:
        return method, {}
    if method not in SIZES:
        raise ValueError(f"method {name!r} ends in a number, but {method!r} takes none: write {method!r}.")
    if number == 0:
        raise ValueError(f"method {name!r} has 0 {SIZES[method][1]}; expected at least 1.")
    return method, size_options(method, number)


def sized_name(method: str, options: Mapping[str, object]) -> tuple[str, int | None]:
    """What rows call a method with these options, such as "nystrom-64", and its size; the default where none is set."""
    if method not in SIZES:
        return method, None
    first = SIZES[method][0][0]
    size = options.get(first, getattr(METHODS[method].options(), first))
    assert isinstance(size, int)
    return f"{method}-{size}", size


def reformer_buckets(n: int, chunk_size: int = 64) -> int:
    """Reformer's buckets for n tokens: two for each chunk, as in its authors' code."""
    return 2 * -(-n // chunk_size)
