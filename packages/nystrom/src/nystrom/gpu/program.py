"""Programs of launches: what shapes and options decide is decided once, and a call only takes memory and launches.

The code that builds a program sees `Slot`s: a shape, strides and a dtype as a tensor has, and no numbers. A call gives
a program its tensors. It takes memory for the results and for one workspace, and launches kernels that are compiled
already, with addresses in place of tensors. In Triton's interpreter, the same launches get views of the same memory.

Programs hold no tensors, and belong into a bounded cache whose keys are `key_of` the inputs, `target` and the options.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import driver

from nystrom.gpu.arguments import StridedTokens
from nystrom.gpu.arithmetic import INTERPRETED
from nystrom.gpu.launch import launching_on

# Bytes between the parts of a workspace, as between tensors of a GPU.
_ALIGNED = 512
# The same in elements, between the parts of a result.
_PACKED = 128
# Triton compiles for addresses that are multiples of 16 bytes.
_WHOLE = 16
_WORKSPACE = -1
# The most programs of a kind that are kept; one for each length that is in use.
PROGRAMS = 256


class GivenTensor(NamedTuple):
    """The facts by which a program reads a tensor: it can use any two that agree in them."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    aligned: bool


def key_of(*tensors: Tensor | None) -> tuple[GivenTensor | None, ...]:
    """The cache key of a program: shape, strides, dtype, device and alignment of each tensor."""
    return tuple(
        None if x is None else GivenTensor(x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % _WHOLE == 0)
        for x in tensors
    )


class Slot(NamedTuple):
    """A tensor of a program."""

    memory: int  # Number of the tensor of a call that holds it: the inputs, then the results; -1 is the workspace
    offset: int  # First byte in that memory
    shape: tuple[int, ...]  # Shape of the tensor
    strides: tuple[int, ...]  # Strides, in elements
    dtype: torch.dtype  # Dtype of the tensor

    def stride(self) -> tuple[int, ...]:
        """The strides, in elements."""
        return self.strides

    @property
    def tokens(self) -> StridedTokens:
        """A tensor of tokens as kernels take it."""
        return StridedTokens(self, *self.strides[:3])

    def rows(self, first: int) -> "Slot":
        """The rows from `first` on, of a tensor (b, h, rows, width) or (b, rows)."""
        dim = -2 if len(self.shape) == 4 else -1
        first %= self.shape[dim]
        shape = list(self.shape)
        shape[dim] -= first
        return self._replace(offset=self.offset + first * self.strides[dim] * self.dtype.itemsize, shape=tuple(shape))


