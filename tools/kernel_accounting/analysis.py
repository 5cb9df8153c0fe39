"""The parts of a GPU that the kernels use, computed without one.

Both passes of `nystrom.gpu.landmark_attention` run on meta tensors, which have shapes and no numbers; their launches
are compiled and recorded by the driver in `driver.py`, which says how bytes are counted.

**Operators of torch** between the kernels are those that compute; views and empty tensors are not counted. On a GPU
each is one launch or more. Their bytes are those of their arguments and results, each once. **Memory** is the largest
amount that tensors hold at one time, beyond what was allocated before; a GPU's allocator rounds each tensor up to 512
bytes.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nystrom.gpu import launch
from nystrom.gpu.arithmetic import INTERPRETED
from nystrom.gpu.landmark_attention import backward_program, forward_program
from nystrom.gpu.launch import target_of
from nystrom.gpu.program import key_of
from tools.kernel_accounting.driver import Launch, OfflineDriver, Shape, size_of

# Largest shared memory of a program in bytes, by compute capability (CUDA C++ Programming Guide).
SHARED_MEMORY = {"8.0": 166912, "8.6": 101376, "8.9": 101376, "9.0": 232448, "10.0": 232448, "12.0": 101376}
# Not views by their schema, but they launch nothing.
_NO_LAUNCH = ("aten::_unsafe_view", "aten::empty", "aten::new_empty", "aten::lift_fresh")


@dataclass
class Passage:
    """One pass: its launches in order, and the operators of torch between them.

    Attributes:
        launches: Launches of kernels.
        operators: Number of operators of torch that compute.
        operator_bytes: Bytes that those read and write.
        memory: Largest number of bytes held at one time by tensors of this pass or kept from the one before.
    """

    launches: list[Launch] = field(default_factory=list)
    operators: int = 0
    operator_bytes: int = 0
    memory: int = 0


def analyse(shape: Shape, *, capability: str = "9.0", multiprocessors: int = 132) -> tuple[Passage, Passage]:
    """Analyse the forward and the backward pass for a GPU that does not have to be present.

    Triton's driver is replaced during this call, so nothing else may launch kernels at the same time.

    Args:
        shape: Sizes to launch for, with more than two tokens per landmark.
        capability: Compute capability of the GPU, a key of `SHARED_MEMORY`.
        multiprocessors: Its number of multiprocessors, which determines how sums over tokens are split.

    Raises:
        ValueError: Kernels are interpreted, the capability is unknown, or the kernels do not take these sizes.
    """
    _check(shape, capability)
    passages = Passage(), Passage()
    driver = OfflineDriver(capability, shape)
    q, k, v, grad = (_tokens(shape) for _ in range(4))
    keep = torch.empty(shape.batch, shape.tokens, dtype=torch.bool, device="meta") if shape.masked else None
    taps = torch.empty(shape.heads, shape.taps, dtype=shape.dtype, device="meta") if shape.taps else None
    draws = torch.empty(shape.landmarks, device="meta") if shape.gaussian else None
    gamma = 0.1 if shape.gaussian else -1.0

    sizes = shape.landmarks, shape.width**-0.5, 6, "paper", gamma

    def passed(build: Any, *tensors: Tensor | None) -> Sequence[Tensor]:
        inputs = (*tensors, q, k, v, taps, keep, keep, draws)
        # A new program, whose first call records.
        return build.__wrapped__(key_of(*inputs), target_of(q.device), *sizes)(*inputs)

    # Sums over tokens are split, and tiles chosen, by what the GPU has.
    with (
        driver.active(),
        mock.patch.object(launch, "check_device", return_value=None),
        mock.patch.object(launch, "multiprocessors", return_value=multiprocessors),
        mock.patch.object(launch, "shared_memory", return_value=SHARED_MEMORY[capability]),
        Operators() as operators,
    ):
        kept, out = _recorded(passages[0], driver, operators, lambda: passed(forward_program))
        gradients = _recorded(passages[1], driver, operators, lambda: passed(backward_program, grad, kept))
    del out, gradients
    return passages


class Operators(TorchDispatchMode):
    """Counts operators that compute, their bytes, and the memory of their results.

    Attributes:
        count: Number of operators.
        bytes: Bytes that they read and write.
        held: Bytes of the results that are still alive.
        most: The largest value of `held` so far.
    """

    def __init__(self):
        super().__init__()
        self.count = self.bytes = self.held = self.most = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Call an operator and count it."""
        result = func(*args, **(kwargs or {}))
        given, made = ([x for x in tree_leaves(y) if isinstance(x, Tensor)] for y in ((args, kwargs), result))
        view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if not view and not func._schema.name.startswith(_NO_LAUNCH):
            self.count += 1
            self.bytes += sum(size_of(x) for x in given + made)
        for x in made:
            self._hold(x.untyped_storage(), {y.untyped_storage()._cdata for y in given})
        return result

    def _hold(self, storage: torch.UntypedStorage, given: set[int]) -> None:
        place, size = storage._cdata, storage.nbytes()
        if place in given or place in self._known:
            return

        def free(_: object) -> None:
            del self._known[place]
            self.held -= size

        self._known[place] = weakref.ref(storage, free)
        self.held += size
        self.most = max(self.most, self.held)


def _check(shape: Shape, capability: str) -> None:
    if capability not in SHARED_MEMORY:
        raise ValueError(f"capability is {capability!r}; expected one of {', '.join(map(repr, SHARED_MEMORY))}.")
    for name, most in (("landmarks", launch.LARGEST_M), ("width", launch.LARGEST_WIDTH)):
        size = getattr(shape, name)
        if not 1 <= size <= most:
            raise ValueError(f"{name} is {size}; the kernels take 1 to {most}: pass such a number.")
    if shape.tokens <= 2 * shape.landmarks:
        raise ValueError(
            f"tokens is {shape.tokens} with {shape.landmarks} landmarks; expected more than two tokens per landmark: "
            f"pass {2 * shape.landmarks + 1} or more."
        )
    if shape.taps and (shape.gaussian or shape.taps % 2 == 0):
        raise ValueError(f"taps is {shape.taps}; expected an odd number, and 0 for Skyformer, which has no skip.")
    if INTERPRETED.value:
        raise ValueError("TRITON_INTERPRET is set, and interpreted kernels are not compiled: unset it.")


def _recorded(
    passage: Passage, driver: OfflineDriver, operators: Operators, call: Callable[[], Sequence[Tensor]]
) -> Sequence[Tensor]:
    """Run one pass, and record what it launches."""
    count, size, operators.most = operators.count, operators.bytes, operators.held
    result = call()
    passage.launches, driver.launches = driver.launches, []
    passage.operators, passage.operator_bytes = operators.count - count, operators.bytes - size
    passage.memory = operators.most
    return result


def _tokens(shape: Shape) -> Tensor:
    sizes = (shape.batch, shape.tokens, shape.heads, shape.width)
    return torch.empty(sizes, dtype=shape.dtype, device="meta").transpose(1, 2)
