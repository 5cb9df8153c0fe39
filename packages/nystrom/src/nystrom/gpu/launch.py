"""How kernels are divided into programs, and which inputs they accept.

Tile sizes, warps and stages are fixed: those of rows of up to 256 bytes were the fastest of some on an H200, and
`tools/tune_tiles.py` measures others. They affect only the order of sums, so a fixed choice always gives the same bits.
"""

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from triton.errors import TritonError as TritonError  # for packages that may not import triton
from triton.runtime.errors import OutOfResources

from nystrom.gpu.arithmetic import INTERPRETED

LARGEST_M = LARGEST_WIDTH = 256
# float64 is meant for testing the kernels.
LARGEST_WIDTH_FLOAT64 = 64
SMALLEST_CAPABILITY = (8, 0)
OLDEST_TRITON = (3, 6)
# Largest matrices of which the inverse keeps one in the registers and shared memory of a program.
LARGEST_WHOLE = 64
# The same for its gradient, in float64 or where a program has less shared memory than 64 rows take.
_LARGEST_WHOLE_SMALL, _WHOLE_SHARED_MEMORY = 32, 192 * 1024
# Rows of the blocks in which larger matrices are multiplied, in float32 and in float64.
INVERSE_BLOCK, INVERSE_BLOCK_FLOAT64 = 64, 32
# Rows of landmarks whose spans one program joins, and numbers of tokens that one averages at a time.
JOINED_ROWS, AVERAGED = 16, 4096
# A float32 product is computed as three tf32 products on tensor cores, with about the rounding of one float32 product.
FLOAT32_PRECISION = "tf32x3"
# Each entry: the largest size of a token row in bytes, tokens and landmarks of a block, warps, stages. The second table
# is for GPUs with too little shared memory for the first: 99 KiB at compute capability 8.6, 8.9 and 12.0.
_BY_ROW = ((128, 64, 64, 4, 3), (256, 64, 64, 4, 3), (512, 32, 32, 8, 2), (1024, 32, 16, 8, 1))
_BY_ROW_SMALL = ((128, 64, 64, 4, 2), (256, 32, 32, 8, 2), (512, 16, 16, 4, 1), (1024, 16, 16, 4, 1))
# In bytes; compute capability 8.0 has 163 KiB, 9.0 and 10.0 have 227 KiB.
_LARGE_SHARED_MEMORY = 163 * 1024
# Programs per multiprocessor into which a sum over tokens is split.
_WAVES = 4
# Programs per multiprocessor if each token has a result of its own, and the most tiles of such a span.
_WALKS, _LONGEST_WALK = 8, 32
# Least number of tokens in a span per row of its sums.
_TOKENS_PER_ROW = 32
# A stack shared by all threads: backward passes on a GPU run in their own thread, and must see it too.
_TRIED: list["Tiles"] = []
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class Tiles:
    """Sizes of the blocks of a program."""

    block_n: int  # Tokens
    block_m: int  # Landmarks
    block_d: int  # At least the width of queries and keys
    block_e: int  # At least the width of values
    warps: int = 4  # Warps of a program
    stages: int = 2  # Loads in flight at the same time in sums over tokens
    walk_stages: int = 1  # Loads in flight if each token has a result, and landmarks stay in shared memory


# Launches depend on the multiprocessors and shared memory of the device, and on the tiles of `trying`.
Target = tuple[int, int, Tiles | None]


def target_of(device: torch.device) -> Target:
    """The facts that launches on a device are fitted to, apart from their inputs."""
    return multiprocessors(device), shared_memory(device), _TRIED[-1] if _TRIED else None


def tiles(m: int, d: int, e: int, dtype: torch.dtype, device: torch.device) -> Tiles:
    """Blocks for m landmarks and these widths that fit into shared memory and, for the most part, into registers.

    `dtype` is the widest of the operands of products.
    """
    block_d, block_e = power(d), power(e)
    if _TRIED:
        return replace(_TRIED[-1], block_d=block_d, block_e=block_e)
    row = max(block_d, block_e) * dtype.itemsize
    by_row = _BY_ROW if shared_memory(device) >= _LARGE_SHARED_MEMORY else _BY_ROW_SMALL
    block_n, block_m, warps, stages = next(sizes for most, *sizes in by_row if row <= most)
    return Tiles(block_n, min(power(m), block_m), block_d, block_e, warps, stages)


@contextmanager
def trying(sizes: Tiles) -> Iterator[None]:
    """Use other tiles in a `with` block, apart from the widths. No other thread should launch kernels meanwhile."""
    _TRIED.append(sizes)
    try:
        yield
    finally:
        _TRIED.pop()


def power(size: int) -> int:
    """The smallest power of two that is at least `size` and at least 16: block sizes are powers of two."""
    return max(16, 1 << (size - 1).bit_length())