class Program:
    """Launches in order; the first of the inputs `given` says where they run."""

    def __init__(self, given: Sequence[GivenTensor | None]):
        self.inputs: list[Any] = [None if x is None else _slot_of(i, x) for i, x in enumerate(given)]
        assert given[0] is not None
        self.device, self._results, self._computes = given[0].device, list[tuple[Any, ...]](), False
        self._taken = self._size = 0
        self._steps: list[_Step] = []

    def result(self, shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None = None) -> Slot:
        """A tensor that a call returns."""
        strides = tuple(strides or contiguous(shape))
        self._results.append((tuple(shape), strides, dtype))
        return Slot(len(self.inputs) + len(self._results) - 1, 0, tuple(shape), strides, _read_as(dtype))

    def like(self, x: Slot, width: int | None = None) -> Slot:
        """A result with the layout of tokens x."""
        shape = (*x.shape[:3], x.shape[3] if width is None else width)
        return self.result(shape, x.dtype, layout(x, shape))

    def scratch(self, shape: Sequence[int], dtype: torch.dtype) -> Slot:
        """A contiguous tensor in the workspace."""
        slot = Slot(_WORKSPACE, self._taken, tuple(shape), contiguous(shape), dtype)
        self._taken += -(-prod(shape) * dtype.itemsize // _ALIGNED) * _ALIGNED
        self._size = max(self._size, self._taken)
        return slot

    def packed(self, shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> list[Slot]:
        """Contiguous tensors in one result, see `parts_of` and `packed_size`."""
        return parts_of(self.result((packed_size(shapes),), dtype), shapes)

    @contextmanager
    def reused(self) -> Iterator[None]:
        """The workspace that is taken in a `with` block is taken again after it."""
        taken = self._taken
        yield
        self._taken = taken

    def launch(self, kernel: Any, programs: int, *args: Any, **options: Any) -> None:
        """Add a launch of a kernel; slots stand for tensors."""
        self._steps.append(_Launch(kernel, programs, args, options))

    def torch(self, function: Callable[..., None], *args: Any) -> None:
        """Add a call of a function with tensors in place of slots, which writes into some of them."""
        self._computes = True
        self._steps.append(_Call(function, args))

    def __call__(self, *inputs: Tensor | None) -> list[Tensor]:
        """Run it on tensors that it was built for."""
        results = [
            torch.empty_strided(shape, strides, dtype=dtype, device=self.device)
            for shape, strides, dtype in self._results
        ]
        tensors = [*inputs, *results]
        # At least one byte, so that it has an address.
        tensors.append(torch.empty(max(self._size, 1), dtype=torch.uint8, device=self.device))
        places = [0 if x is None else x.data_ptr() for x in tensors]
        with launching_on(self.device, computes=self._computes):
            stream = _stream()
            for step in self._steps:
                step(tensors, places, stream)
        return results


def empty_like(x: Tensor, width: int | None = None) -> Tensor:
    """An uninitialised tensor with the layout of x, token by token or head by head."""
    shape = (*x.shape[:3], x.shape[3] if width is None else width)
    return torch.empty_strided(shape, layout(x, shape), dtype=x.dtype, device=x.device)


def layout(x: Tensor | Slot, shape: Sequence[int]) -> tuple[int, ...]:
    """Strides (b, h, n, width) with the layout of x, token by token or head by head."""
    _, h, n, width = shape
    if h > 1 and x.stride()[1] < x.stride()[2]:
        return h * n * width, width, h * width, 1
    return h * n * width, n * width, width, 1


class _Call(NamedTuple):
    """A call of a function of torch."""

    function: Callable[..., None]
    args: tuple[Any, ...]

    def __call__(self, tensors: list[Tensor], places: list[int], stream: int | None) -> None:
        self.function(*(_tensor(x, tensors) for x in self.args))


class _Launch:
    """A launch of a kernel; the first compiles it."""

    def __init__(self, kernel: Any, programs: int, args: tuple[Any, ...], options: dict[str, Any]):
        self._kernel, self._programs, self._args, self._options = kernel, programs, args, options
        self._compiled = None
        self._places = [(i, x.memory, x.offset) for i, x in enumerate(args) if isinstance(x, Slot)]
        self._tokens = [
            (i, x.at.memory, x.at.offset, x[1:]) for i, x in enumerate(args) if isinstance(x, StridedTokens)
        ]

    def __call__(self, tensors: list[Tensor], places: list[int], stream: int | None) -> None:
        if self._compiled is None:
            kernel = self._kernel[(self._programs,)](*(_tensor(x, tensors) for x in self._args), **self._options)
            if not INTERPRETED.value:
                self._keep(kernel)
            return
        # A compiled kernel takes all arguments in order, and passes over those that it was compiled for.
        args = self._row.copy()
        for i, memory, offset in self._places:
            args[i] = places[memory] + offset
        for i, memory, offset, strides in self._tokens:
            args[i] = (places[memory] + offset, *strides)
        kernel = self._compiled
        if stream is None:
            kernel[(self._programs, 1, 1)](*args)
        else:
            # The launch of Triton's own call, without its hooks.
            kernel.run(self._programs, 1, 1, stream, kernel.function, kernel.packed_metadata, None, None, None, *args)

    def _keep(self, kernel: Any) -> None:
        self._row = [*self._args, *(self._options.get(name) for name in self._kernel.arg_names[len(self._args) :])]
        self._compiled = kernel


_Step = _Call | _Launch


def _stream() -> int | None:
    """The stream to launch on; None where Triton launches, for a profiler's hooks, or interprets kernels."""
    hooks = (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook)
    # A chain of calls, or a function that was set in its place.
    if INTERPRETED.value or any(getattr(hook, "calls", hook) for hook in hooks):
        return None
    active: Any = driver.active
    return active.get_current_stream(active.get_current_device())


def _slot_of(number: int, x: GivenTensor) -> Slot:
    return Slot(number, 0, tuple(x.shape), tuple(x.strides), _read_as(x.dtype))


def _read_as(dtype: torch.dtype) -> torch.dtype:
    # Kernels read and write truth values as bytes.
    return torch.uint8 if dtype == torch.bool else dtype


def packed_size(shapes: Sequence[Sequence[int]]) -> int:
    """Elements of one tensor that holds tensors of these shapes."""
    return sum(_room(shape) for shape in shapes)


def parts_of(whole: Slot, shapes: Sequence[Sequence[int]]) -> list[Slot]:
    """Contiguous tensors of these shapes, one after the other in one tensor."""
    parts, at = [], 0
    for shape in shapes:
        offset = whole.offset + at * whole.dtype.itemsize
        parts.append(whole._replace(offset=offset, shape=tuple(shape), strides=contiguous(shape)))
        at += _room(shape)
    return parts


def _room(shape: Sequence[int]) -> int:
    # Also a symbolic size.
    return -(-prod(shape) // _PACKED) * _PACKED


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides))[: len(shape)] if shape else ()


def _tensor(x: Any, tensors: list[Tensor]) -> Any:
    """The tensor of a slot; anything else as it is."""
    if isinstance(x, StridedTokens):
        return x._replace(at=_tensor(x.at, tensors))
    if not isinstance(x, Slot):
        return x
    whole = tensors[x.memory]
    if not x.offset and whole.dtype == x.dtype and tuple(whole.shape) == x.shape and whole.stride() == x.strides:
        return whole
    if whole.dtype != x.dtype:
        # A part of the workspace, which is a row of bytes.
        return whole[x.offset : x.offset + prod(x.shape) * x.dtype.itemsize].view(x.dtype).view(x.shape)
    return whole.as_strided(x.shape, x.strides, whole.storage_offset() + x.offset // x.dtype.itemsize)
