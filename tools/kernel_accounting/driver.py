"""A driver for Triton that compiles for a GPU which does not have to be present.

While it is active, a launch compiles its kernel as it would on that GPU, and is recorded instead of run. Registers and
stack are read from the compiled program; shared memory is what Triton requests. It uses private parts of Triton, and
therefore belongs to the development tools and not to the library.

**The bytes of a launch** are counted from shapes, over the tensors that the compiled kernel touches, reads and writes
alike:

- A tensor of tokens (queries, keys, values, their gradients, masks, numbers per token) counts in full, once for each
  time that programs go over it: once in most kernels; once per block of landmarks where the programs of each block
  walk over the tokens; in `skip_taps` again for each block of neighbours beyond the first two. If landmarks are
  drawn tokens (Skyformer), the kernel of the means reads only those.
- Every other tensor counts once.

Three things are assumed to be cached and not counted: the tokens that neighbouring tiles share in the skip convolution,
repeated reads of small tensors, and the scratch memory of the inverse beyond its first use. All tokens are taken as
real.
"""

import functools
import re
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver

from nystrom.gpu.arguments import ChoiceConstants, ChoiceSizes, Constants, LandmarkSizes, NearFarSizes, StridedTokens
from nystrom.temporary import scratch_folder


@dataclass(frozen=True)
class Shape:
    """The sizes that kernels are launched for.

    Attributes:
        batch: Sequences b.
        heads: Heads h.
        tokens: Queries, and keys.
        width: Width of queries, keys and values, whose layout in memory is (b, n, h, d).
        landmarks: Landmarks m.
        dtype: Of queries, keys and values.
        masked: Whether there is a mask.
        taps: Size of the skip convolution; 0 means none.
        gaussian: Skyformer instead of Nyström attention.
    """

    batch: int
    heads: int
    tokens: int
    width: int
    landmarks: int
    dtype: torch.dtype
    masked: bool = False
    taps: int = 0
    gaussian: bool = False

    @property
    def token_bytes(self) -> int:
        """Bytes of the queries, that is of one pass over n x d."""
        return self.batch * self.heads * self.tokens * self.width * self.dtype.itemsize


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel.

    Attributes:
        kernel: Name of the kernel.
        programs: Programs that it starts.
        registers: Registers per thread.
        stack: Bytes per thread that did not fit into registers.
        shared: Bytes of shared memory per program.
        bytes: Bytes that it reads and writes, see the module.
        token_bytes: The part of those that are tokens.
    """

    kernel: str
    programs: int
    registers: int
    stack: int
    shared: int
    bytes: int
    token_bytes: int


class OfflineDriver(DriverBase):
    """Stands in for the driver of a GPU that is not present.

    Attributes:
        shape: Sizes that the kernels are launched for.
        launches: The launches so far.
    """

    def __init__(self, capability: str, shape: Shape):
        super().__init__()
        self.shape = shape
        self.launches: list[Launch] = []
        self.launcher_cls, self.utils = _Launcher, self
        self._capability = capability

    @contextmanager
    def active(self) -> Iterator[None]:
        """Use this driver in a `with` block, for the whole process."""
        before = driver._active
        driver.set_active(self)
        try:
            yield
        finally:
            driver.set_active(before)  # pyright: ignore[reportArgumentType] (None where no driver was needed yet)

    @classmethod
    def is_active(cls) -> Any:
        """Never chosen by Triton itself."""
        return False

    def get_current_target(self) -> Any:
        """The target of compilation."""
        return GPUTarget("cuda", int(self._capability.replace(".", "")), 32)

    def get_current_device(self) -> str:
        """A name instead of a number: Triton caches kernels by device, and must not mix these with a real GPU's."""
        return f"compute capability {self._capability}, offline"

    def get_current_stream(self, device: object) -> int:
        """A stream that nothing uses."""
        return 0

    def get_active_torch_device(self) -> Any:
        """The device of tensors without numbers."""
        return torch.device("meta")

    def get_device_properties(self, device: object) -> dict[str, int]:
        """Room for everything, so that a kernel that does not fit is reported instead of rejected."""
        return {"max_shared_mem": 2**31}

    def load_binary(self, name: str, binary: bytes, shared: int, device: object) -> tuple[str, str, int, int, int]:
        """Load nothing; a program may have the largest number of threads."""
        return name, name, 0, 0, 1024

    def map_python_to_cpp_type(self, ty: str) -> str:
        """Never called, as no launcher is compiled."""
        raise NotImplementedError

    def get_benchmarker(self) -> Any:
        """Never called, as nothing runs."""
        raise NotImplementedError


