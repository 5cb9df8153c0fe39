"""Attentions, or whole models with them, measured over the number of tokens by `nystrom_papers.bench.harness`.

A backward pass starts from the same random gradient of the output every time; gradients of inputs and weights are
cleared before each call.

**Estimates.** Time and memory of a call are extrapolated from the last length measured, with n or with n^2; the memory
is taken to be at least that of the matrices that a method is known to hold. If no shorter length was measured,
methods whose time is quadratic are first called at one.
"""

import importlib.metadata
import importlib.util
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor

from nystrom.clock import seconds
from nystrom.progress import Progress
from nystrom_lab.measure.memory import allocator
from nystrom_lab.measure.peak import peak_bytes
from nystrom_lab.measure.rows import Row, other_setting, rows_so_far
from nystrom_papers.bench.contenders import Contender, check_kernels, find_contender
from nystrom_papers.bench.floor import floor_quantities, floor_rows
from nystrom_papers.bench.harness import UNABLE, Setup, reason, sweep, take_turns, time_and_memory
from nystrom_papers.bench.inputs import Call, Inputs, Sizes, make_inputs
from nystrom_papers.bench.launches import Recorder, compiled, compiling
from nystrom_papers.bench.options import Launch, LengthOptions, Pass, Skip, device_name


@dataclass(frozen=True)
class Cell:
    """One method in one pass, launched in one way."""

    method: str
    contender: Contender
    number: int
    skip: bool
    timed: Pass
    launch: Launch = "eager"

    @property
    def label(self) -> str:
        """The method as rows name it."""
        return self.method if self.launch == "eager" else f"{self.method}, {self.launch}"


@dataclass(frozen=True, kw_only=True)
class LengthSetup(Setup):
    """The plan of the measurements at each length.

    Attributes:
        cells: Measured quantities, in the order of the rows.
        sizes: Sizes of the inputs.
        probe_tokens: Methods whose time is quadratic in n are first called at this length, if the first one is longer.
        bandwidth: Function that returns the bytes per second of a copy on the device, the median and both quartiles,
            where memory bounds the methods; None on a CPU, where arithmetic takes longer than moving the bytes.
    """

    cells: tuple[Cell, ...]
    sizes: Sizes
    probe_tokens: int = 1024
    bandwidth: Callable[[torch.device], tuple[float, float, float]] | None = None


def length_setup(
    options: LengthOptions,
    study: str,
    *,
    cells: tuple[Cell, ...],
    sizes: Sizes,
    shape: dict[str, object],
    command: str,
    triton: str | None = None,
    bandwidth: Callable[[torch.device], tuple[float, float, float]] | None = None,
) -> LengthSetup:
    """The setup of a command.

    `shape` is the sizes that rows record.
    """
    blank = Row(
        study=study, quantity="", method="", value=0.0, device=device_name(sizes.device), dtype=options.dtype,
        facts={**shape, "threads": options.threads_used, "triton": triton, "allocator": allocator()}, seed=options.seed,
        command=command,
    )  # fmt: skip
    return LengthSetup(
        blank=blank, device=sizes.device, repeats=options.repeats, threads=options.threads_used,
        limit_seconds=options.limit_seconds, cells=cells, sizes=sizes, bandwidth=bandwidth,
    )  # fmt: skip


def cells_of(
    methods: Sequence[str],
    passes: Sequence[Pass],
    skip: Skip,
    device: torch.device,
    find: Callable[[str], tuple[Contender, int]] = find_contender,
    launches: Sequence[Launch] = ("eager",),
) -> tuple[Cell, ...]:
    """The named methods in each pass and launch, without their skip, with it, or both.

    Raises:
        ValueError: No method, one that is unknown, or a method or a launch that the device cannot run.
    """
    if not methods:
        raise ValueError("methods is empty; expected at least one.")
    if "graph" in launches and device.type != "cuda":
        raise ValueError(
            f"launches holds 'graph', a CUDA graph, but device is {device.type!r}: pass device='cuda', or leave it out."
        )
    cells = []
    for name in dict.fromkeys(methods):
        contender, number = find(name)
        check_kernels(name, contender, device)
        forms = {"without": (False,), "with": (True,), "both": (False, True)}[skip] if contender.skip else (False,)
        for form in forms:
            label = f"{name}+skip" if form else name
            cells += [
                Cell(label, contender, number, form, timed, launch)
                for launch in get_args(Launch)
                if launch in launches
                for timed in get_args(Pass)
                if timed in passes
            ]
    return tuple(cells)


def triton_version(device: torch.device, kernels: bool) -> str | None:
    """The version of Triton, for rows; on a CPU its kernels are interpreted."""
    if device.type != "cuda":
        return "interpreted" if kernels else None
    return importlib.metadata.version("triton") if importlib.util.find_spec("triton") else None


def sweep_lengths(lengths: Sequence[int], setup: LengthSetup, path: Path) -> list[Row]:
    """Measure the lengths that have no rows in the file yet; see `nystrom_papers.bench.harness.sweep`."""
    _check_same(path, setup)
    probed: list[Row] = []

    def measured(n: int, rows: list[Row]) -> list[Row]:
        shorter = sorted((row for row in rows if (row.n or 0) < n), key=lambda row: row.n or 0)
        if not shorter and not probed:
            probed.extend(_probe(n, setup))
        new = measure(n, setup, probed + shorter)
        if setup.bandwidth is None:
            return new
        passes = [cell.timed for cell in setup.cells]
        return new + floor_rows(n, setup.blank, setup.sizes, passes, setup.bandwidth)

    columns = {f"n={n}": n for n in sorted(set(lengths))}
    return sweep(columns, setup, path, plural="lengths", column_of=lambda row: f"n={row.n}", measure=measured)


