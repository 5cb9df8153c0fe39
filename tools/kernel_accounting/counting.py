"""The cost of the Triton kernels of a forward and a backward pass, compiled for a GPU that does not have to be present.

Nothing is timed. Each kernel is compiled as its launch would compile it; sizes are counted from shapes, and `driver.py`
says what counts. A row is one number of one kernel in one pass, with a quantity such as "forward left_forward
registers":

- launches, and the programs per launch;
- registers and stack per thread (a stack means that registers spill), and shared memory per program;
- bytes: what a launch must read and write; passes: the part of it that is tokens, in tensors of n x d.

Instead of a kernel, "torch" stands for the operators of torch between them, and "all" for the whole pass: its launches,
where an operator counts as one; its bytes; and its extra memory, the largest amount that tensors hold beyond q, k, v,
the output and, backward, the gradient of the output and the three requested gradients.

For comparison there are rows of two other methods: the launches of the torch path, which are operators counted in the
same way in a run on the CPU (where, as on a GPU, fused attention is one operator; the skip convolution is taken as
`conv2d`), and the floor, the bytes that every implementation must move: see `nystrom_papers.bench.floor`.
"""

import dataclasses
import importlib.metadata
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F

from nystrom.attention.backend import check_triton
from nystrom.attention.methods.nystrom import nystrom_attention
from nystrom.attention.methods.skyformer import skyformer_attention
from nystrom.checks import check_at_least, check_choice
from nystrom.whole_files import check_folder
from nystrom_lab.measure.rows import Row, append_rows, read_rows
from nystrom_papers.bench.floor import FLOOR, OF_DRAWN, OF_MEANS
from nystrom_papers.bench.options import command_line
from tools.kernel_accounting.analysis import SHARED_MEMORY, Operators, Passage, analyse
from tools.kernel_accounting.driver import Shape

Method = Literal["nystrom", "skyformer"]
Dtype = Literal["bfloat16", "float16", "float32"]
Masks = Literal["without", "with"]
COMMAND = ("python", "-m", "tools.kernel_accounting", "count")
_UNITS = {"stack": "bytes", "shared memory": "bytes", "bytes": "bytes", "memory": "bytes"}


def count_kernels(
    *,
    method: Method = "nystrom",
    landmarks: int = 64,
    width: int = 64,
    tokens: int = 16384,
    batch: int = 4,
    heads: int = 16,
    dtype: Dtype = "bfloat16",
    kernel_size: int | None = None,
    masks: Masks = "without",
    capability: str = "9.0",
    multiprocessors: int = 132,
    to: Path = Path("runs/kernels"),
) -> list[Row]:
    """Compile the Triton kernels of both passes for a GPU, and count what they launch, occupy, read and write.

    Needs no GPU and measures no time. Rows go to kernels.csv in the folder; the same command replaces them.

    Args:
        method: nystrom or skyformer.
        landmarks: Landmarks m.
        width: Width d of one head.
        tokens: Tokens n, more than two per landmark.
        batch: Sequences b.
        heads: Heads h.
        dtype: Of queries, keys and values.
        kernel_size: Odd size of the skip convolution, 0 for none; by default 33 for nystrom and none for skyformer.
        masks: Whether there is a padding mask (under which all tokens are real).
        capability: Compute capability of the GPU: 8.0, 8.6, 8.9, 9.0 (H100, H200), 10.0 or 12.0.
        multiprocessors: Its number of multiprocessors, 132 in an H200; determines how sums over tokens are split.
        to: Folder of the results.

    Raises:
        ValueError: An argument is unknown or out of range, kernels are interpreted, or the folder holds rows of
            another command.
    """
    asked = dict(locals())
    check_choice("method", method, get_args(Method))
    check_choice("dtype", dtype, get_args(Dtype))
    check_choice("masks", masks, get_args(Masks))
    for name in ("landmarks", "width", "tokens", "batch", "heads", "multiprocessors"):
        check_at_least(name, asked[name], 1)
    check_triton({})

    gaussian = method == "skyformer"
    taps = (0 if gaussian else 33) if kernel_size is None else kernel_size
    shape = Shape(
        batch, heads, tokens, width, landmarks, getattr(torch, dtype), masks == "with", taps=taps, gaussian=gaussian
    )
    path = to / "kernels.csv"
    command = command_line(COMMAND, count_kernels, asked | {"tokens": (tokens,)}, "tokens")
    _check_folder(path, command)
    passages: dict[str, Passage] = dict(
        zip(
            ("forward", "backward"), analyse(shape, capability=capability, multiprocessors=multiprocessors), strict=True
        )
    )
    plain = Row(
        study="kernels",
        quantity="",
        method=f"{method}-triton-{landmarks}" + ("+skip" if taps else ""),
        value=0.0,
        unit="",
        device=f"compiled for compute capability {capability} with {multiprocessors} multiprocessors, not run",
        n=tokens,
        m=landmarks,
        facts={
            "b": batch,
            "h": heads,
            "d": width,
            "kernel": taps,
            "masks": masks,
            "layout": "tokens",
            "shared_memory_at_most": SHARED_MEMORY[capability],
            "triton": importlib.metadata.version("triton"),
        },
        dtype=dtype,
        command=command,
    )
    rows = list(_rows(plain, shape, passages))
    path.unlink(missing_ok=True)
    append_rows(path, rows)
    return rows


