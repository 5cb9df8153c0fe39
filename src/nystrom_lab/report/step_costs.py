"""Estimated costs of training steps across ranks, for the terminal and as a Markdown table."""

from collections.abc import Sequence
from dataclasses import dataclass

from nystrom_lab.report.table import markdown_table

_HEADS = ("tokens", "GPUs", "attention", "compute", "attention sends", "all communication", "step", "memory a GPU")


@dataclass(frozen=True)
class StepCost:
    """A training step of one sequence across ranks.

    Attributes:
        tokens: Tokens of the sequence.
        ranks: Ranks.
        attention: Name of the attention.
        compute: Seconds of computation.
        sent: Bytes that a rank sends for attention, in all layers, forward and backward.
        communication: Seconds of communication, including weight gradients and latencies.
        step: Seconds of both together, or of the longer one if they overlap.
        memory: Bytes on a rank.
        fits: Whether it fits in memory.
    """

    tokens: int
    ranks: int
    attention: str
    compute: float
    sent: float
    communication: float
    step: float
    memory: float
    fits: bool


def costs_markdown(costs: Sequence[StepCost]) -> str:
    """The costs as a Markdown table."""
    return markdown_table(_HEADS, map(_cells, costs), left=0)


def costs_text(costs: Sequence[StepCost]) -> str:
    """The costs as aligned columns."""
    lines = [_HEADS, *map(_cells, costs)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def _cells(cost: StepCost) -> tuple[str, ...]:
    return (
        tokens_word(cost.tokens),
        str(cost.ranks),
        cost.attention,
        _seconds(cost.compute),
        _bytes(cost.sent),
        _seconds(cost.communication),
        _seconds(cost.step),
        _bytes(cost.memory) + ("" if cost.fits else " (too much)"),
    )


def tokens_word(tokens: int) -> str:
    """Such as 16M for 16 x 2^20, 64K for 64 x 2^10, or the number itself."""
    for word, size in (("M", 2**20), ("K", 2**10)):
        if tokens % size == 0:
            return f"{tokens // size}{word}"
    return str(tokens)


def _scaled(value: float, units: Sequence[tuple[float, str]]) -> str:
    size, unit = next((entry for entry in units if value >= entry[0]), units[-1])
    number = f"{value / size:.3g}"
    # Numbers of four digits or more are written without an exponent.
    return f"{round(value / size):,} {unit}" if "e" in number else f"{number} {unit}"


def _seconds(value: float) -> str:
    return _scaled(
        value, ((31557600.0, "years"), (86400.0, "days"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"))
    )


def _bytes(value: float) -> str:
    return _scaled(value, ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")))
