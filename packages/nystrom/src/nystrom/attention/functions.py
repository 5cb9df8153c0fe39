"""The function of every method, that of rows of its matrix, and its weights, beside the table of the registry."""

from collections.abc import Callable
from typing import Any

from torch import nn

from nystrom.attention.methods.bigbird import bigbird_attention
from nystrom.attention.methods.informer import informer_attention
from nystrom.attention.methods.kernelized import kernelized_attention
from nystrom.attention.methods.linear import linear_attention
from nystrom.attention.methods.linformer import LinformerProjections, linformer_attention
from nystrom.attention.methods.longformer import longformer_attention
from nystrom.attention.methods.near_far import near_far_attention, near_far_rows
from nystrom.attention.methods.nystrom import nystrom_attention, nystrom_rows
from nystrom.attention.methods.performer import PerformerFeatures, performer_attention
from nystrom.attention.methods.reformer import reformer_attention
from nystrom.attention.methods.skyformer import skyformer_attention
from nystrom.attention.methods.skyformer_softmax import skyformer_softmax_attention
from nystrom.attention.methods.softmax import softmax_attention

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "softmax": softmax_attention,
    "nystrom": nystrom_attention,
    "near_far": near_far_attention,
    "kernelized": kernelized_attention,
    "skyformer": skyformer_attention,
    "skyformer_softmax": skyformer_softmax_attention,
    "linear": linear_attention,
    "performer": performer_attention,
    "linformer": linformer_attention,
    "informer": informer_attention,
    "reformer": reformer_attention,
    "longformer": longformer_attention,
    "bigbird": bigbird_attention,
}
ROWS: dict[str, Callable[..., Any]] = {"nystrom": nystrom_rows, "near_far": near_far_rows}
# Modules that supply a function's tensor arguments after the values.
WEIGHTS: dict[str, Callable[..., nn.Module]] = {"performer": PerformerFeatures, "linformer": LinformerProjections}
