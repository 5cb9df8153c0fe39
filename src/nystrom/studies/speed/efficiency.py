"""Time and peak memory of attention over the number of tokens: Table 1 of the Nyströmformer paper, on this machine.

Each method is measured forward and forward+backward, for the attention alone and with its skip ("nystrom-64+skip"), all
of them interleaved: see `nystrom.studies.speed.interleaved`. Per length, method and pass there are two rows:

- "forward time" or "forward+backward time": the median in ms, `low` and `high` being the quartiles;
- "forward memory" or "forward+backward memory": the peak beyond the inputs, in MB of 10^6 bytes, from one call of its
  own; `nystrom.measure.clock` says what it holds.

On a CUDA device each length also has rows of the method "floor": the bandwidth of a copy, and the time that the bytes
which must be moved take at it, see `nystrom.studies.speed.floor`. Tables then say how far above it each time lies, and
how much memory a method takes beyond its inputs and results.

What would not fit in half of the free memory, or would take longer than a limit per call, is not run: its rows hold NaN
and a note with the estimate.

Source: Xiong et al. (2021), arXiv:2102.03902, Table 1.
Departs from the paper: medians of interleaved calls instead of averages; the fused softmax, the authors' formula and
other packages stand beside the materialised softmax.
"""

import dataclasses
import importlib.metadata
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from nystrom.checks import check_at_least, check_choice
from nystrom.measure.rows import Row, append_rows, check_folder, read_rows
from nystrom.studies.speed.asked import command_line, device_name, differing_setting, find_device
from nystrom.studies.speed.contenders import available, check_kernels, find_contender
from nystrom.studies.speed.floor import floor_quantities, floor_rows
from nystrom.studies.speed.inputs import Layout, Sizes
from nystrom.studies.speed.interleaved import Cell, Pass, Plan, measure, plain_row

Dtype = Literal["float32", "float64", "bfloat16", "float16"]
Skip = Literal["without", "with", "both"]

_DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
# What takes time quadratic in n is first called at this length, if the first one asked for is longer.
_PROBE_TOKENS = 1024


def run_efficiency(
    *,
    lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384),
    methods: tuple[str, ...] = (),
    passes: tuple[Pass, ...] = ("forward", "forward+backward"),
    skip: Skip = "both",
    batch: int = 1,
    heads: int = 8,
    width: int = 64,
    kernel_size: int = 33,
    dtype: Dtype = "float32",
    device: str = "cpu",
    layout: Layout = "tokens",
    repeats: int = 7,
    seed: int = 0,
    threads: int | None = None,
    limit_seconds: float = 60.0,
    to: Path = Path("runs/efficiency"),
) -> list[Row]:
    """Measure time and peak memory of attention methods side by side, over the number of tokens.

    Rows go to efficiency.csv in the folder, a length at a time. The same command continues a run that was interrupted,
    and skips the lengths that are done.

    Args:
        lengths: Numbers of tokens n, in any order.
        methods: Such as softmax-materialised, softmax, nystrom-64, kernelized, skyformer-128, transformers-64,
            nystrom-attention-64, and authors-64, the published formula. Ratios are taken against the first.
            None named means all of these and nystrom-32, other packages as far as they are installed. On a GPU
            besides nystrom-triton-64 and skyformer-triton-128, by Triton kernels, and nystrom-compiled-64.
        passes: Passes to measure.
        skip: Whether methods that have a skip convolution are measured without it, with it, or both.
        batch: Sequences b.
        heads: Heads h.
        width: Width d of one head.
        kernel_size: Odd size of the skip convolution.
        dtype: Of inputs and weights.
        device: cpu, cuda or cuda:1.
        layout: "tokens" is (b, n, h*d) in and out, as projections have it; "heads" is contiguous (b, h, n, d).
        repeats: Timed calls of each method.
        seed: Of the random inputs.
        threads: Threads on the CPU; None leaves what torch has.
        limit_seconds: A call that would take longer is not run.
        to: Folder of the results.

    Raises:
        ValueError: Something asked for is unknown, missing or out of range, or the folder holds another setting.
    """
    asked = dict(locals())
    _check(asked)
    place = find_device(device)
    plan = Plan(
        cells=_cells(methods or available(place.type), passes, skip, place),
        sizes=Sizes(batch, heads, width, kernel_size, _DTYPES[dtype], place, layout),
        dtype=dtype,
        repeats=repeats,
        seed=seed,
        threads=torch.get_num_threads() if threads is None else threads,
        limit_seconds=limit_seconds,
        device=device_name(place),
        command=command_line(("nystrom", "bench", "efficiency"), run_efficiency, asked, "lengths"),
        versions=_versions(place, any(find_contender(name)[0].kernels for name in methods)),
    )
    check_folder(to)
    path = to / "efficiency.csv"
    rows = _done(path, plan)
    threads_before = torch.get_num_threads()
    torch.set_num_threads(plan.threads)
    try:
        return _run(sorted(set(lengths)), plan, rows, path)
    finally:
        torch.set_num_threads(threads_before)


