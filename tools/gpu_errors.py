"""Errors of the kernels on a GPU against float64, beside those of the torch path: `python tools/gpu_errors.py`.

Outputs and gradients of nystrom, near_far and skyformer at growing scores, in every dtype, and in float32 with TF32. A
row has the relative error of one tensor, in the Frobenius norm. near_far chooses keys in the dtype, and another choice
counts as an error. Rows are written after each dtype, and dtypes that the file has are not measured again.

`write_model_errors` compares the last hidden states of a whole encoder with those of exact attention. The weights are
random, which makes attention nearly even: such errors show whether a model computes what it should, and no more.
"""

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from nystrom.attention.functions import FUNCTIONS
from nystrom.attention.method_names import size_options
from nystrom_lab.measure.rows import Row, append_rows, cpu_name, read_rows, rows_so_far
from nystrom_papers.bench.inputs import Sizes, make_inputs
from nystrom_papers.bench.model import EncoderSizes, encoder_finder
from nystrom_papers.bench.options import device_name, find_device

SCALES = (1.0, 3.0, 10.0, 30.0)
METHODS = {"nystrom": 64, "near_far": None, "skyformer": 128}
DTYPES = ("float32", "float32 with TF32", "bfloat16", "float16")


def error_rows(
    *,
    device: str,
    tokens: int = 4096,
    heads: int = 8,
    width: int = 64,
    methods: Mapping[str, int | None] = METHODS,
    scales: Sequence[float] = SCALES,
    dtypes: Sequence[str] = DTYPES,
) -> Iterable[Row]:
    """Rows of each method for both backends.

    Args:
        device: "cuda", or "cpu" for the interpreter.
        tokens: Tokens n.
        heads: Heads h.
        width: Width d of one head.
        methods: Methods, and landmarks m of each; None for its default sizes.
        scales: Factors of the queries, 1 being standard normal ones.
        dtypes: Names of dtypes.
    """
    name = torch.cuda.get_device_name() if device.startswith("cuda") else cpu_name()
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(1, heads, tokens, width, generator=generator).to(device) for _ in range(4))
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        for scale in scales:
            for called in dtypes:
                dtype = getattr(torch, called.partition(" ")[0])
                torch.backends.cuda.matmul.allow_tf32 = "TF32" in called
                given = [x.to(dtype) for x in (scale * q, k, v, grad)]
                for method, m in methods.items():
                    # The same numbers, rounded to the dtype, so that only the computation differs.
                    wanted = _results([x.double() for x in given], method, m, "torch")
                    for backend in ("torch", "triton"):
                        found = _results(given, method, m, backend)
                        for what, ours, exact in zip(("output", "dq", "dk", "dv"), found, wanted, strict=True):
                            error = (ours.double() - exact).norm() / exact.norm()
                            yield Row(
                                study="gpu errors", quantity=f"relative error of {what}", method=f"{method}-{backend}",
                                value=float(error), unit="", n=tokens, m=m, dtype=called, seed=0, device=name,
                                facts={"b": 1, "h": heads, "d": width, "scale": f"{scale:g}"},
                                note="" if error.isfinite() else "not finite",
                            )  # fmt: skip
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _results(given: Sequence[Tensor], method: str, m: int | None, backend: str) -> list[Tensor]:
    *leaves, grad = given
    leaves = [x.detach().requires_grad_() for x in leaves]
    out = FUNCTIONS[method](*leaves, **size_options(method, m), backend=backend)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def write_model_errors(
    *,
    to: Path,
    device: str,
    methods: Sequence[str],
    lengths: Sequence[int],
    dtype: str = "bfloat16",
    sizes: EncoderSizes | None = None,
    seed: int = 0,
) -> list[Row]:
    """Rows of the error of an encoder's last hidden states, written to errors.csv after each length.

    Args:
        to: Folder of the results; lengths that it has are not measured again.
        device: "cuda" or "cpu".
        methods: As in `nystrom bench model`, without weights of their own; the first is exact.
        lengths: Numbers of tokens.
        dtype: Of weights and activations.
        sizes: Sizes of the encoder; None for BERT-base.
        seed: Of weights and tokens.

    Raises:
        ValueError: No such device, or a method with weights of its own.
    """
    sizes = sizes or EncoderSizes()
    place, path, find = find_device(device), to / "errors.csv", encoder_finder(sizes, seed)
    blank = Row(
        study="gpu errors", quantity="relative error of hidden states", method="", value=0.0, dtype=dtype, seed=seed,
        device=device_name(place), facts={"b": 1, "layers": sizes.layers, "width": sizes.width, "heads": sizes.heads},
    )  # fmt: skip
    rows = rows_so_far(path, blank, "lengths")
    shared = Sizes(1, sizes.heads, sizes.width // sizes.heads, 33, getattr(torch, dtype), place, "tokens")
    for n in lengths:
        if any(row.n == n for row in rows):
            continue
        inputs, exact = make_inputs(n, shared, seed), None
        for name in methods:
            contender, number = find(name)
            call = contender.build(inputs, number, False)
            with torch.no_grad():
                found = call.forward().float()
            exact = exact or (found, call.leaves)
            if len(call.leaves) != len(exact[1]) or not all(map(torch.equal, call.leaves, exact[1])):
                raise ValueError(f"method {name!r} has weights of its own, so its hidden states are those of another.")
            error = float((found - exact[0]).norm() / exact[0].norm())
            note = "" if torch.tensor(error).isfinite() else "not finite"
            rows.append(replace(blank, method=name, value=error, n=n, m=number or None, note=note))
        append_rows(path, rows[-len(methods) :])
    return rows


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, required=True, help="file of the rows, .csv")
    parser.add_argument("--device", default="cuda")
    asked = parser.parse_args()
    if asked.device.startswith("cuda") and not torch.cuda.is_available():
        sys.exit("device is cuda, but there is no CUDA device.")
    there = {row.dtype for row in read_rows(asked.to)} if asked.to.exists() else set()
    for dtype in DTYPES:
        if dtype in there:
            continue
        rows = list(error_rows(device=asked.device, dtypes=(dtype,)))
        append_rows(asked.to, rows)
        for row in rows:
            print(f"{row.dtype:18} scale={row.facts['scale']:3} {row.method:17} {row.quantity:25} {row.value:.2e}")


if __name__ == "__main__":
    main()