def splits(tokens: int, programs: int, m: int, block_n: int, device: torch.device) -> tuple[int, int]:
    """Number of spans into which tokens are cut for sums of m rows, and the number of tokens in a span.

    Spans are long enough that their sums, in float32, take only a few per cent of the memory of the tokens. `programs`
    run for each span, and process `block_n` tokens at a time.
    """
    wanted = -(-_WAVES * multiprocessors(device) // programs)
    shortest = max(-(-tokens // wanted), _TOKENS_PER_ROW * m)
    span = -(-min(shortest, tokens) // block_n) * block_n
    return -(-tokens // span), span


def walks(tokens: int, programs: int, block_n: int, device: torch.device) -> tuple[int, int]:
    """The `splits` of kernels in which each token has its own result.

    A span is long enough that what a program reads once, the landmarks, costs little beside its tokens.
    """
    wanted = max(1, _WALKS * multiprocessors(device) // programs)
    span = max(1, min(_LONGEST_WALK, -(-tokens // (wanted * block_n)))) * block_n
    return -(-tokens // span), span


def largest_whole_backward(dtype: torch.dtype, device: torch.device) -> int:
    """The largest matrices of which the gradient of the inverse keeps one in a program."""
    fits = dtype != torch.float64 and shared_memory(device) >= _WHOLE_SHARED_MEMORY
    return LARGEST_WHOLE if fits else _LARGEST_WHOLE_SMALL


def check_launch(m: int, tensors: Mapping[str, Any]) -> None:
    """Raise ValueError for device, Triton, dtype, width or number of landmarks that the kernels do not support.

    `tensors` are q, k and v with matching shapes, and others, by name, or what is known of them.
    """
    q, out = tensors["q"], "or pass backend='torch'"
    check_device(q.device)
    for name, x in tensors.items():
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device} but q is on {q.device}: move them to one device {out}.")
    if q.dtype not in _DTYPES:
        raise ValueError(f"q has dtype {q.dtype}; expected float32, bfloat16 or float16: cast it {out}.")
    if m > LARGEST_M:
        raise ValueError(f"num_landmarks is {m}; expected at most {LARGEST_M}: take fewer {out}.")
    limit = LARGEST_WIDTH if q.dtype != torch.float64 else LARGEST_WIDTH_FLOAT64
    for name in ("q", "v"):
        width = tensors[name].shape[-1]
        if width > limit:
            raise ValueError(
                f"{name} has head width {width}; expected at most {limit} in {q.dtype}: split heads {out}."
            )


def check_device(device: torch.device) -> None:
    """Raise ValueError if the kernels do not run on a device, with the installed Triton."""
    out = "or pass backend='torch'"
    if device.type != "cuda" and not (INTERPRETED.value and device.type == "cpu"):
        raise ValueError(f"backend 'triton' needs a CUDA device, not {device}: move the tensors to a GPU {out}.")
    check_version(triton.__version__)
    if device.type == "cuda" and torch.version.cuda:
        check_capability(capability_of(device), device)


def check_version(version: str) -> None:
    """Raise ValueError for a version of Triton that is too old."""
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_TRITON:
        raise ValueError(
            f"triton {version} is installed; expected {'.'.join(map(str, OLDEST_TRITON))} or newer: "
            "pip install -U triton, or pass backend='torch'."
        )


def check_capability(capability: tuple[int, int], device: torch.device) -> None:
    """Raise ValueError for a GPU whose compute capability is too low."""
    if capability < SMALLEST_CAPABILITY:
        came, wanted = (".".join(map(str, each)) for each in (capability, SMALLEST_CAPABILITY))
        raise ValueError(
            f"{device} has compute capability {came}; expected {wanted} or higher: use a newer GPU or pass "
            "backend='torch'."
        )


@contextmanager
def launching_on(device: torch.device, *, computes: bool = True) -> Iterator[None]:
    """Context in which kernels are launched on a device: Triton uses the current one, not that of the tensors.

    If torch `computes` between the kernels, it keeps its dtypes there, also in a backward pass under autocast.

    Raises:
        RuntimeError: A kernel needs more resources than the GPU has.
    """
    current = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    cast = computes and torch.amp.is_autocast_available(device.type)
    with current, torch.autocast(device.type, enabled=False) if cast else nullcontext():
        try:
            yield
        except OutOfResources as error:
            raise RuntimeError(
                f"{device} has too little {error.name} for the kernels at these sizes (it has {error.limit}, they need "
                f"{error.required}): use narrower heads or fewer landmarks, or pass backend='torch'."
            ) from error


def capability_of(device: torch.device) -> tuple[int, int]:
    """Compute capability of a GPU."""
    if not torch.compiler.is_compiling():
        return _capability(device)
    # A compiler takes properties for constants, and warns of a cache.
    properties = torch.cuda.get_device_properties(device)
    return properties.major, properties.minor


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 for any other device."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program on a GPU may use; for any other device, those of compute capability 9.0."""
    if device.type != "cuda":
        return 227 * 1024
    properties = torch.cuda.get_device_properties(device)
    # ROCm has no higher limit that a kernel can opt in to.
    return getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
