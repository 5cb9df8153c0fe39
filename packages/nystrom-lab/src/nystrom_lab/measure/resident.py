"""The memory of this process that the system counts as resident, in MB of 10^6 bytes; needs no torch."""

import sys
from pathlib import Path

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def held_resident() -> float:
    """What is held now."""
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
