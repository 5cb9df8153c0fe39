"""The peak memory of this process, which says how much memory a run needs, and the settings of its allocator.

On an accelerator this is the most that torch's allocator had given out at one time; on the CPU it is what the system
counts as resident, including the interpreter, the libraries and mapped data.
"""

import os

import torch

from nystrom_lab.measure.resident import peak_resident

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


def free_bytes(device: torch.device) -> int:
    """Free memory in bytes: on CUDA, including unused memory that torch has reserved; else what the system has left."""
    if device.type == "cuda":
        reusable = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reusable
    import psutil

    return psutil.virtual_memory().available


def peak_megabytes(device: str) -> float:
    """The peak since the process began, on "cpu" or "cuda", in MB (10^6 bytes); 0 where it is not reported."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 1e6
    return peak_resident()


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
