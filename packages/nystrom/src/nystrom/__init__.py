"""Attention in linear time and memory by the Nyström method."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nystrom.attention.caches.near_far_context import NearFarContext, near_far_context
    from nystrom.attention.heads import build_attention
    from nystrom.attention.layer import MultiheadAttention, NystromAttention
    from nystrom.attention.methods.bigbird import bigbird_attention
    from nystrom.attention.methods.informer import informer_attention
    from nystrom.attention.methods.kernelized import kernelized_attention
    from nystrom.attention.methods.linear import linear_attention
    from nystrom.attention.methods.linformer import linformer_attention
    from nystrom.attention.methods.longformer import longformer_attention
    from nystrom.attention.methods.near_far import near_far_attention, near_far_rows
    from nystrom.attention.methods.nystrom import nystrom_attention, nystrom_factors, nystrom_rows
    from nystrom.attention.methods.performer import performer_attention
    from nystrom.attention.methods.reformer import reformer_attention
    from nystrom.attention.methods.skyformer import skyformer_attention
    from nystrom.attention.methods.skyformer_softmax import skyformer_softmax_attention
    from nystrom.attention.methods.softmax import softmax_attention
    from nystrom.attention.options import near_far_sizes
    from nystrom.attention.position_bias import Alibi, Alibi2d, RelativeBuckets
    from nystrom.integrations.error_monitor import monitor_errors
    from nystrom.integrations.modules import replace_attention
    from nystrom.linalg.pinv import residual
    from nystrom.tiles import heat_map, hilbert_order

__version__ = "0.3.0"

__all__ = [
    "Alibi",
    "Alibi2d",
    "MultiheadAttention",
    "NearFarContext",
    "NystromAttention",
    "RelativeBuckets",
    "bigbird_attention",
    "build_attention",
    "heat_map",
    "hilbert_order",
    "informer_attention",
    "kernelized_attention",
    "linear_attention",
    "linformer_attention",
    "longformer_attention",
    "monitor_errors",
    "near_far_attention",
    "near_far_context",
    "near_far_rows",
    "near_far_sizes",
    "nystrom_attention",
    "nystrom_factors",
    "nystrom_rows",
    "performer_attention",
    "reformer_attention",
    "replace_attention",
    "residual",
    "skyformer_attention",
    "skyformer_softmax_attention",
    "softmax_attention",
]

_HOMES = {
    "Alibi": "nystrom.attention.position_bias",
    "Alibi2d": "nystrom.attention.position_bias",
    "MultiheadAttention": "nystrom.attention.layer",
    "NearFarContext": "nystrom.attention.caches.near_far_context",
    "NystromAttention": "nystrom.attention.layer",
    "RelativeBuckets": "nystrom.attention.position_bias",
    "bigbird_attention": "nystrom.attention.methods.bigbird",
    "build_attention": "nystrom.attention.heads",
    "heat_map": "nystrom.tiles",
    "hilbert_order": "nystrom.tiles",
    "informer_attention": "nystrom.attention.methods.informer",
    "kernelized_attention": "nystrom.attention.methods.kernelized",
    "linear_attention": "nystrom.attention.methods.linear",
    "linformer_attention": "nystrom.attention.methods.linformer",
    "longformer_attention": "nystrom.attention.methods.longformer",
    "monitor_errors": "nystrom.integrations.error_monitor",
    "near_far_attention": "nystrom.attention.methods.near_far",
    "near_far_context": "nystrom.attention.caches.near_far_context",
    "near_far_rows": "nystrom.attention.methods.near_far",
    "near_far_sizes": "nystrom.attention.options",
    "nystrom_attention": "nystrom.attention.methods.nystrom",
    "nystrom_factors": "nystrom.attention.methods.nystrom",
    "nystrom_rows": "nystrom.attention.methods.nystrom",
    "performer_attention": "nystrom.attention.methods.performer",
    "reformer_attention": "nystrom.attention.methods.reformer",
    "replace_attention": "nystrom.integrations.modules",
    "residual": "nystrom.linalg.pinv",
    "skyformer_attention": "nystrom.attention.methods.skyformer",
    "skyformer_softmax_attention": "nystrom.attention.methods.skyformer_softmax",
    "softmax_attention": "nystrom.attention.methods.softmax",
}


def __getattr__(name: str) -> object:
    """Import a public name on first use, so that the command line and the reports start without torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'nystrom' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
