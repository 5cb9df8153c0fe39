"""Methods measured in turn at one length, so that a slowdown of the machine affects all of them.

Every method is built and called once to warm up; then all are called one after the other, `repeats` times over, and
each once more for its memory. A backward pass starts from the same random gradient of the output every time; gradients
of inputs and weights are cleared before each call.

**Estimates.** Before anything is built, methods that would need more than half of the free memory, or more time per
call than the limit, are set aside. Time and memory are extrapolated from the last length measured, with n or with n^2;
the memory is taken to be at least that of the matrices that a method is known to hold.
"""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from nystrom.attention.backend import kernel_errors
from nystrom.clock import peak_bytes, seconds
from nystrom.progress import Progress
from nystrom.turns import in_turns, quartiles
from nystrom_lab.measure.memory import allocator, free_bytes
from nystrom_lab.measure.rows import Row, new_row
from nystrom_lab.studies.speed.choices import Pass
from nystrom_lab.studies.speed.contenders.inputs import Call, Inputs, Sizes, make_inputs
from nystrom_lab.studies.speed.contenders.table import Contender

MEMORY_SHARE = 0.5


@dataclass(frozen=True)
class Cell:
    """One method in one pass.

    Attributes:
        method: Its name in the rows.
        contender: How it is built.
        number: Its number of landmarks or the like; 0 for none.
        skip: Whether its skip is included.
        timed: The pass.
    """

    method: str
    contender: Contender
    number: int
    skip: bool
    timed: Pass


@dataclass(frozen=True)
class Setup:
    """What is measured at each length, and what every row records of it.

    Attributes:
        cells: What is measured, in the order of the rows.
        sizes: Sizes of the inputs.
        dtype: Name of their dtype.
        repeats: Timed calls of each.
        seed: Seed of the inputs.
        threads: Threads on the CPU.
        limit_seconds: Skip calls that would take longer.
        device: Name of the device.
        command: The command that measured the rows.
        triton: The version of Triton where it computes, or "interpreted"; None for torch alone.
        free_bytes: Function that returns the free memory of a device.
        probe_tokens: Methods whose time is quadratic in n are first called at this length, if the first one is longer.
        study: The study that the rows belong to.
        shape: The facts of the rows; None means the sizes of one attention.
        bandwidth: Function that returns the bytes per second of a copy on the device, the median and both quartiles,
            where memory bounds the methods; None on a CPU, where arithmetic takes longer than moving the bytes.
    """

    cells: tuple[Cell, ...]
    sizes: Sizes
    dtype: str
    repeats: int
    seed: int
    threads: int
    limit_seconds: float
    device: str
    command: str
    triton: str | None = None
    free_bytes: Callable[[torch.device], int] = free_bytes
    probe_tokens: int = 1024
    study: str = "efficiency"
    shape: Mapping[str, object] | None = None
    bandwidth: Callable[[torch.device], tuple[float, float, float]] | None = None


def measure(n: int, setup: Setup, past: Sequence[Row]) -> list[Row]:
    """Measure all cells at one length.

    Args:
        n: Tokens.
        setup: What to measure.
        past: Rows of shorter lengths, in rising order, to estimate from.

    Returns:
        Two rows per cell, its time and its peak memory; a value of NaN with a note where it was not run.
    """
    notes = {cell: _too_much(n, cell, setup, past) for cell in setup.cells}
    times: dict[Cell, list[float]] = {}
    peaks: dict[Cell, int] = {}
    able = [cell for cell in setup.cells if not notes[cell]]
    if any(getattr(cell.contender.build, "compiled", False) for cell in able):
        # Compilations for other lengths count towards torch's limit.
        torch.compiler.reset()
    with Progress(f"n={n}", len(able) * (setup.repeats + 2), unit="calls") as bar:
        if able:
            inputs = make_inputs(n, setup.sizes, setup.seed)
            calls = _warmed(able, inputs, notes, bar)
            clocks = {cell: partial(_time, call, cell, inputs) for cell, call in calls.items()}
            times = in_turns(clocks, setup.repeats, warm_up=False, tick=bar.update)
            for cell, call in calls.items():
                peaks[cell] = _peak(call, cell, inputs)
                bar.update()
    for cell, note in notes.items():
        if note:
            print(f"n={n}: {cell.method} {cell.timed} is not measured: {note}.", file=sys.stderr)
    return [
        row for cell in setup.cells for row in _rows(n, setup, cell, times.get(cell, []), peaks.get(cell), notes[cell])
    ]


