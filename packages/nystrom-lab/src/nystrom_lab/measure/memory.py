"""The peak memory of this process, which says how much memory a run needs, and the settings of its allocator.

On an accelerator this is the most that torch's allocator had given out at one time; on the CPU it is what the system
counts as resident, including the interpreter, the libraries and mapped data.
"""

import os
import sys
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
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


def allocator() -> str:
    """The allocator settings in the environment, such as "MALLOC_TRIM_THRESHOLD_=8589934592"; "default" if none.

    By default a large tensor is new memory from the system at each call, whose pages are cleared first.
    """
    told = [f"{name}={os.environ[name]}" for name in _ALLOCATOR if os.environ.get(name)]
    return " ".join(told) or "default"


def free_bytes(device: torch.device) -> int:
    """Free memory in bytes: on CUDA, including unused memory that torch has reserved; else what the system has left."""
    if device.type == "cuda":
        reusable = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reusable
    import psutil

    return psutil.virtual_memory().available


def peak_megabytes(device: str) -> float:
    """The peak since the process began, in MB (10^6 bytes); 0 where the system does not report it.

    Args:
        device: "cpu" or "cuda".
    """
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 1e6
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
