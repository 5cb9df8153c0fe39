r"""Loops of our own on a CPU, `native.cpp`: a head at a time, each product, softmax and sum in the cache of a core.

They compute what `block_stretches`, `biased_blocks` (for buckets), `clusters.nearest_cluster`, `landmark_sums`,
`attention.skip`, `attention.fused`, `linalg.pinv.iterate` and `landmarks.segment_means` do by torch's operators, in
float32 and float64. A thread of torch takes whole heads, or stretches of tokens that no sum crosses, so that a result
depends neither on the number of threads nor on what else the machine does. `native_library` has the machine's compiler
make them at the first call that needs them. Without a compiler, with NYSTROM_NATIVE=0, and where something watches or
transforms the operators, torch's operators do the work: `status` says which, and why. `torch.compile` keeps the loops
of `near_far` and `nystrom`, see `attention.loops_operator`.
"""

import ctypes
import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nystrom.native_library import loops
from nystrom.private_torch import constant_of_graphs, count_modes, is_forward_mode, is_transformed, tracing_state
from nystrom.shapes import has_numbers, is_number

_OF_LANDMARKS = (
    *("q", "landmarks", "middle", "v", "to", "out", "grad"),
    *("of_q", "of_landmarks", "of_middle", "of_v", "of_w", "w", "bias", "sums"),
)
_OF_BLOCKS = "q", "k", "v", "out", "grad", "of_q", "of_k", "of_v"
_DTYPES = torch.float32, torch.float64
# Numbers up to which torch, too, takes one thread.
_GRAIN = 2**15
# Tokens from which a loop is worth a call where torch has a single operator.
_MANY = 1024


class Rows(ctypes.Structure):
    """A tensor (batch, heads, tokens, width), or (rows, tokens, width), whose last axis is dense; or none."""

    _fields_ = (
        ("at", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("batch", "head", "token", "heads")),
    )

    @classmethod
    def of(cls, x: Tensor | None) -> "Rows":
        """The rows of a tensor, which must outlive the call."""
        if x is None:
            return cls(None, 0, 0, 0, 1)
        if x.ndim == 3:
            x = x[:, None]
        return cls(x.data_ptr(), *x.stride()[:3], x.shape[1])


class _Landmarks(ctypes.Structure):
    """The arguments of the loops over tokens, landmarks and taps, see `run_landmarks`."""

    _fields_ = (
        *((name, Rows) for name in _OF_LANDMARKS),
        *((name, ctypes.c_int64) for name in ("tokens", "d", "e", "landmarks_count", "taps")),
        ("scale", ctypes.c_double),
    )


class _Inverse(ctypes.Structure):
    """The arguments of the loops over the steps of an iteration, see `run_iteration`."""

    _fields_ = (
        *((name, Rows) for name in ("a", "z", "out", "grad", "of_a", "of_z")),
        ("history", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("m", "steps")),
    )


class _Blocks(ctypes.Structure):
    """The arguments of the loops over blocks of queries, see `run_blocks`."""

    _fields_ = (
        *((name, Rows) for name in _OF_BLOCKS),
        *((name, ctypes.c_void_p) for name in ("heavy", "exists", "cluster", "selected", "real", "bias", "of_bias")),
        *((name, ctypes.c_int64) for name in ("clusters", "size", "reach", "tokens", "d", "e", "heavies", "selects")),
        *((name, ctypes.c_int64) for name in ("heads", "furthest", "beside")),
        ("scale", ctypes.c_double),
    )


class Positions(NamedTuple):
    """A bias of positions, as native.cpp's `Positions` has it."""

    numbers: Tensor  # (h, x): for each head its bias by distance, around blocks, and at both sides
    furthest: int
    beside: int
    gradient: Tensor | None = None  # Gradient of the numbers for each row of the queries, an output


class Status(NamedTuple):
    """Whether the loops run, the file that keeps them, and why they do not run, or why no file keeps them."""

    runs: bool
    file: Path | None = None
    reason: str = ""


def status(dtype: torch.dtype = torch.float32) -> Status:
    """Whether the loops compute on a CPU in float32, or in another dtype, and why not; compiles them if need be."""
    if dtype not in _DTYPES:
        return Status(False, reason=f"the loops take float32 and float64, not {dtype}")
    if os.environ.get("NYSTROM_NATIVE") == "0":
        return Status(False, reason="NYSTROM_NATIVE is 0")
    library, file, problem = loops(dtype)
    missing = "" if library else "the loops need a C++ compiler (CXX, or c++) on a POSIX system"
    return Status(library is not None, file, problem or missing)


