"""Errors and times of attention functions beside those of exact attention."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from nystrom.clock import seconds
from nystrom.interleaved_timing import in_turns, quartiles, ratios
from nystrom_lab.measure.peak import peak_bytes
from nystrom_lab.measure.rows import Row
from nystrom_papers.bench.options import device_name

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
ERROR = "relative error of the output"
TIME, RATIO, MEMORY = "forward time", "forward time / exact", "forward memory"
PASSES = {"forward": "forward time", "both": "training time"}
_CPU = torch.device("cpu")


def relative_error(approximate: Float[Tensor, "b h n e"], exact: Float[Tensor, "b h n e"]) -> Float[Tensor, "b h"]:
    r"""$\|\tilde Y - Y\|_F / \|Y\|_F$ of each head's output."""
    return (approximate - exact).flatten(2).norm(dim=2) / exact.flatten(2).norm(dim=2)


def time_calls(
    calls: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    beside: str,
    quantities: tuple[str, str] = (TIME, RATIO),
    memory: str | None = None,
    device: torch.device = _CPU,
    **shared: Any,
) -> Iterable[Row]:
    """Rows of the times of calls, in turns, and of their ratios to one of them within each turn: medians and quartiles.

    The quantities are the names of times and ratios in rows; `memory` is that of the peak memory, None for none.
    """
    shared["device"] = device_name(device)
    taken = in_turns({name: partial(seconds, call, device) for name, call in calls.items()}, rounds)
    for name, each in taken.items():
        measured = zip(
            quantities, (quartiles([1e3 * x for x in each]), ratios(each, taken[beside])), ("ms", ""), strict=True
        )
        for quantity, (low, middle, high), unit in measured:
            yield Row(
                quantity=quantity, method=name, value=middle, low=low, high=high, unit=unit, repeats=len(each),
                **shared,
            )  # fmt: skip
        if memory is not None:
            value = peak_bytes(calls[name], device) / 1e6
            yield Row(quantity=memory, method=name, value=value, unit="MB", **shared)


def time_passes(
    calls: Mapping[str, Attention], given: Sequence[Tensor], rounds: int, *, beside: str, what: str, **shared: Any
) -> Iterable[Row]:
    """Rows of the times of functions, forward and with the backward pass.

    `what` is what rows call `beside`: their quantities are "forward time / exact" and the like.
    """
    for run, time in zip((forward, both), PASSES.values(), strict=True):
        timed = {name: partial(run, call, *given) for name, call in calls.items()}
        yield from time_calls(timed, rounds, beside=beside, quantities=(time, f"{time} / {what}"), **shared)


def forward(call: Callable[..., Tensor], *given: Tensor) -> None:
    """The forward pass alone."""
    with torch.no_grad():
        call(*given)


def both(call: Callable[..., Tensor], *given: Tensor) -> None:
    """The forward and the backward pass."""
    call(*given).sum().backward()