def _check_folder(path: Path, command: str) -> None:
    check_folder(path.parent)
    if not path.exists():
        return
    for row in read_rows(path):
        if row.command != command:
            raise ValueError(f"{path} holds rows of another command, {row.command}: pass another folder as to.")


def _rows(plain: Row, shape: Shape, passages: Mapping[str, Passage]) -> Iterator[Row]:
    """All rows of both passes."""

    def row(name: str, what: str, value: float, method: str = plain.method) -> Row:
        unit = _UNITS.get(what, "")
        return dataclasses.replace(plain, method=method, quantity=f"{name} {what}", value=float(value), unit=unit)

    kept = 0
    reference = plain.method.replace("-triton", "")
    torch_path = dict(zip(passages, _torch_operators(shape), strict=True))
    floors = dict(zip(passages, OF_DRAWN if shape.gaussian else OF_MEANS, strict=True))
    for name, passage in passages.items():
        for kernel, numbers in _by_kernel(passage, shape).items():
            yield from (row(f"{name} {kernel}", what, value) for what, value in numbers.items())
        if passage.operators:
            yield row(f"{name} torch", "launches", passage.operators)
            yield row(f"{name} torch", "bytes", passage.operator_bytes)
        yield row(f"{name} all", "launches", len(passage.launches) + passage.operators)
        yield row(f"{name} all", "bytes", sum(x.bytes for x in passage.launches) + passage.operator_bytes)
        # The output, and in the backward pass the three gradients as well.
        kept += shape.token_bytes * (1 if name == "forward" else 3)
        yield row(f"{name} all", "memory", passage.memory - kept)
        yield row(f"{name} all", "launches", torch_path[name], reference)
        yield row(f"{name} all", "bytes", floors[name] * shape.token_bytes, FLOOR)


def _by_kernel(passage: Passage, shape: Shape) -> dict[str, dict[str, float]]:
    """The numbers of each kernel, in the order of launches."""
    together = defaultdict(list)
    for launch in passage.launches:
        together[launch.kernel].append(launch)
    return {
        kernel: {
            "launches": len(launches),
            "programs": max(launch.programs for launch in launches),
            "registers": max(launch.registers for launch in launches),
            "stack": max(launch.stack for launch in launches),
            "shared memory": max(launch.shared for launch in launches),
            "bytes": sum(launch.bytes for launch in launches),
            "passes": sum(launch.token_bytes for launch in launches) / shape.token_bytes,
        }
        for kernel, launches in together.items()
    }


def _torch_operators(shape: Shape) -> tuple[int, int]:
    """Operators of the torch path, forward and backward; their number does not depend on the number of tokens."""
    n, width = 2 * shape.landmarks + 1, shape.width
    q, k, v, grad = (torch.zeros(1, n, 2, width, dtype=shape.dtype).transpose(1, 2) for _ in range(4))
    weight = torch.zeros(2, 1, shape.taps, 1, dtype=shape.dtype, requires_grad=True)
    keep = torch.ones(1, n, dtype=torch.bool) if shape.masked else None
    options: dict[str, Any] = {"num_landmarks": shape.landmarks, "keep": keep, "backend": "torch"}
    for x in (q, k, v):
        x.requires_grad_()
    with Operators() as operators:
        out = (skyformer_attention if shape.gaussian else nystrom_attention)(q, k, v, **options)
        if shape.taps:
            values = v if keep is None else torch.where(keep[:, None, :, None], v, 0.0)
            out = out + F.conv2d(values, weight, padding=(shape.taps // 2, 0), groups=2)
        forward = operators.count
        out.backward(grad)
    return forward, operators.count - forward
