"""Attention in linear time and memory by the Nyström method."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nystrom.attention.bigbird import bigbird_attention
    from nystrom.attention.informer import informer_attention
    from nystrom.attention.kernelized import kernelized_attention
    from nystrom.attention.linear import linear_attention
    from nystrom.attention.linformer import linformer_attention
    from nystrom.attention.longformer import longformer_attention
    from nystrom.attention.multihead import NystromAttention
    from nystrom.attention.nystrom import nystrom_attention
    from nystrom.attention.performer import performer_attention
    from nystrom.attention.reformer import reformer_attention
    from nystrom.attention.registry import build_attention
    from nystrom.attention.replace import replace_attention
    from nystrom.attention.skyformer import skyformer_attention
    from nystrom.attention.skyformer_softmax import skyformer_softmax_attention
    from nystrom.attention.softmax import softmax_attention

__version__ = "0.1.0"

__all__ = [
    "NystromAttention",
    "bigbird_attention",
    "build_attention",
    "informer_attention",
    "kernelized_attention",
    "linear_attention",
    "linformer_attention",
    "longformer_attention",
    "nystrom_attention",
    "performer_attention",
    "reformer_attention",
    "replace_attention",
    "skyformer_attention",
    "skyformer_softmax_attention",
    "softmax_attention",
]

_HOMES = {
    "NystromAttention": "nystrom.attention.multihead",
    "bigbird_attention": "nystrom.attention.bigbird",
    "build_attention": "nystrom.attention.registry",
    "informer_attention": "nystrom.attention.informer",
    "kernelized_attention": "nystrom.attention.kernelized",
    "linear_attention": "nystrom.attention.linear",
    "linformer_attention": "nystrom.attention.linformer",
    "longformer_attention": "nystrom.attention.longformer",
    "nystrom_attention": "nystrom.attention.nystrom",
    "performer_attention": "nystrom.attention.performer",
    "reformer_attention": "nystrom.attention.reformer",
    "replace_attention": "nystrom.attention.replace",
    "skyformer_attention": "nystrom.attention.skyformer",
    "skyformer_softmax_attention": "nystrom.attention.skyformer_softmax",
    "softmax_attention": "nystrom.attention.softmax",
}


def __getattr__(name: str) -> object:
    """Import a public name when it is first asked for: the command line and the reports do without torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'nystrom' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
