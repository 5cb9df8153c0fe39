r"""Loops of our own on a CPU, `native.cpp`: a head at a time, each product, softmax and sum in the cache of a core.

They compute what `block_stretches` and `landmark_sums` do by torch's operators, in float32 and float64; a thread takes
whole heads, so that a result depends neither on the number of threads nor on what else the machine does. The machine's
C++ compiler (`CXX`, or c++) makes them at the first call that needs them, in about two seconds, and keeps them in
`~/.cache/nystrom` (or that of `XDG_CACHE_HOME`). Without a compiler, with NYSTROM_NATIVE=0, and where something
watches or transforms the operators, torch's operators do the work.
"""

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from nystrom.attention.parts.stretches import cut, in_threads, is_plain, num_parts

_SOURCE = Path(__file__).with_suffix(".cpp")
# What torch finds the processor to be able to do, as options of the compilers gcc and clang.
_OPTIONS = {
    "AVX2": ("-mavx2", "-mfma"),
    "AVX512": ("-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mfma", "-mprefer-vector-width=512"),
}
_NAMES = {torch.float32: "float", torch.float64: "double"}


class Rows(ctypes.Structure):
    """The numbers of a tensor (rows, tokens, width) whose last axis is dense, or none."""

    _fields_ = (("at", ctypes.c_void_p), ("row", ctypes.c_int64), ("token", ctypes.c_int64))

    @classmethod
    def of(cls, x: Tensor | None) -> "Rows":
        """Of a tensor, which must outlive the call."""
        return cls(None, 0, 0) if x is None else cls(x.data_ptr(), x.stride(0), x.stride(1))


def runs_natively(*inputs: Tensor) -> bool:
    """Whether the loops compute with these tensors, all of one dtype; compiles them if need be."""
    return is_plain(*inputs) and len({x.dtype for x in inputs}) == 1 and _library(inputs[0].dtype) is not None


def run(name: str, arguments: ctypes.Structure, rows: int, *inputs: Tensor) -> None:
    """Call a function of `native.cpp` for all rows, on as many threads as `num_parts` says for the inputs."""
    library = _library(inputs[0].dtype)
    assert library is not None
    function, pointer = getattr(library, name), ctypes.byref(arguments)

    def some(part: slice) -> None:
        function(pointer, ctypes.c_int64(part.start), ctypes.c_int64(part.stop))

    in_threads(some, cut(rows, num_parts(*inputs)))


def dense(x: Tensor) -> Tensor:
    """The tensor, copied unless its last axis is dense."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _library(dtype: torch.dtype) -> ctypes.CDLL | None:
    """The compiled loops; None where they cannot be had."""
    return None if os.environ.get("NYSTROM_NATIVE") == "0" else _compiled(dtype, os.environ.get("CXX", "c++"))


@functools.cache
def _compiled(dtype: torch.dtype, compiler: str) -> ctypes.CDLL | None:
    words = compiler.split()
    if not words or shutil.which(words[0]) is None:
        return None
    options = _OPTIONS.get(torch.backends.cpu.get_cpu_capability(), ())
    words += ["-std=c++17", "-O3", f"-DREAL={_NAMES[dtype]}", *options, "-shared", "-fPIC", str(_SOURCE)]
    key = hashlib.sha256(_SOURCE.read_bytes() + " ".join(words).encode()).hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nystrom"
    library = cache / f"native-{key[:32]}.so"
    try:
        if not library.exists():
            cache.mkdir(parents=True, exist_ok=True)
            _compile(words, library)
        return ctypes.CDLL(str(library))
    except (OSError, subprocess.SubprocessError) as error:
        said = str(getattr(error, "stderr", None) or error).strip().splitlines()
        warnings.warn(
            f"{compiler} could not make the loops of nystrom for this CPU, so torch's operators run, which are slower: "
            f"{said[0] if said else error}. Set CXX to a compiler of C++17, or NYSTROM_NATIVE=0 to be asked no more.",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


def _compile(words: Sequence[str], library: Path) -> None:
    """Beside the library first: several processes may compile at once, and each finds a whole file."""
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        subprocess.run([*words, "-o", str(made)], check=True, capture_output=True, text=True, timeout=300)
        made.replace(library)
