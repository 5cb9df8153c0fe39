"""Which tiles the Triton kernels are fastest with, at one shape on one GPU.

Each combination of `nystrom.gpu.launch.RANGES` is timed forward and forward+backward, all kernels with the same tiles;
what does not compile or fit is noted. Rows go to tune.csv one combination at a time, the tiles in its sizes; the same
command continues. The row that is fastest says what to put into `nystrom.gpu.launch`: nothing is changed by itself.
"""

import dataclasses
import itertools
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

import torch

from nystrom.attention.backend import kernel_errors
from nystrom.checks import check_at_least, check_choice
from nystrom.measure.clock import seconds
from nystrom.measure.rows import Row, append_rows, check_folder, new_row, read_rows
from nystrom.studies.speed.asked import command_line, device_name, differing_setting, find_device
from nystrom.studies.speed.contenders import check_kernels, find_contender
from nystrom.studies.speed.inputs import Call, Inputs, Sizes, make_inputs

Dtype = Literal["bfloat16", "float16", "float32"]
_PASSES = ("forward", "forward+backward")


def run_tune(
    *,
    method: str = "nystrom-triton-64",
    tokens: int = 16384,
    width: int = 64,
    batch: int = 4,
    heads: int = 16,
    kernel_size: int = 0,
    dtype: Dtype = "bfloat16",
    device: str = "cuda",
    repeats: int = 20,
    seed: int = 0,
    to: Path = Path("runs/tune"),
) -> list[Row]:
    """Time the Triton kernels with every combination of tile sizes that is known, at one shape.

    Rows go to tune.csv in the folder, one combination at a time. The same command continues a run that was interrupted.

    Args:
        method: nystrom-triton-64, skyformer-triton-128 or another number of landmarks.
        tokens: Tokens n.
        width: Width d of one head.
        batch: Sequences b.
        heads: Heads h.
        kernel_size: Odd size of the skip convolution; 0 for none.
        dtype: Of the inputs.
        device: cuda or cuda:1.
        repeats: Timed calls, after one that compiles.
        seed: Of the random inputs.
        to: Folder of the results.

    Raises:
        ValueError: Something asked for is unknown or out of range, or the folder holds another setting.
    """
    asked = dict(locals())
    check_choice("dtype", dtype, get_args(Dtype))
    for name in ("tokens", "width", "batch", "heads", "repeats"):
        check_at_least(name, asked[name], 1)
    check_at_least("kernel_size", kernel_size, 0)
    contender, landmarks = find_contender(method)
    if not contender.kernels or (kernel_size and not contender.skip):
        raise ValueError(
            f"method is {method!r} with kernel_size={kernel_size}; expected nystrom-triton-64 or the like, or "
            "skyformer-triton-128 without a kernel: name one."
        )
    place = find_device(device)
    check_kernels(method, contender, place)
    check_folder(to)
    sizes = Sizes(batch, heads, width, kernel_size or 1, getattr(torch, dtype), place, "tokens")
    inputs = make_inputs(tokens, sizes, seed)
    plain = new_row(
        study="tune",
        quantity="",
        method=method,
        value=0.0,
        unit="ms",
        device=device_name(place),
        repeats=repeats,
        n=tokens,
        m=landmarks,
        dtype=dtype,
        seed=seed,
        command=command_line(("nystrom", "bench", "tune"), run_tune, asked | {"tokens": (tokens,)}, "tokens"),
    )
    call = contender.build(inputs, landmarks, kernel_size > 0)
    return _try_all(to / "tune.csv", plain, f"b={batch} h={heads} d={width} kernel={kernel_size}", call, inputs)


def _try_all(path: Path, plain: Row, shape: str, call: Call, inputs: Inputs) -> list[Row]:
    from nystrom.gpu.launch import RANGES, Tiles, trying

    rows = read_rows(path) if path.exists() else []
    if any(differing_setting(row, plain, "tokens") or row.n != plain.n for row in rows):
        raise ValueError(f"{path} holds rows of another setting: name another folder in to, or delete that file.")
    done = {row.sizes for row in rows}
    combinations = [dict(zip(RANGES, values, strict=True)) for values in itertools.product(*RANGES.values())]
    for place, tiles in enumerate(combinations, 1):
        sizes = " ".join([shape, *(f"{name}={value}" for name, value in tiles.items())])
        if sizes in done:
            continue
        with trying(Tiles(block_d=16, block_e=16, **tiles)):
            new = [_timed(dataclasses.replace(plain, sizes=sizes), timed, call, inputs) for timed in _PASSES]
        append_rows(path, new)
        rows += new
        said = ", ".join(row.note or f"{row.quantity} {row.value:.3f} ms" for row in new)
        print(f"{place} of {len(combinations)}: {sizes}: {said}", file=sys.stderr)
    return rows


def _timed(plain: Row, timed: str, call: Call, inputs: Inputs) -> Row:
    """The row of one pass with the tiles that are set."""

    def step() -> torch.Tensor:
        with torch.set_grad_enabled(timed != "forward"):
            out = call.forward()
        if timed != "forward":
            out.backward(inputs.grad)
        return out

    times = []
    try:
        for _ in range(plain.repeats + 1):
            for leaf in call.leaves:
                leaf.grad = None
            times.append(1e3 * seconds(step, inputs.sizes.device))
    except (RuntimeError, *kernel_errors()) as error:
        # Too much shared memory, for one.
        note = str(error).partition("\n")[0] or type(error).__name__
        return dataclasses.replace(plain, quantity=f"{timed} time", value=float("nan"), repeats=0, note=note)
    # The first call compiles.
    return dataclasses.replace(plain, quantity=f"{timed} time", value=statistics.median(times[1:]))


def fastest(rows: Sequence[Row]) -> list[Row]:
    """The fastest row of each pass that ran."""
    ran = [row for row in rows if not row.note]
    passes = dict.fromkeys(row.quantity for row in ran)
    return [min((row for row in ran if row.quantity == name), key=lambda row: row.value) for name in passes]
