"""The most memory that this process has held: what a run needs to fit.

On an accelerator this is what torch's allocator had given out at one moment; on the CPU it is what the system counts as
resident, including the interpreter, the libraries and mapped data.
"""

import sys
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")


def peak_megabytes(device: str) -> float:
    """The peak since the process began, in MB (10^6 bytes); 0 where the system does not report it.

    Args:
        device: "cpu" or "cuda".
    """
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 1e6
    # getrusage counts the peak of the process that started this one too, and psutil knows no peak on Linux.
    if _STATUS.is_file():
        for line in _STATUS.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name == "VmHWM":
                return 1024 * int(value.split()[0]) / 1e6
    if sys.platform == "darwin":
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    return 0.0
