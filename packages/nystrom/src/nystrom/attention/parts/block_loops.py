"""The call of the loops of `native.cpp` over blocks of queries, see `block_stretches` and `biased_loops`."""

import ctypes
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from nystrom.attention.options import NearFarOptions
from nystrom.attention.parts.clusters import Chosen
from nystrom.native import Rows, dense, packed, run
from nystrom.shapes import score_scale


class _Blocks(ctypes.Structure):
    """The arguments of native.cpp's `Blocks`."""

    _fields_ = (
        *((name, Rows) for name in ("q", "k", "v", "out", "grad", "of_q", "of_k", "of_v")),
        *((name, ctypes.c_void_p) for name in ("heavy", "cluster", "found", "selected", "real", "bias", "of_bias")),
        *((name, ctypes.c_int64) for name in ("tokens", "d", "e", "heavies", "clusters", "size", "reach", "selects")),
        *((name, ctypes.c_int64) for name in ("heads", "furthest", "beside")),
        ("scale", ctypes.c_double),
    )


class Positions(NamedTuple):
    """A bias of positions, as native.cpp's `Positions` has it."""

    numbers: Float[Tensor, "h x"]
    furthest: int
    beside: int
    gradient: Float[Tensor, "r x"] | None = None  # Of the numbers, for each row of the queries, which is written


def run_blocks(
    name: str,
    chosen: Chosen,
    options: NearFarOptions,
    *,
    selected: Tensor | None = None,
    real: Tensor | None = None,
    positions: Positions | None = None,
    **tensors: Tensor,
) -> None:
    """Call a loop, which writes into the memory of `out`, of the gradients, or of `selected`."""
    tensors, whole = {name: dense(x) for name, x in tensors.items()}, Chosen(*(packed(x) for x in chosen))
    q, v = tensors["q"], tensors["v"]
    bias, furthest, beside, of_bias = positions or (None, 0, 0, None)
    others = [None if x is None else packed(x) for x in (selected, real, bias, of_bias)]
    arguments = _Blocks(
        *(Rows.of(tensors.get(name)) for name in ("q", "k", "v", "out", "grad", "of_q", "of_k", "of_v")),
        *(x.data_ptr() for x in (whole.heavy, whole.cluster, whole.found)),
        *(None if x is None else x.data_ptr() for x in others),
        *(q.shape[1], q.shape[2], v.shape[2], whole.heavy.shape[1]),
        *(options.num_clusters, options.block_size, options.reach),
        0 if selected is None else selected.shape[2],
        *(1 if bias is None else len(bias), furthest, beside),
        score_scale(q, options.scale),
    )
    run(name, arguments, len(q), *tensors.values(), *whole, *(x for x in others if x is not None))


def select_by_loops(q: Tensor, k: Tensor, v: Tensor, real: Tensor, chosen: Chosen, options: NearFarOptions) -> Tensor:
    """The result of `selected_keys.select_keys`, from the same arguments."""
    selected = q.new_empty(len(q), q.shape[1] // options.block_size, options.num_selected, dtype=torch.long)
    run_blocks("blocks_select", chosen, options, selected=selected, real=real, q=q, k=k, v=v)
    return selected