def plain_row(setup: Setup) -> Row:
    """A row with what all rows of this setup have in common, and no measurement."""
    cell = setup.cells[0]
    return _row(setup, 0, cell, f"{cell.timed} time", 0.0, "ms", None, 1, "")


def _warmed(cells: Sequence[Cell], inputs: Inputs, notes: dict[Cell, str], bar: Progress) -> dict[Cell, Call]:
    """Build and call each cell once; the notes record why a cell cannot run."""
    built: dict[str, Call] = {}
    ready = {}
    for cell in cells:
        try:
            if cell.method not in built:
                built[cell.method] = cell.contender.build(inputs, cell.number, cell.skip)
            _time(built[cell.method], cell, inputs)
            ready[cell] = built[cell.method]
        except (RuntimeError, ValueError, *kernel_errors()) as error:
            notes[cell] = str(error).partition("\n")[0].rstrip(".") or type(error).__name__
        bar.update()
    return ready


def _step(call: Call, cell: Cell, grad: Tensor) -> Tensor:
    if cell.timed == "forward":
        with torch.no_grad():
            return call.forward()
    out = call.forward()
    out.backward(grad)
    return out


def _time(call: Call, cell: Cell, inputs: Inputs) -> float:
    _clear(call)
    time = seconds(lambda: _step(call, cell, inputs.grad), inputs.sizes.device)
    # The others need the memory of the gradients.
    _clear(call)
    return time


def _peak(call: Call, cell: Cell, inputs: Inputs) -> int:
    _clear(call)
    peak = peak_bytes(lambda: _step(call, cell, inputs.grad), inputs.sizes.device)
    _clear(call)
    return peak


def _clear(call: Call) -> None:
    for leaf in call.leaves:
        leaf.grad = None


def _too_much(n: int, cell: Cell, setup: Setup, past: Sequence[Row]) -> str:
    """Why a cell should not be run at this length; empty if it should be."""
    sizes, contender = setup.sizes, cell.contender
    last = {row.quantity: row for row in past if row.method == cell.method and not math.isnan(row.value)}
    heads = sizes.batch * sizes.heads * sizes.dtype.itemsize
    inputs = heads * 4 * n * sizes.width
    own = heads * n * (contender.squares * n + contender.strips * cell.number + sizes.width)
    row = last.get(f"{cell.timed} memory")
    if row is not None and row.n:
        own = max(own, round(1e6 * row.value * (n / row.n) ** (2 if contender.squares else 1)))
    free = MEMORY_SHARE * setup.free_bytes(sizes.device)
    if inputs + own > free:
        return (
            f"needs about {(inputs + own) / 1e9:.3g} GB, {MEMORY_SHARE:.0%} of the free memory is {free / 1e9:.3g} GB"
        )
    row = last.get(f"{cell.timed} time")
    if row is not None and row.n:
        wanted = row.value / 1e3 * (n / row.n) ** (2 if contender.quadratic else 1)
        if wanted > setup.limit_seconds:
            return f"would take about {wanted:.0f} s a call, the limit is {setup.limit_seconds:g} s"
    return ""


def _rows(n: int, setup: Setup, cell: Cell, times: Sequence[float], peak: int | None, note: str) -> list[Row]:
    """Time with its quartiles, and memory."""
    time, memory, spread = math.nan, math.nan, None
    if peak is not None:
        found = quartiles([1e3 * x for x in times])
        time, memory, spread = found.middle, peak / 1e6, found.spread
    return [
        _row(setup, n, cell, f"{cell.timed} time", time, "ms", spread, len(times), note),
        _row(setup, n, cell, f"{cell.timed} memory", memory, "MB", None, int(peak is not None), note),
    ]


def _row(
    setup: Setup,
    n: int,
    cell: Cell,
    quantity: str,
    value: float,
    unit: str,
    spread: tuple[float, float] | None,
    repeats: int,
    note: str,
) -> Row:
    sizes = setup.sizes
    shape = setup.shape or {
        "b": sizes.batch, "h": sizes.heads, "d": sizes.width, "kernel": sizes.kernel_size, "layout": sizes.layout
    }  # fmt: skip
    return new_row(
        study=setup.study,
        quantity=quantity,
        method=cell.method,
        value=value,
        unit=unit,
        low=None if spread is None else spread[0],
        high=None if spread is None else spread[1],
        repeats=repeats,
        n=n,
        m=cell.number or None,
        facts={**shape, "threads": setup.threads, "triton": setup.triton, "allocator": allocator()},
        dtype=setup.dtype,
        seed=setup.seed,
        device=setup.device,
        command=setup.command,
        note=note,
    )
