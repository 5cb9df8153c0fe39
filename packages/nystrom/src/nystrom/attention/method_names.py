"""Method names with a size, such as "nystrom-64": one rule for all commands that compare methods.

The number sets the option that determines a method's cost. Needs no torch.
"""

from collections.abc import Mapping

from nystrom.attention.registry import METHODS
from nystrom.checks import check_names

# Used in configurations in place of a method name: values pass through unchanged. It is not a method, since it relates
# no token to another.
NO_ATTENTION = "none"

# Methods to whose stored weights the papers' code for the Long Range Arena applies dropout in training.
DROPS_WEIGHTS = ("softmax", "kernelized")

# The options that the number after a method's name sets, and what it counts; methods not listed take no number.
SIZES: dict[str, tuple[tuple[str, ...], str]] = {
    "nystrom": (("num_landmarks",), "landmarks"),
    "near_far": (("num_heavy", "num_clusters"), "heavy keys and clusters"),
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
    """A name without its number, and the number; None if there is none."""
    family, _, tail = name.rpartition("-")
    return (family, int(tail)) if tail.isdecimal() else (name, None)


def size_options(method: str, number: int | None) -> dict[str, object]:
    """The options that a number after a method's name sets; `number` is None if there is none.

    Methods are compared as approximations, so near_far gets no exact limit.
    """
    plain: dict[str, object] = {"exact_up_to": 0} if method == "near_far" else {}
    return plain if number is None else dict.fromkeys(SIZES[method][0], number) | plain


def read_method(name: str) -> tuple[str, dict[str, object]]:
    """The method in a name such as "softmax" or "nystrom-64", and the options that its number sets: `size_options`.

    Raises:
        ValueError: An unknown method, a number after a method that takes none, or the number 0.
    """
    method, number = split_name(name)
    check_names("method", [method], METHODS)
    if number is None:
        return method, size_options(method, None)
    if method not in SIZES:
        raise ValueError(f"method {name!r} ends in a number, but {method!r} takes none: write {method!r}.")
    if number == 0:
        raise ValueError(f"method {name!r} has 0 {SIZES[method][1]}; expected at least 1.")
    return method, size_options(method, number)


def sized_name(method: str, options: Mapping[str, object]) -> tuple[str, int | None]:
    """The name of a method with these options in measured rows, such as "nystrom-64", and its size.

    A method whose sizes differ from each other gets its plain name and no size.
    """
    if method not in SIZES:
        return method, None
    default = METHODS[method].options()
    sizes = {options.get(name, getattr(default, name)) for name in SIZES[method][0]}
    if len(sizes) > 1:
        return method, None
    (size,) = sizes
    assert isinstance(size, int)
    return f"{method}-{size}", size


def near_far_keys(number: int) -> dict[str, object]:
    """near_far's options for `number` keys per query, at least 8: half near, a quarter heavy, the rest clusters."""
    quarter = number // 4
    sizes: dict[str, object] = {
        "block_size": quarter,
        "reach": number // 8,
        "num_heavy": quarter,
        "num_clusters": quarter,
    }
    return sizes | {"exact_up_to": 0}


def reformer_buckets(n: int, chunk_size: int = 64) -> int:
    """Reformer's number of buckets for n tokens: two per chunk, as in the authors' code."""
    return 2 * -(-n // chunk_size)
