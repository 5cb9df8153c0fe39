"""The backend that computes attention: torch, or the Triton kernels of `nystrom.gpu`.

"auto" means the kernels where they were measured to be faster than the same method in torch, see `picks_triton`, and
torch everywhere else. An explicit choice that cannot run raises an error; there is no silent fallback.
"""

import importlib.util
from typing import TYPE_CHECKING, Protocol, get_args, runtime_checkable

from nystrom.checks import Backend, check_choice

if TYPE_CHECKING:
    import torch

# Of the GPUs that the kernels were measured on, an H100 and an H200.
_MEASURED_CAPABILITY = (9, 0)
_HAS_TRITON = importlib.util.find_spec("triton") is not None


@runtime_checkable
class _Options(Protocol):
    @property
    def backend(self) -> Backend: ...

    @property
    def measured_width(self) -> int: ...


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


def picks_triton(options: _Options, q: "torch.Tensor", k: "torch.Tensor", v: "torch.Tensor") -> bool:
    """Whether the kernels compute a call: with "triton", and with "auto" where they were measured to be faster.

    With "auto" that is in bfloat16 on a GPU of compute capability 9.0, for options and widths of heads that were
    measured, outside of exports, of transforms of torch.func and of forward mode. Neither lengths nor masks matter: the
    same code computes a sequence however it is padded. A compiler takes the same choice, for the same bits.

    Args:
        options: Those of the method; `measured_width` is the widest head that kernels with these options were measured
            with, 0 if they were not.
        q: Queries, in the dtype that they are computed in.
        k: Keys.
        v: Values.
    """
    if options.backend != "auto" or not _HAS_TRITON:
        return uses_triton(options.backend)
    import torch

    from nystrom.autograd_modes import is_forward_mode, is_transformed

    if max(q.shape[-1], v.shape[-1]) > options.measured_width or not _is_measured(q.device):
        return False
    # What is exported runs elsewhere, where the operators of the kernels may not be known.
    if torch.compiler.is_exporting() or is_transformed() or is_forward_mode():
        return False
    return all(x.device == q.device and x.dtype == torch.bfloat16 for x in (q, k, v))


def _is_measured(device: "torch.device") -> bool:
    if device.type != "cuda":
        return False
    import torch

    from nystrom.gpu.launch import capability_of, check_device

    try:
        check_device(device)
    except ValueError:
        # An older Triton, for example: "auto" is no explicit choice.
        return False
    # On ROCm, too, the device is "cuda".
    return bool(torch.version.cuda) and capability_of(device) == _MEASURED_CAPABILITY
