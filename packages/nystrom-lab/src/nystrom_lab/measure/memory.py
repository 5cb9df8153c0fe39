"""The peak memory of this process, which says how much memory a run needs, and the settings of its allocator.

On an accelerator this is the most that torch's allocator had given out at one time; on the CPU it is what the system
counts as resident, including the interpreter, the libraries and mapped data. Memory is in MB of 10^6 bytes.
"""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
# Variables that change how freed memory is kept: those of glibc, another allocator, and torch's own for accelerators.
_ALLOCATOR = (
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "MALLOC_ARENA_MAX",
    "GLIBC_TUNABLES",
    "LD_PRELOAD",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
)
# Bytes that the modules of a layer take, regardless of its width: measured with 200 and 1,000 layers without weights.
_MODULES = 50_000


def allocator() -> str:
    """The allocator settings in the environment, such as "MALLOC_TRIM_THRESHOLD_=8589934592"; "default" if none.

    By default a large tensor is new memory from the system at each call, whose pages are cleared first.
    """
    told = [f"{name}={os.environ[name]}" for name in _ALLOCATOR if os.environ.get(name)]
    return " ".join(told) or "default"


def free_bytes(device: "torch.device") -> int:
    """Free memory in bytes: on CUDA, including unused memory that torch has reserved; else what the system has left."""
    if device.type == "cuda":
        import torch

        reusable = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reusable
    import psutil

    return psutil.virtual_memory().available


def peak_megabytes(device: str) -> float:
    """The peak since the process began, on "cpu" or "cuda", in MB (10^6 bytes); 0 where it is not reported."""
    if device == "cuda":
        import torch

        return torch.cuda.max_memory_allocated() / 1e6
    return peak_resident()


def held_resident() -> float:
    """The memory that this process holds."""
    import psutil

    return psutil.Process().memory_info().rss / 1e6


def peak_resident() -> float:
    """The peak since the process, or `begin_peak`, began; 0 where the system does not report it."""
    # getrusage also counts the peak of the process that started this one, and psutil has no peak on Linux.
    if _STATUS.is_file():
        for line in _STATUS.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name == "VmHWM":
                return 1024 * int(value.split()[0]) / 1e6
    if sys.platform == "darwin":
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    return 0.0


def begin_peak() -> bool:
    """Begin a new peak at what is held now; False where the system cannot, and the earlier peak stays."""
    try:
        # 5 sets VmHWM to what is held, see proc_pid_clear_refs(5).
        _CLEAR.write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def check_memory(*, layers: int, width: int, intermediate: int, vocabulary: int, numbers: int) -> None:
    """Check, before it is made, that an encoder fits in the memory of this machine, or raise ValueError.

    Args:
        numbers: Numbers of 4 bytes that are kept for each weight: 1 for the model alone, 4 for a training by Adam.
    """
    weights = 2 * layers * width * intermediate + vocabulary * width
    wanted, there = 4 * numbers * weights + _MODULES * layers, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if wanted > there:
        raise ValueError(
            f"a model of {layers:,} layers, width {width:,}, {intermediate:,} inside and {vocabulary:,} tokens has at "
            f"least {weights:,} weights, and takes {wanted / 1e9:,.0f} GB, but this machine has {there / 1e9:,.0f} GB: "
            "take a smaller one."
        )
