"""The dtypes that attention computes in.

`scaled_dot_product_attention` is on autocast's list of low-precision operations. Methods here follow it: under autocast
their float32 inputs are cast once, at entry; inside, autocast is off, so that what must stay in float32 (landmark
means, the m x m inverse, kernel normalisers) does.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

# The device of tensors without numbers, which has no autocast.
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
    return nullcontext() if x.device.type == _META else torch.autocast(x.device.type, enabled=False)


def check_dtype(name: str, x: Tensor, weight: Tensor, *, of: str) -> None:
    """Check that weights can be multiplied with an input: both have one dtype, or autocast gives them one.

    Args:
        name: The input's name.
        x: The input.
        weight: One of the weights.
        of: Whose weights, such as "layer"; stands for it in the way out, `layer.to(...)`.

    Raises:
        ValueError: They have two dtypes, and no autocast, which leaves float64 and whole numbers as they are.
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
    """The same for a plain linear layer; quantized ones and adapters cast as they like."""
    if type(linear) is nn.Linear and linear.weight.is_floating_point():
        check_dtype(name, x, linear.weight, of="layer")


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums and inverses: float32 at least."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def narrowed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast; values beyond the range of float16 are clipped to it: an infinity would become NaN in the next layer."""
    if dtype == torch.float16 and x.dtype != dtype:
        largest = torch.finfo(dtype).max
        x = x.clamp(-largest, largest)
    return x.to(dtype)


def at_least_float32(x: Tensor) -> Tensor:
    """Raise bfloat16 and float16 to float32; leave float32 and float64."""
    return x.to(accumulator(x.dtype))