def _check_same(path: Path, setup: LengthSetup) -> None:
    """Raise ValueError if the file holds rows of other sizes or methods."""
    rows = rows_so_far(path, setup.blank, "lengths")
    for row in rows:
        if row.facts != setup.blank.facts:
            raise other_setting(path, "sizes", row.words, setup.blank.words)
    cells = {(cell.label, f"{cell.timed} {what}") for cell in setup.cells for what in ("time", "memory")}
    if setup.bandwidth is not None:
        cells |= floor_quantities({cell.timed for cell in setup.cells})
    for n in dict.fromkeys(row.n for row in rows):
        there = {(row.method, row.quantity) for row in rows if row.n == n}
        if there != cells:
            raise other_setting(path, f"methods at n={n}", sorted(there), sorted(cells))


def _probe(n: int, setup: LengthSetup) -> list[Row]:
    """Rows of a short length, as a basis for estimates where there is no other; they are not kept."""
    quadratic = tuple(cell for cell in setup.cells if cell.contender.quadratic and cell.launch == "eager")
    if not quadratic or n <= setup.probe_tokens:
        return []
    return measure(setup.probe_tokens, replace(setup, cells=quadratic, repeats=1), [])


def measure(n: int, setup: LengthSetup, past: Sequence[Row]) -> list[Row]:
    """Measure all cells at one length.

    `past` holds rows of shorter lengths, in rising order, to estimate from.
    """
    notes = {cell: _too_much(n, cell, setup, past) for cell in setup.cells}
    able = [cell for cell in setup.cells if not notes[cell]]
    taken: dict[Cell, tuple[list[float], int]] = {}
    with (
        compiling(sum(cell.launch == "compiled" for cell in able)),
        Progress(f"n={n}", len(able) * (setup.repeats + 2), unit="calls") as bar,
    ):
        if able:
            inputs = make_inputs(n, setup.sizes, setup.blank.seed or 0)
            ready = _warmed(able, inputs, notes, bar)
            clocks = {cell: partial(_time, each, inputs.sizes.device) for cell, each in ready.items()}
            peaks = {cell: partial(_peak, each, inputs.sizes.device) for cell, each in ready.items()}
            taken = take_turns(clocks, peaks, setup.repeats, bar, warm_up=False)
    rows = []
    for cell, note in notes.items():
        if note:
            print(f"n={n}: {cell.label} {cell.timed} is not measured: {note}.", file=sys.stderr)
        like = replace(setup.blank, method=cell.label, n=n, m=cell.number or None)
        rows += time_and_memory(like, cell.timed, taken.get(cell), note)
    return rows


@dataclass(frozen=True)
class _Ready:
    """A cell that was called once.

    Attributes:
        call: The call of its method.
        step: Makes its pass.
        launched: The same as it is timed.
    """

    call: Call
    step: Callable[[], object]
    launched: Callable[[], object]


def _warmed(cells: Sequence[Cell], inputs: Inputs, notes: dict[Cell, str], bar: Progress) -> dict[Cell, _Ready]:
    """Build and call each cell once; the notes record why a cell cannot run."""
    recorder = Recorder(inputs.sizes.device) if any(cell.launch == "graph" for cell in cells) else None
    built: dict[tuple[str, bool], Call] = {}
    ready = {}
    for cell in cells:
        plain, kind = (cell.method, False), (cell.method, cell.launch == "compiled")
        try:
            if plain not in built:
                built[plain] = cell.contender.build(inputs, cell.number, cell.skip)
            if kind not in built:
                built[kind] = compiled(built[plain])
            call = built[kind]
            step = partial(_step, call, cell, inputs.grad)
            ready[cell] = _Ready(call, step, step)
            _time(ready[cell], inputs.sizes.device)
            if recorder is not None and cell.launch == "graph":
                ready[cell] = _Ready(call, step, recorder.record(step, partial(_clear, call)))
        except UNABLE as error:
            notes[cell] = reason(error)
            ready.pop(cell, None)
        bar.update()
    return ready


def _step(call: Call, cell: Cell, grad: Tensor) -> Tensor:
    if cell.timed == "forward":
        with torch.no_grad():
            return call.forward()
    out = call.forward()
    out.backward(grad)
    return out


def _time(ready: _Ready, device: torch.device) -> float:
    _clear(ready.call)
    time = seconds(ready.launched, device)
    # The others need the memory of the gradients.
    _clear(ready.call)
    return time


def _peak(ready: _Ready, device: torch.device) -> int:
    _clear(ready.call)
    peak = peak_bytes(ready.step, device)
    _clear(ready.call)
    return peak


def _clear(call: Call) -> None:
    for leaf in call.leaves:
        leaf.grad = None


def _too_much(n: int, cell: Cell, setup: LengthSetup, past: Sequence[Row]) -> str:
    """Why a cell should not be run at this length; empty if it should be."""
    sizes, contender = setup.sizes, cell.contender
    last = {row.quantity: row for row in past if row.method == cell.label and not math.isnan(row.value)}

    def extrapolated(what: str, quadratic: bool) -> float:
        row = last.get(f"{cell.timed} {what}")
        return row.value * (n / row.n) ** (2 if quadratic else 1) if row is not None and row.n else 0.0

    heads = sizes.batch * sizes.heads * sizes.dtype.itemsize
    own = heads * n * (contender.squares * n + contender.strips * cell.number + sizes.width)
    own = max(own, 1e6 * extrapolated("memory", contender.squares > 0))
    return setup.too_much(
        need=heads * 4 * n * sizes.width + own, seconds=extrapolated("time", contender.quadratic) / 1e3
    )
