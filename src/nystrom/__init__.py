"""Attention in linear time and memory by the Nyström method."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nystrom.attention.kernelized import kernelized_attention
    from nystrom.attention.multihead import NystromAttention
    from nystrom.attention.nystrom import nystrom_attention
    from nystrom.attention.registry import build_attention
    from nystrom.attention.skyformer import skyformer_attention
    from nystrom.attention.softmax import softmax_attention

__version__ = "0.1.0"

__all__ = [
    "NystromAttention",
    "build_attention",
    "kernelized_attention",
    "nystrom_attention",
    "skyformer_attention",
    "softmax_attention",
]

_HOMES = {
    "NystromAttention": "nystrom.attention.multihead",
    "build_attention": "nystrom.attention.registry",
    "kernelized_attention": "nystrom.attention.kernelized",
    "nystrom_attention": "nystrom.attention.nystrom",
    "skyformer_attention": "nystrom.attention.skyformer",
    "softmax_attention": "nystrom.attention.softmax",
}


def __getattr__(name: str) -> object:
    """Import a public name when it is first asked for: the command line and the reports do without torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'nystrom' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
