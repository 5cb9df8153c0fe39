"""The dtypes that attention computes in.

`scaled_dot_product_attention` is on autocast's list of low-precision operations, and the methods here behave like it.
Under autocast, their float32 inputs are cast once, on entry. Inside, autocast is off, so that whatever must stay in
float32 does: landmark means, the m x m inverse, kernel normalisers.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

# The device of tensors without data, which has no autocast.
_META = "meta"


def is_autocast(device: str) -> bool:
    """Whether autocast is on for a kind of device."""
    return device != _META and torch.is_autocast_enabled(device)


def cast_for_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast as autocast would cast the arguments of `scaled_dot_product_attention`; without autocast, change nothing."""
    device = tensors[0].device.type
    if not is_autocast(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Context in which operations keep the dtypes of their inputs."""
    device = x.device.type
    # A compiler's graph says so, and may run under another autocast.
    needed = is_autocast(device) if not torch.compiler.is_compiling() else device != _META
    return torch.autocast(device, enabled=False) if needed else nullcontext()


def check_dtype(name: str, x: Tensor, weight: Tensor, *, of: str) -> None:
    """Check that weights can be multiplied with an input: both have the same dtype, or autocast casts them to one.

    `of` is what the weights belong to, such as "layer"; the message suggests `layer.to(...)`.

    Raises:
        ValueError: The dtypes differ, and autocast is off or does not apply: it does not cast float64 and integers.
    """
    if x.dtype == weight.dtype:
        return
    casts = x.dtype != torch.float64 != weight.dtype and x.is_floating_point()
    if casts and is_autocast(x.device.type):
        return
    ways = [f"{name}.to({weight.dtype})"]
    if x.is_floating_point():
        ways.insert(0, f"{of}.to({x.dtype})")
    more = ", or run it under torch.autocast" if casts else ""
    raise ValueError(
        f"{name} has dtype {x.dtype}, but the weights of the {of} have {weight.dtype}: call {' or '.join(ways)}{more}."
    )


def check_layer_dtype(name: str, x: Tensor, linear: nn.Module) -> None:
    """`check_dtype` for a plain linear layer; quantized layers and adapters cast in their own ways."""
    if type(linear) is nn.Linear and linear.weight.is_floating_point():
        check_dtype(name, x, linear.weight, of="layer")


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums and inverses: float32 at least."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def narrowed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast; for float16, values are clipped to its range, since an infinity would become NaN in the next layer."""
    if dtype == torch.float16 and x.dtype != dtype:
        largest = torch.finfo(dtype).max
        x = x.clamp(-largest, largest)
    return x.to(dtype)


def at_least_float32(x: Tensor) -> Tensor:
    """Raise bfloat16 and float16 to float32; leave float32 and float64."""
    return x.to(accumulator(x.dtype))
