"""The panel of each method of the speed measurements, and the methods that every panel shows for comparison."""

import re
from collections.abc import Iterable, Mapping

# In the order of the panels. Names are those of the rows, without the number at the end.
_FAMILIES: Mapping[str, tuple[str, ...]] = {
    "landmarks, clusters and Gaussian kernels": (
        "nystrom",
        "nystrom-triton",
        "nystrom-compiled",
        "near_far",
        "near_far-triton",
        "skyformer",
        "skyformer-triton",
        "skyformer_softmax",
        "kernelized",
    ),
    "other methods": ("linear", "performer", "linformer", "informer", "reformer", "longformer", "bigbird"),
}
_OTHERS = "other implementations"
REFERENCES = ("softmax-materialised", "softmax", "floor")


def families(methods: Iterable[str]) -> dict[str, list[str]]:
    """The methods of each panel, those of `REFERENCES` left out; a single panel holds whatever there is.

    Args:
        methods: As rows name them, such as "nystrom-64+skip".
    """
    methods = list(dict.fromkeys(methods))
    found: dict[str, list[str]] = {name: [] for name in (*_FAMILIES, _OTHERS)}
    for method in methods:
        base = family_name(method)
        if base not in REFERENCES:
            found[next((name for name, bases in _FAMILIES.items() if base in bases), _OTHERS)].append(method)
    panels = {name: inside for name, inside in found.items() if inside}
    return panels or {"exact attention": []}


def family_name(method: str) -> str:
    """The name without its skip and its number: "nystrom" for "nystrom-64+skip"."""
    return re.sub(r"-\d+$", "", method.removesuffix("+skip"))
