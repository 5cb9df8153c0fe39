"""What the kernels take of a GPU, found without one.

Both passes of `nystrom.gpu.attention` run on meta tensors, which have shapes and no numbers, and their launches are
compiled and written down: see `nystrom.gpu.paper`, which says how bytes are counted.

**Operators of torch** between the kernels are those that compute; views and empty tensors are none. On a GPU each is
one launch or more. Their bytes are those of their arguments and results, each once. **Memory** is the most that tensors
hold at a time, beyond what was there before; a GPU's allocator rounds each tensor up to 512 bytes.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nystrom.gpu import attention, launch
from nystrom.gpu.arithmetic import INTERPRETED
from nystrom.gpu.paper import Launch, Paper, Shape, size_of

# Largest shared memory of a program in bytes, by compute capability (CUDA C++ Programming Guide).
SHARED_MEMORY = {"8.0": 166912, "8.6": 101376, "8.9": 101376, "9.0": 232448, "10.0": 232448, "12.0": 101376}
# No views by their schema, but nothing to launch either.
_NO_LAUNCH = ("aten::_unsafe_view", "aten::empty", "aten::new_empty", "aten::lift_fresh")


@dataclass
class Passage:
    """One pass: its launches in order, and what torch does between them.

    Attributes:
        launches: Of the kernels.
        operators: Operators of torch that compute.
        operator_bytes: What those read and write.
        memory: The most bytes that tensors held at a time, made in this pass or kept from the one before.
    """

    launches: list[Launch] = field(default_factory=list)
    operators: int = 0
    operator_bytes: int = 0
    memory: int = 0


def analyse(shape: Shape, *, capability: str = "9.0", multiprocessors: int = 132) -> tuple[Passage, Passage]:
    """The forward and the backward pass for a GPU that need not be there.

    Triton's driver is replaced for the time of this call: nothing else should launch kernels meanwhile.

    Args:
        shape: What to launch for; more than two tokens a landmark.
        capability: Compute capability of the GPU, a key of `SHARED_MEMORY`.
        multiprocessors: How many it has; sums over tokens are split by it.

    Raises:
        ValueError: Interpreted kernels, an unknown capability, or sizes that the kernels do not take.
    """
    _check(shape, capability)
    passages = Passage(), Passage()
    paper = Paper(capability, shape)
    q, k, v, grad = (_tokens(shape) for _ in range(4))
    keep = torch.empty(shape.batch, shape.tokens, dtype=torch.bool, device="meta") if shape.masked else None
    taps = torch.empty(shape.heads, shape.taps, dtype=shape.dtype, device="meta") if shape.taps else None
    draws = torch.empty(shape.landmarks, device="meta") if shape.gaussian else None
    tensors = (q, k, v, taps, keep, keep, draws)
    numbers = (shape.landmarks, shape.width**-0.5, 6, "paper", 0.1 if shape.gaussian else -1.0)
    # The operators' functions themselves: on meta tensors torch would call what stands for them in a graph.
    forward, backward = attention._attention._init_fn, attention._attention_backward._init_fn
    with paper.active(), _pretending(multiprocessors), Operators() as operators:
        out, *small = _noted(passages[0], paper, operators, forward, *tensors, *numbers)
        gradients = _noted(passages[1], paper, operators, backward, grad, *tensors, *small, *numbers)
    del out, gradients
    return passages


class Operators(TorchDispatchMode):
    """Counts operators that compute, their bytes, and the memory of what they make.

    Attributes:
        count: Operators.
        bytes: What they read and write.
        held: Bytes of the tensors that were made and still are.
        most: The most that these were.
    """

    def __init__(self):
        super().__init__()
        self.count = self.bytes = self.held = self.most = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Call an operator, and count it."""
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
    if INTERPRETED.value:
        raise ValueError("TRITON_INTERPRET is set, and interpreted kernels are not compiled: unset it.")
    if capability not in SHARED_MEMORY:
        raise ValueError(f"capability is {capability!r}; expected one of {', '.join(map(repr, SHARED_MEMORY))}.")
    for name, most in (("landmarks", launch.LARGEST_M), ("width", launch.LARGEST_WIDTH)):
        size = getattr(shape, name)
        if not 1 <= size <= most:
            raise ValueError(f"{name} is {size}; the kernels take 1 to {most}: ask for such a number.")
    if shape.tokens <= 2 * shape.landmarks:
        raise ValueError(
            f"tokens is {shape.tokens} with {shape.landmarks} landmarks; expected more than two tokens a landmark: "
            f"ask for {2 * shape.landmarks + 1} or more."
        )
    if shape.taps and (shape.gaussian or shape.taps % 2 == 0):
        raise ValueError(f"taps is {shape.taps}; expected an odd number, and 0 for Skyformer, which has no skip.")


@contextmanager
def _pretending(multiprocessors: int) -> Iterator[None]:
    """Let tensors without a device pass, and sums be split for a GPU of so many multiprocessors."""
    swaps = (
        (attention, "check_launch", lambda *_: None),
        (launch, "_multiprocessors", lambda _: multiprocessors),
    )
    before = [getattr(module, name) for module, name, _ in swaps]
    try:
        for module, name, stand_in in swaps:
            setattr(module, name, stand_in)
        yield
    finally:
        for (module, name, _), own in zip(swaps, before, strict=True):
            setattr(module, name, own)


def _noted(
    passage: Passage, paper: Paper, operators: Operators, function: Callable[..., Any], *arguments: Any
) -> Sequence[Tensor]:
    """Call the function of one pass, and write down what it launches."""
    count, size, operators.most = operators.count, operators.bytes, operators.held
    result = function(*arguments)
    passage.launches, paper.launches = paper.launches, []
    passage.operators, passage.operator_bytes = operators.count - count, operators.bytes - size
    passage.memory = operators.most
    return result


def _tokens(shape: Shape) -> Tensor:
    sizes = (shape.batch, shape.tokens, shape.heads, shape.width)
    return torch.empty(sizes, dtype=shape.dtype, device="meta").transpose(1, 2)
