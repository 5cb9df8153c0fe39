"""Shared by all speed measurements: the device, the checks, and the command recorded in each row."""

import inspect
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args

from nystrom.checks import check_at_least, check_choice, check_seed
from nystrom_lab.measure.rows import cpu_name
from nystrom_lab.studies.speed.choices import Dtype, Pass, Skip
from nystrom_lab.training.command import option_words

if TYPE_CHECKING:
    import torch


def find_device(name: str) -> "torch.device":
    """The device with this name, with its index.

    Raises:
        ValueError: A device that torch does not know or does not find, or whose memory cannot be measured.
    """
    import torch

    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device is {name!r}; expected 'cpu', 'cuda' or 'cuda:1'.") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device is {name!r}, whose memory cannot be measured; expected 'cpu' or 'cuda'.")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise ValueError(f"device is {name!r}, but torch finds {count} CUDA devices here: pass 'cpu'.")
        # Synchronising and memory statistics need the index.
        return torch.device("cuda", device.index or 0)
    return device


def device_name(device: "torch.device") -> str:
    """The name of the device in rows."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def check_measured(asked: Mapping[str, Any]) -> None:
    """Check, before the work, the arguments that all measurements over the number of tokens have.

    Args:
        asked: The arguments of such a measurement, by name.

    Raises:
        ValueError: One of them is empty, unknown or out of range.
    """
    for name, plural in (("lengths", "numbers of tokens"), ("passes", "passes")):
        if not asked[name]:
            raise ValueError(f"{name} is empty; expected at least one of {plural}.")
    for n in asked["lengths"]:
        check_at_least("an entry of lengths", n, 1)
    for timed in asked["passes"]:
        check_choice("an entry of passes", timed, get_args(Pass))
    check_choice("skip", asked["skip"], get_args(Skip))
    check_choice("dtype", asked["dtype"], get_args(Dtype))
    for name in ("batch", "kernel_size", "repeats"):
        check_at_least(name, asked[name], 1)
    check_seed("seed", asked["seed"])
    if asked["threads"] is not None:
        check_at_least("threads", asked["threads"], 1)
    if asked["kernel_size"] % 2 == 0:
        raise ValueError(
            f"kernel_size is {asked['kernel_size']}; expected an odd number, so that the kernel has a middle."
        )
    if not asked["limit_seconds"] > 0:
        raise ValueError(f"limit_seconds is {asked['limit_seconds']}; expected a positive number.")


def command_line(words: Sequence[str], function: Callable[..., Any], asked: Mapping[str, Any], last: str) -> str:
    """The command that calls a function with these arguments, without its folder.

    Args:
        words: First words of the command.
        function: What it calls.
        asked: Its arguments.
        last: The argument that always comes last, so that runs which differ in nothing else can be recognised.
    """
    defaults = {name: each.default for name, each in inspect.signature(function).parameters.items()}
    changed = {name: asked[name] for name in defaults if name not in (last, "to") and asked[name] != defaults[name]}
    # None may be passed for an option whose default is not None.
    named = {name: value if isinstance(value, tuple) else str(value) for name, value in changed.items()}
    return shlex.join([*words, *option_words({**named, last: tuple(asked[last])})])