def onnx_library() -> Path:
    """A library of onnxruntime's operators with the loops, for its `SessionOptions.register_custom_ops_library`.

    It has what `nystrom.models.export.onnx_program.export_onnx` writes with loops, and is compiled if need be.

    Raises:
        RuntimeError: No compiler can make it, or no folder can keep it.
    """
    _, file, problem = loops(torch.float32, "onnx_operators.cpp")
    if file is None:
        missing = problem or "they need a C++ compiler (CXX, or c++) on a POSIX system"
        raise RuntimeError(f"the operators of onnxruntime cannot be made: {missing}")
    return file


def runs_in_stretches(*inputs: Tensor) -> bool:
    """Whether to work in stretches: on numbers on a CPU, in float32 or float64, of known sizes, outside a compiler."""
    return not torch.compiler.is_compiling() and all(
        x.device.type == "cpu" and x.dtype in _DTYPES and isinstance(x.shape[-2], int) and has_numbers(x)
        for x in inputs
    )


def is_plain(*inputs: Tensor) -> bool:
    """`runs_in_stretches`, and no subclass, mode, tangent or transform sees the operators on them."""
    # First what a compiler traces.
    if not runs_in_stretches(*inputs) or any(type(x) not in (Tensor, nn.Parameter) for x in inputs):
        return False
    return tracing_state() is None and not (is_transformed() or count_modes() or is_forward_mode())


def keeps_loops(*inputs: Tensor) -> bool:
    """Whether a compiler keeps the loops, see `attention.loops_operator`: outside of exports and transforms."""
    if not torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting():
        return False
    if is_transformed() or is_forward_mode():
        return False
    return all(x.device.type == "cpu" and x.dtype == inputs[0].dtype for x in inputs) and _has_loops(inputs[0].dtype)


@constant_of_graphs
def _has_loops(dtype: torch.dtype) -> bool:
    return status(dtype).runs


def is_worth_loops(tokens: int) -> bool:
    """Whether a call has so many tokens that one loop gains more than the call from Python costs."""
    return is_number(tokens) and tokens >= _MANY


def runs_natively(*inputs: Tensor) -> bool:
    """Whether the loops compute with these tensors, all of one dtype; compiles them if need be."""
    wanted = is_plain(*inputs) and len({x.dtype for x in inputs}) == 1 and os.environ.get("NYSTROM_NATIVE") != "0"
    return wanted and loops(inputs[0].dtype).library is not None


def run(name: str, arguments: ctypes.Structure, rows: int, *inputs: Tensor, repeats: int = 1) -> None:
    """Call a function of `native.cpp` for all rows, on as many threads as torch has where the inputs are large.

    The inputs are all tensors that it reads or writes, first one of its dtype; the repeats are how often it goes over
    them. A backward pass runs whatever NYSTROM_NATIVE has become since the forward pass.
    """
    if away := [x.device for x in inputs if not x.is_cpu]:
        raise ValueError(f"{name} got a tensor on {away[0]}: the loops take tensors on the CPU alone.")
    library = loops(inputs[0].dtype).library
    assert library is not None, "ask runs_natively first"
    threads = torch.get_num_threads() if repeats * max(x.numel() for x in inputs) > _GRAIN else 1
    sizes = ctypes.c_int64(rows), ctypes.c_int64(threads)
    library.in_parallel(getattr(library, name), ctypes.byref(arguments), *sizes, _of_torch())


@functools.cache
def _of_torch() -> object:
    """The call that runs a function on the threads of torch's operators, if they are GNU OpenMP's."""
    return getattr(ctypes.CDLL(None), "GOMP_parallel", None) if os.name == "posix" else None


def run_landmarks(name: str, scale: float = 1.0, **tensors: Tensor | None) -> None:
    """Call a loop of `native.cpp` over the tokens of each head.

    `landmarks_forward` writes softmax(scale q landmarks^T + bias) middle, the convolution of v with the taps w, and
    `to`, as far as these are given, to out; `landmarks_backward` the gradients of_q, of_landmarks, of_middle from grad;
    `convolution_backward` of_v, to which it adds `to`, and of_w, from grad, v and w. `tokens_forward` writes
    softmax(scale landmarks q^T + bias) v to out, and the logarithm of each sum of the softmax to sums;
    `tokens_backward` the gradients of_q, of_landmarks, of_v from the coming one, `middle`, and both results;
    `means_forward` the means of near-equal segments of q to landmarks; `nearest_forward` the numbers of the landmarks
    that `nearest_cluster` wants to out. All have axes (b, h, n or m or 1, width); what is written is in dense memory, w
    and bias are expanded.
    """
    x = {name: dense(x) for name, x in tensors.items() if x is not None}
    b, h, n, e = next(x[name].shape for name in ("out", "grad", "q") if name in x)
    n = x["q"].shape[2] if "q" in x else n
    arguments = _Landmarks(
        *(Rows.of(x.get(name)) for name in _OF_LANDMARKS),
        *(n, x["q"].shape[3] if "q" in x else 0, e),
        *(x[name].shape[axis] if name in x else 0 for name, axis in (("landmarks", 2), ("w", 3))),
        scale,
    )
    run(name, arguments, b * h, *x.values())


