"""The backend that computes attention: torch, or the Triton kernels of `nystrom.gpu`.

"auto" is decided by `nystrom.attention.entry.picks_triton`. An explicit choice that cannot run raises an error.
"""

import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None


def check_triton(unsupported: dict[str, tuple[object, object]]) -> None:
    """Raise ValueError if Triton is not installed, or an option has not the one value that its code supports.

    `unsupported` holds the given and the supported value of such options.
    """
    if not HAS_TRITON:
        raise ValueError(
            "backend 'triton' needs the package triton, which is not installed: pip install 'nystrom[gpu]', or pass "
            "backend='torch'."
        )
    for name, (came, wanted) in unsupported.items():
        if came != wanted:
            raise ValueError(
                f"backend 'triton' has no Triton code for {name}={came!r}: pass {name}={wanted!r}, or backend='torch'."
            )


def check_backend_device(backend: object, device: "torch.device") -> None:
    """Raise ValueError if a backend does not run on a device, before any tensor is moved there."""
    if backend == "triton":
        from nystrom.gpu.launch import check_device

        check_device(device)


def kernel_errors() -> tuple[type[Exception], ...]:
    """The errors of a kernel that does not compile or does not fit a device; empty if Triton is not installed."""
    if not HAS_TRITON:
        return ()
    from nystrom.gpu.launch import TritonError

    return (TritonError,)
