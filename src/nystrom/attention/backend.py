"""The backend that computes attention: torch, or the Triton kernels of `nystrom.gpu`.

"auto" means torch, which has every option and second derivatives: pass "triton" to use the kernels. An explicit choice
that cannot run raises an error; there is no silent fallback.
"""

import importlib.util
from typing import TYPE_CHECKING, get_args

from nystrom.checks import Backend, check_choice

if TYPE_CHECKING:
    import torch

_HAS_TRITON = importlib.util.find_spec("triton") is not None


def check_backend(backend: Backend, unsupported: dict[str, tuple[object, object]]) -> None:
    """Raise if a backend does not exist, is not installed, or does not support a given option.

    Args:
        backend: The requested backend.
        unsupported: Options for which the Triton code supports only one value: the given value and the supported one.

    Raises:
        ValueError: It cannot be used; the message says what to do.
    """
    check_choice("backend", backend, get_args(Backend))
    if backend != "triton":
        return
    if not _HAS_TRITON:
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
    """Raise if a backend does not run on a device, before any tensor is moved there.

    Raises:
        ValueError: It does not; the message says what to do.
    """
    if uses_triton(backend):
        from nystrom.gpu.launch import check_device

        check_device(device)


def kernel_errors() -> tuple[type[Exception], ...]:
    """The errors of a kernel that does not compile or does not fit a device; empty if Triton is not installed."""
    if not _HAS_TRITON:
        return ()
    from nystrom.gpu.launch import TritonError

    return (TritonError,)


def uses_triton(backend: object) -> bool:
    """Whether the kernels of `nystrom.gpu` are used."""
    return backend == "triton"