def run_blocks(
    name: str,
    chosen: Sequence[Tensor],
    sizes: tuple[int, int, int],
    scale: float,
    *,
    selected: Tensor | None = None,
    real: Tensor | None = None,
    positions: Positions | None = None,
    **tensors: Tensor,
) -> None:
    """Call a loop of `native.cpp` over the blocks of each head of near_far, whose tokens are whole blocks.

    It writes into the memory of `out`, of the gradients, or of `selected`. `chosen` are heavy keys, which of them
    exist, and the cluster of each key; the sizes are the number of clusters, the queries of a block, and its reach.
    """
    x, chosen = {name: dense(x) for name, x in tensors.items()}, [packed(each) for each in chosen]
    bias, furthest, beside, of_bias = positions or (None, 0, 0, None)
    others = [None if each is None else packed(each) for each in (selected, real, bias, of_bias)]
    arguments = _Blocks(
        *(Rows.of(x.get(name)) for name in _OF_BLOCKS),
        *(None if each is None else each.data_ptr() for each in (*chosen, *others)),
        *sizes,
        *(x["q"].shape[1], x["q"].shape[2], x["v"].shape[2], chosen[0].shape[1]),
        0 if selected is None else selected.shape[2],
        *(1 if bias is None else len(bias), furthest, beside),
        scale,
    )
    run(name, arguments, len(x["q"]), *x.values(), *chosen, *(each for each in others if each is not None))


def run_iteration(a: Tensor, z: Tensor | None, steps: int, *, keep: bool) -> tuple[Tensor, Tensor | None]:
    """The result of `linalg.pinv.iterate` for matrices (rows, m, m), and what its gradient needs, if that is kept.

    Without z, it starts from that of the paper.
    """
    library, out = loops(a.dtype).library, a.new_empty(a.shape)
    assert library is not None, "ask runs_natively first"
    size = library.padded(ctypes.c_int64(a.shape[1]))
    history = a.new_empty(len(a), steps, 4, size) if keep else None
    _run_iteration("iterate_forward", history, steps, a=a, z=z, out=out)
    return out, history


def iteration_gradients(a: Tensor, z: Tensor | None, history: Tensor, grad: Tensor) -> tuple[Tensor, Tensor | None]:
    """The gradients of a and z, if it was given, from that of the result of `run_iteration`."""
    of_a, of_z = a.new_empty(a.shape), None if z is None else a.new_empty(a.shape)
    _run_iteration("iterate_backward", history, history.shape[1], a=a, grad=grad, of_a=of_a, of_z=of_z)
    return of_a, of_z


def _run_iteration(name: str, history: Tensor | None, steps: int, *, a: Tensor, **tensors: Tensor | None) -> None:
    x = {name: dense(x) for name, x in {"a": a, **tensors}.items() if x is not None}
    history = None if history is None else packed(history)
    rows = (Rows.of(x.get(name)) for name in ("a", "z", "out", "grad", "of_a", "of_z"))
    address = None if history is None else history.data_ptr()
    run(name, _Inverse(*rows, address, a.shape[1], steps), len(a), *x.values(), repeats=steps)


def room_like(x: Tensor) -> Tensor:
    """Memory in the layout of a tensor, if its last axis is dense; contiguous otherwise."""
    room = torch.empty_like(x)
    return room if room.stride(-1) == 1 else x.new_empty(x.shape)


def as_rows(w: Tensor, v: Tensor) -> Tensor:
    """Taps (h, k) as (b, h, 1, k), for the values (b, h, n, e)."""
    return w[None, :, None].expand(len(v), -1, -1, -1)


def dense(x: Tensor) -> Tensor:
    """The tensor, copied unless its last axis is dense and its memory holds its numbers with their signs."""
    return x if x.stride(-1) == 1 and not x.is_neg() else packed(x)


def packed(x: Tensor) -> Tensor:
    """The tensor, copied unless its memory holds its numbers one after the other: a hook may have saved it in any."""
    return x.resolve_neg().contiguous()