class _Launcher:
    """Stands in for the launcher of a compiled kernel."""

    def __init__(self, source: Any, metadata: Any):
        self.function, self.metadata = source.fn, metadata

    def __call__(self, x: int, y: int, z: int, *rest: Any) -> None:
        # Looked up at each launch: Triton caches a launcher with its kernel, for the next driver of this name too.
        offline = driver.active
        assert isinstance(offline, OfflineDriver)
        compiled = self.function.device_caches[offline.get_current_device()][0].values()
        kernel = next(kernel for kernel in compiled if kernel.metadata is self.metadata)
        # Before the arguments come the stream, the function, two items of metadata and two hooks.
        bound = dict(_unbundled(zip(self.function.arg_names, rest[6:], strict=True)))
        touched = _touched(kernel.asm["ttir"])
        tensors = {name: x for name, x in bound.items() if isinstance(x, Tensor) and name in touched}
        tokens = {name: x for name, x in tensors.items() if _of_tokens(name, x, offline.shape)}
        of_tokens = round(_times(self.function.__name__, bound) * sum(map(size_of, tokens.values())))
        others = sum(size_of(x) for name, x in tensors.items() if name not in tokens)
        registers, stack = _usage(kernel.asm["cubin"])
        offline.launches.append(
            Launch(
                self.function.__name__,
                x * y * z,
                registers,
                stack,
                self.metadata.shared,
                of_tokens + others,
                of_tokens,
            )
        )


def _unbundled(given: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Arguments by name: a tensor of tokens under the name of its bundle, sizes and constants under their own."""
    for name, x in given:
        if isinstance(x, Constants | ChoiceConstants):
            yield from ((field.name, getattr(x, field.name).value) for field in fields(x))
        elif isinstance(x, StridedTokens):
            yield name, x.at
        elif isinstance(x, LandmarkSizes | NearFarSizes | ChoiceSizes):
            yield from x._asdict().items()
        else:
            yield name, x


def _of_tokens(name: str, x: Tensor, shape: Shape) -> bool:
    """Whether a tensor has a row or a number per token: (b, h, n, d), (b, n), or one flat number per query."""
    flat = name in ("logs", "deltas") and x.numel() == shape.batch * shape.heads * shape.tokens
    return flat or (x.ndim == 4 and x.shape[2] == shape.tokens) or (x.ndim == 2 and x.shape[1] == shape.tokens)


def _times(kernel: str, bound: dict[str, Any]) -> float:
    """How many times programs go over the tokens."""
    if kernel == "means" and bound["ROWS"] == bound["M"]:
        # Drawn tokens.
        return bound["ROWS"] / (bound["N"] + bound["S"])
    if kernel in ("right_forward", "right_queries", "left_landmarks"):
        return -(-bound["M"] // bound["BLOCK_M"])
    if kernel == "skip_taps":
        return max(1, -(-(bound["TAPS"] - 1) // bound["BLOCK_T"]))
    return 1


def _touched(ttir: str) -> set[str]:
    """Names of the pointers that a kernel still uses after optimisation."""
    head, _, body = ttir[ttir.index("tt.func public") :].partition("{noinline")
    return {name for name in re.findall(r"%(\w+): !tt\.ptr", head) if re.search(rf"%{name}\b", body)}


def size_of(x: Tensor) -> int:
    """Bytes of a tensor; an expanded one counts once."""
    return min(x.numel() * x.itemsize, x.untyped_storage().nbytes())


@functools.cache
def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack per thread."""
    with scratch_folder() as folder:
        (folder / "kernel.cubin").write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(folder / "kernel.cubin")]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", printed)
    assert found is not None, printed
    return int(found[1]), int(found[2])