def _run(lengths: Sequence[int], plan: Plan, rows: list[Row], path: Path) -> list[Row]:
    """Measure the lengths that have no rows yet, and write each when it is done."""
    done = {row.n for row in rows}
    missing = [n for n in lengths if n not in done]
    try:
        known = any((row.n or 0) < n for row in rows for n in missing[:1])
        past = [] if known else _probe(missing, plan)
        for n in missing:
            shorter = sorted((row for row in rows if (row.n or 0) < n), key=lambda row: row.n or 0)
            new = measure(n, plan, past + shorter)
            if _has_floor(plan):
                new += floor_rows(n, plan)
            append_rows(path, new)
            rows.extend(new)
            print(f"n={n}: {sum(not row.note for row in new)} of {len(new)} rows measured, in {path}.", file=sys.stderr)
    except KeyboardInterrupt:
        print(f"\nStopped. {path} keeps the lengths that are done; the same command continues.", file=sys.stderr)
        raise
    return sorted((row for row in rows if row.n in lengths), key=lambda row: row.n or 0)


def _probe(missing: Sequence[int], plan: Plan) -> list[Row]:
    """Rows of a short length, to estimate from where no other is: they are not kept."""
    quadratic = tuple(cell for cell in plan.cells if cell.contender.quadratic)
    if not quadratic or not missing or missing[0] <= _PROBE_TOKENS:
        return []
    return measure(_PROBE_TOKENS, dataclasses.replace(plan, cells=quadratic, repeats=1), [])


def _has_floor(plan: Plan) -> bool:
    """Whether memory bounds the methods: on a CPU products and softmax take longer than the bytes."""
    return plan.sizes.device.type == "cuda"


def _versions(device: torch.device, kernels: bool) -> str:
    """What compiles for a GPU; on a CPU its kernels are interpreted."""
    if device.type != "cuda":
        return " triton=interpreted" if kernels else ""
    if importlib.util.find_spec("triton") is None:
        return ""
    return f" triton={importlib.metadata.version('triton')}"


def _cells(methods: Sequence[str], passes: Sequence[Pass], skip: Skip, device: torch.device) -> tuple[Cell, ...]:
    cells = []
    for name in dict.fromkeys(methods):
        contender, number = find_contender(name)
        check_kernels(name, contender, device)
        for with_skip in (False, True):
            if with_skip and (skip == "without" or not contender.skip):
                continue
            if not with_skip and skip == "with" and contender.skip:
                continue
            label = f"{name}+skip" if with_skip else name
            cells += [Cell(label, contender, number, with_skip, timed) for timed in get_args(Pass) if timed in passes]
    return tuple(cells)


def _check(asked: Mapping[str, Any]) -> None:
    """Refuse what cannot be measured, before anything is."""
    for name, plural in (("lengths", "numbers of tokens"), ("passes", "passes")):
        if not asked[name]:
            raise ValueError(f"{name} is empty; expected at least one of {plural}.")
    for n in asked["lengths"]:
        check_at_least("an entry of lengths", n, 1)
    for timed in asked["passes"]:
        check_choice("an entry of passes", timed, get_args(Pass))
    check_choice("skip", asked["skip"], get_args(Skip))
    check_choice("dtype", asked["dtype"], _DTYPES)
    check_choice("layout", asked["layout"], get_args(Layout))
    for name in ("batch", "heads", "width", "kernel_size", "repeats"):
        check_at_least(name, asked[name], 1)
    check_at_least("seed", asked["seed"], 0)
    if asked["threads"] is not None:
        check_at_least("threads", asked["threads"], 1)
    if asked["kernel_size"] % 2 == 0:
        raise ValueError(
            f"kernel_size is {asked['kernel_size']}; expected an odd number, so that a token has a middle."
        )
    if not asked["limit_seconds"] > 0:
        raise ValueError(f"limit_seconds is {asked['limit_seconds']}; expected a positive number.")


def _done(path: Path, plan: Plan) -> list[Row]:
    """The rows of an earlier run of this plan, whatever its lengths.

    Raises:
        ValueError: The file holds rows of another setting.
    """
    if not path.exists():
        return []
    rows, new = read_rows(path), plain_row(plan)
    cells = {(cell.method, f"{cell.timed} {what}") for cell in plan.cells for what in ("time", "memory")}
    if _has_floor(plan):
        cells |= floor_quantities(plan)
    lengths = dict.fromkeys(row.n for row in rows)
    differ = [found for row in rows if (found := differing_setting(row, new, "lengths")) is not None]
    differ += [("sizes", row.sizes, new.sizes) for row in rows if row.sizes != new.sizes]
    differ += [
        (f"methods at n={n}", sorted(there), sorted(cells))
        for n in lengths
        if (there := {(row.method, row.quantity) for row in rows if row.n == n}) != cells
    ]
    if differ:
        name, came, wanted = differ[0]
        raise ValueError(
            f"{path} holds rows of another setting: {name} is {came!r} there and {wanted!r} now. "
            "Name another folder in to, or delete that file to start anew."
        )
    return rows
