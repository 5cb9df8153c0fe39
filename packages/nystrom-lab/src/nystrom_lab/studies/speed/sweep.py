"""One setup measured over the number of tokens, a length at a time, and continued where it was interrupted."""

import dataclasses
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_args

import torch

from nystrom_lab.measure.rows import Row, append_rows, other_setting, rows_so_far
from nystrom_lab.studies.speed.choices import Pass, Skip
from nystrom_lab.studies.speed.contenders.table import Contender, check_kernels, find_contender
from nystrom_lab.studies.speed.floor import floor_quantities, floor_rows
from nystrom_lab.studies.speed.interleaved import Cell, Setup, measure, plain_row


def sweep_lengths(lengths: Sequence[int], setup: Setup, path: Path) -> list[Row]:
    """Measure the lengths that have no rows in the file yet, and write each when it is done.

    Args:
        lengths: Numbers of tokens n.
        setup: What to measure at each length.
        path: The file.

    Returns:
        The rows of these lengths, in rising order.

    Raises:
        ValueError: The file holds rows of another setting.
    """
    rows = _done(path, setup)
    threads_before = torch.get_num_threads()
    torch.set_num_threads(setup.threads)
    try:
        return _run(sorted(set(lengths)), setup, rows, path)
    finally:
        torch.set_num_threads(threads_before)


def _run(lengths: Sequence[int], setup: Setup, rows: list[Row], path: Path) -> list[Row]:
    """Measure the lengths that have no rows yet, and write each when it is done."""
    done = {row.n for row in rows}
    missing = [n for n in lengths if n not in done]
    try:
        known = any((row.n or 0) < n for row in rows for n in missing[:1])
        past = [] if known else _probe(missing, setup)
        for n in missing:
            shorter = sorted((row for row in rows if (row.n or 0) < n), key=lambda row: row.n or 0)
            new = measure(n, setup, past + shorter)
            if setup.bandwidth is not None:
                new += floor_rows(n, setup, setup.bandwidth)
            append_rows(path, new)
            rows.extend(new)
            print(f"n={n}: {sum(not row.note for row in new)} of {len(new)} rows measured, in {path}.", file=sys.stderr)
    except KeyboardInterrupt:
        print(f"\nStopped. {path} keeps the lengths that are done; the same command continues.", file=sys.stderr)
        raise
    return sorted((row for row in rows if row.n in lengths), key=lambda row: row.n or 0)


def _probe(missing: Sequence[int], setup: Setup) -> list[Row]:
    """Rows of a short length, as a basis for estimates where there is no other; they are not kept."""
    quadratic = tuple(cell for cell in setup.cells if cell.contender.quadratic)
    if not quadratic or not missing or missing[0] <= setup.probe_tokens:
        return []
    return measure(setup.probe_tokens, dataclasses.replace(setup, cells=quadratic, repeats=1), [])


def triton_version(device: torch.device, kernels: bool) -> str | None:
    """The version of Triton, for rows; on a CPU its kernels are interpreted."""
    if device.type != "cuda":
        return "interpreted" if kernels else None
    if importlib.util.find_spec("triton") is None:
        return None
    return importlib.metadata.version("triton")


def cells_of(
    methods: Sequence[str],
    passes: Sequence[Pass],
    skip: Skip,
    device: torch.device,
    find: Callable[[str], tuple[Contender, int]] = find_contender,
) -> tuple[Cell, ...]:
    """The named methods in each pass, without their skip, with it, or both.

    Args:
        methods: Their names; a repeated name is measured once.
        passes: Passes.
        skip: Which forms of a method that has a skip.
        device: The device that they run on.
        find: Function from a name to a contender and its number.

    Raises:
        ValueError: No method, one that is unknown, or one that the device cannot run.
    """
    if not methods:
        raise ValueError("methods is empty; expected at least one.")
    cells = []
    for name in dict.fromkeys(methods):
        contender, number = find(name)
        check_kernels(name, contender, device)
        for with_skip in (False, True):
            if with_skip and (skip == "without" or not contender.skip):
                continue
            if not with_skip and skip == "with" and contender.skip:
                continue
            label = f"{name}+skip" if with_skip else name
            cells += [Cell(label, contender, number, with_skip, timed) for timed in get_args(Pass) if timed in passes]
    return tuple(cells)


def _done(path: Path, setup: Setup) -> list[Row]:
    """The rows of an earlier run of this setup, for any lengths.

    Raises:
        ValueError: The file holds rows of another setting.
    """
    new = plain_row(setup)
    rows = rows_so_far(path, new, "lengths")
    cells = {(cell.method, f"{cell.timed} {what}") for cell in setup.cells for what in ("time", "memory")}
    if setup.bandwidth is not None:
        cells |= floor_quantities(setup)
    lengths = dict.fromkeys(row.n for row in rows)
    differ: list[tuple[str, object, object]] = [
        ("sizes", row.words, new.words) for row in rows if row.facts != new.facts
    ]
    differ += [
        (f"methods at n={n}", sorted(there), sorted(cells))
        for n in lengths
        if (there := {(row.method, row.quantity) for row in rows if row.n == n}) != cells
    ]
    for name, came, wanted in differ:
        raise other_setting(path, name, came, wanted)
    return rows
