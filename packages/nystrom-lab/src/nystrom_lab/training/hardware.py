"""The device and precision of a run, and its processes.

torch is imported only where it is needed, so that reading the choices costs nothing.
"""

import os
from typing import cast, get_args

from nystrom.checks import check_choice
from nystrom_lab.config import Device, Precision
from nystrom_lab.measure.rows import cpu_name


class LostRanks(ConnectionError):
    """Other processes of the run no longer respond; the message says which, if known, and how to continue."""


def usable_device(device: str) -> Device:
    """The device to run on: "auto" means an accelerator if there is one.

    Raises:
        ValueError: Another word, or an accelerator that is not available.
    """
    import torch

    check_choice("device", device, get_args(Device))
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is 'cuda', but torch finds none here: use 'cpu' or 'auto'.")
    return cast("Device", device)


def usable_precision(precision: str, device: str, *, has_bfloat16: bool | None = None) -> Precision:
    """The precision to compute in: "auto" means bfloat16 on an accelerator that has it, and float32 elsewhere.

    Args:
        has_bfloat16: Whether the accelerator computes in bfloat16; None asks torch.

    Raises:
        ValueError: Another word, or a precision that the device cannot compute in.
    """
    check_choice("precision", precision, get_args(Precision))
    if precision == "float16" and device == "cpu":
        raise ValueError(
            "precision is 'float16' but device is 'cpu', which trains without loss scaling: use 'bfloat16'."
        )
    if device == "cpu":
        return cast("Precision", "float32" if precision == "auto" else precision)
    if has_bfloat16 is None:
        import torch

        has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
    if precision == "bfloat16" and not has_bfloat16:
        raise ValueError("precision is 'bfloat16', which this GPU does not support: use 'float16' or 'float32'.")
    return cast("Precision", ("bfloat16" if has_bfloat16 else "float32") if precision == "auto" else precision)


def device_name(device: str) -> str:
    """The name of a device, "cpu" or "cuda", in rows."""
    import torch

    return torch.cuda.get_device_name() if device == "cuda" else cpu_name()


def visible_gpus(count: int | None = None) -> list[str]:
    """The GPUs that this process may use, in the notation of CUDA_VISIBLE_DEVICES.

    Args:
        count: Number of GPUs; by default, as many as torch sees.
    """
    if count is None:
        import torch

        count = torch.cuda.device_count()
    words = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [str(i) for i in range(count)] if words is None else words.split(",")[:count]


def processes() -> int:
    """How many processes torchrun started, from the environment, since they may not be connected yet."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def restarts() -> int:
    """How often torchrun has restarted these processes after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def is_main() -> bool:
    """Whether this process writes the files of a run."""
    return int(os.environ.get("RANK", "0")) == 0
