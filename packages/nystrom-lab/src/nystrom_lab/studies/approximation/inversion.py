r"""Inverses of landmark matrices by products and by solvers: time, error, and the rounding of the gradient.

Ways to invert a matrix A of m landmarks, in float32:

- "iterations": six of `nystrom.linalg.pinv`, each of four products; and "24 iterations";
- "svd": `torch.linalg.pinv`; "solve": `torch.linalg.solve` (LU); "cholesky": `torch.cholesky_inverse`;
- "conjugate gradient": 24 steps for all columns of I, each of one product, so as many products as six iterations.

The last two need a symmetric positive definite A. The matrices are

- "softmax": the softmax matrix of the segment means (Nyströmformer's), of pretrained heads of three layers, or of all
  layers at the size "paper";
- "N": Skyformer's N with $\gamma = 0.1$ (`nystrom_lab.studies.approximation.preconditioner`), of the same heads;
- "made": synthetic symmetric matrices of 64 rows, whose eigenvalues are evenly spaced on a logarithmic scale from 1 to
  $1 / \kappa$.

The error of an inverse Z is relative, in the Frobenius norm, to the float64 inverse (numpy) of the matrix that was
rounded to float32. Six iterations are not meant to reach that inverse. Numerical stability is a matter of rounding, so
it is measured apart: take the gradient of $\langle G, Z \rangle$ for a random G, and its distance from the gradient of
the same method in float64, relative to the latter. For a symmetric matrix this is the symmetric part of the gradient,
since landmarks move A in no other direction. A result that is not finite, or a batch that a solver refuses, counts as
$10^{30}$. Rows are medians and quartiles over heads, or over eight synthetic matrices.

Times are of a batch of eight synthetic matrices of m rows with condition number 100. They are timed in turns, and
each ratio to "iterations" is taken within a turn; rows are medians and quartiles over turns. All is measured on the
CPU, and on the GPU where there is one.

Claims, and the rule that decides each:

- "The matrix inversion on GPU is much slower [...] than the same operation on CPU" (Skyformer): at every m, solve takes
  at least twice the time on the GPU. It is refuted if solve takes less time there at every m.
- It is "numerically less stable" there: at some m, the median error of solve on N is more than twice that on the CPU.
  It is refuted if at no m it is above that on the CPU by more than a tenth.
- "SVD is not very efficient on GPUs", iterations accelerate (Nyströmformer): on the GPU, the quartiles of the ratio of
  svd are above 1 at every m. It is refuted if at some m both are below 1. The same for the CPU is this library's claim.
- Division-based methods, "such as the conjugate gradient method", are less stable (Skyformer, of training, which is not
  measured here): on the CPU, the median rounding of the gradient on N is more than twice that of six iterations at more
  than half of the m. It is refuted if this is so at no m. The same for solve is this library's claim.

Source: Chen et al. (2021), arXiv:2111.00035, section 4.4; Xiong et al. (2021), arXiv:2102.03902, section 3.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from nystrom.clock import seconds
from nystrom.linalg.pinv import pinv_iterative
from nystrom.turns import in_turns
from nystrom_lab.measure.rows import Row, cpu_name
from nystrom_lab.measure.timing import timed_rows
from nystrom_lab.report.plots.bands import draw_bands
from nystrom_lab.report.summary import Verdict
from nystrom_lab.report.table import Table
from nystrom_lab.studies.approximation.convergence import landmark_matrix, true_inverse
from nystrom_lab.studies.approximation.preconditioner import landmark_kernels, scaled
from nystrom_lab.studies.approximation.real_heads.recorded import RealHeads, find_heads
from nystrom_lab.studies.approximation.real_heads.selection import rows_of
from nystrom_lab.studies.matrices.spectra import condition_number
from nystrom_lab.studies.reproduce.spread import spread_row
from nystrom_lab.studies.reproduce.study import Part, Plan, Setting, Study

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NUMBERS, _CONDITIONS, _TURNS, _BATCH, _LOST = (16, 32, 64, 128, 256), (1, 2, 3, 4, 5, 6), 15, 8, 1e30
ERROR, GRADIENT, CONDITION = "error of the inverse", "rounding of the gradient", "condition number"
TIME, RATIO = "time of a batch of 8", "time over that of iterations"
_Square = Float[Tensor, "t m m"]


def conjugate_gradient(a: _Square, *, steps: int = 24) -> _Square:
    """Invert symmetric positive definite matrices by conjugate gradients, for all columns of I at once.

    Args:
        a: The matrices.
        steps: How many, each of one product.
    """
    r = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device).expand_as(a)
    x, p, square = torch.zeros_like(a), r, r.square().sum(dim=-2, keepdim=True)
    for _ in range(steps):
        ap = a @ p
        # A column that has converged would divide 0 by 0.
        step = square / (p * ap).sum(dim=-2, keepdim=True).clamp(min=torch.finfo(a.dtype).tiny)
        x, r = x + step * p, r - step * ap
        before, square = square, r.square().sum(dim=-2, keepdim=True)
        p = r + square / before.clamp(min=torch.finfo(a.dtype).tiny) * p
    return x


def _solve(a: _Square) -> _Square:
    return torch.linalg.solve_ex(a, torch.eye(a.shape[-1], dtype=a.dtype, device=a.device).expand_as(a))[0]


METHODS: dict[str, Callable[[Tensor], Tensor]] = {
    "iterations": pinv_iterative,
    "24 iterations": partial(pinv_iterative, steps=24),
    "svd": torch.linalg.pinv,
    "solve": _solve,
    "cholesky": lambda a: torch.cholesky_inverse(torch.linalg.cholesky_ex(a)[0]),
    "conjugate gradient": conjugate_gradient,
}
_GENERAL = ("iterations", "24 iterations", "svd", "solve")


def made_matrix(m: int, power: int) -> _Square:
    """Symmetric matrices with condition number 10^power, in float64."""
    draws = torch.randn(_BATCH, m, m, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    basis = torch.linalg.qr(draws).Q
    return (basis * torch.logspace(0, -power, m, dtype=torch.float64)) @ basis.mT


def _plan(setting: Setting) -> Plan:
    real = find_heads(setting, small_texts=1)
    parts = [
        *(Part(f"errors-m={m}", partial(_measure_real, real, m)) for m in _NUMBERS),
        Part("errors-made", _measure_made),
        *(Part(f"times-m={m}", partial(_measure_times, m)) for m in _NUMBERS),
    ]
    plan = real.plan(parts, _NUMBERS, conditions=" ".join(f"1e{power}" for power in _CONDITIONS))
    return plan._replace(differs="the papers say this of their GPU and print no numbers; training is not measured")


def _measure_real(real: RealHeads, m: int, folder: Path) -> Iterable[Row]:
    last = real.encoder.layers - 1
    layers = real.layers("pretrained", None if real.size == "paper" else dict.fromkeys((0, last // 2, last)))
    softmax = torch.cat([landmark_matrix(each, m).flatten(0, 1) for each in layers])
    n, _ = scaled(landmark_kernels(layers, m), 0.1)
    for name, matrix, methods in (("softmax", softmax, _GENERAL), ("N", n, tuple(METHODS))):
        yield from error_rows(matrix, methods, {"matrix": name})


def _measure_made(folder: Path) -> Iterable[Row]:
    for power in _CONDITIONS:
        yield from error_rows(made_matrix(64, power), tuple(METHODS), {"matrix": "made", "condition": power})


def _places() -> dict[str, torch.device]:
    cuda = {"GPU": torch.device("cuda")} if torch.cuda.is_available() else {}
    return {"CPU": torch.device("cpu")} | cuda


def error_rows(matrix: _Square, methods: Sequence[str], facts: Mapping[str, object]) -> Iterable[Row]:
    """Rows of the errors of float32 inverses, and of the rounding of their gradients, on every available device.

    Args:
        matrix: The matrices, in float64.
        methods: Names of `METHODS`.
        facts: What the rows say of them.
    """
    m, a = matrix.shape[-1], matrix.float()
    weights = torch.randn(a.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    inverse, condition = true_inverse(a), condition_number(torch.linalg.svdvals(a.double()))
    yield spread_row(CONDITION, "", condition, m=m, facts=facts, dtype="float64", median=True)
    for method in methods:
        _, exact = _with_gradient(method, a.double(), weights)
        for where, device in _places().items():
            z, gradient = _with_gradient(method, a.to(device), weights)
            for quantity, ours, true in ((ERROR, z, inverse), (GRADIENT, gradient, exact)):
                error = torch.linalg.matrix_norm(ours.cpu().double() - true) / torch.linalg.matrix_norm(true)
                error = error.nan_to_num(nan=_LOST, posinf=_LOST).clamp(max=_LOST)
                yield spread_row(quantity, method, error, m=m, facts={**facts, "where": where}, median=True)


def _with_gradient(method: str, a: _Square, weights: _Square) -> tuple[_Square, _Square]:
    """Inverses, and the gradient of their inner product with weights."""
    x = a.clone().requires_grad_()
    try:
        z = METHODS[method](x)
        (gradient,) = torch.autograd.grad((z * weights.to(z)).sum(), x)
    except torch.linalg.LinAlgError:  # pyright: ignore[reportPrivateImportUsage] (raised for the whole batch)
        z = gradient = torch.full_like(a, torch.nan)
    return z.detach(), (gradient + gradient.mT) / 2 if torch.equal(a, a.mT) else gradient


def _measure_times(m: int, folder: Path) -> Iterable[Row]:
    a = made_matrix(m, 2).float()
    for where, device in _places().items():
        x = a.to(device)
        taken = in_turns({name: partial(seconds, partial(f, x), device) for name, f in METHODS.items()}, _TURNS)
        name = torch.cuda.get_device_name() if where == "GPU" else cpu_name()
        for method, each in taken.items():
            yield from timed_rows(
                method, each, taken["iterations"], (TIME, RATIO), m=m, facts={"where": where}, device=name
            )


def _tables(rows: Sequence[Row]) -> Sequence[Table]:
    tables = []
    for where in dict.fromkeys(row.fact("where") for row in rows if row.fact("where")):
        lines = []
        for method in METHODS:
            times, ratios = ([r for r in rows_of(rows, q, where=where) if r.method == method] for q in (TIME, RATIO))
            cells = [f"{t.value:.3g} ({r.value:.2f})" for t, r in zip(times, ratios, strict=True)]
            lines.append([method, *cells])
        heads = ["inverse", *(f"m={m}" for m in dict.fromkeys(row.m for row in rows_of(rows, TIME)))]
        tables.append(Table(f"time of a batch of 8 on the {where} in ms (ratio to iterations), medians", heads, lines))
        for matrix, quantity in ((x, y) for x in ("softmax", "N", "made") for y in (ERROR, GRADIENT)):
            those = rows_of(rows, quantity, matrix=matrix, where=where)
            conditions = rows_of(rows, CONDITION, matrix=matrix)
            heads = [f"m={row.m}" if matrix != "made" else f"κ=1e{row.fact('condition')}" for row in conditions]
            lines = [
                [method, *(f"{row.value:.1g}" for row in those if row.method == method)]
                for method in dict.fromkeys(row.method for row in those)
            ]
            if matrix != "made":
                lines.append([" condition number", *(f"{row.value:.1g}" for row in conditions)])
            tables.append(Table(f"{quantity}, {matrix}, {where}: medians", ["inverse", *heads], lines))
    return tables


def _medians(rows: Sequence[Row], quantity: str, method: str, **facts: str) -> dict[int | None, float]:
    return {row.m: row.value for row in rows_of(rows, quantity, **facts) if row.method == method}


def _verdicts(rows: Sequence[Row]) -> Sequence[Verdict]:
    papers = [_slower(rows), _less_stable(rows), _faster(rows, "GPU"), _division(rows, "conjugate gradient")]
    ours = [_faster(rows, "CPU"), _division(rows, "solve")]
    return [*papers, *(verdict._replace(ours=True) for verdict in ours)]


def _over(ours: Mapping[int | None, float], other: Mapping[int | None, float]) -> dict[int | None, float]:
    return {m: value / other[m] for m, value in ours.items() if m in other}


def _said(ratios: Mapping[int | None, float]) -> str:
    return ", ".join(f"{ratio:.2g} (m = {m})" for m, ratio in ratios.items())


def _slower(rows: Sequence[Row]) -> Verdict:
    claim = "A solver is much slower on the GPU than on the CPU."
    ratios = _over(*(_medians(rows, TIME, "solve", where=where) for where in ("GPU", "CPU")))
    if not ratios:
        return Verdict(claim, None, "there was no GPU.")
    agrees = True if min(ratios.values()) >= 2 else False if max(ratios.values()) < 1 else None
    return Verdict(claim, agrees, f"its time relative to that on the CPU is {_said(ratios)}.")


def _less_stable(rows: Sequence[Row]) -> Verdict:
    claim = "A solver is numerically less stable on the GPU than on the CPU."
    ratios = _over(*(_medians(rows, ERROR, "solve", where=where, matrix="N") for where in ("GPU", "CPU")))
    if not ratios:
        return Verdict(claim, None, "there was no GPU.")
    agrees = True if max(ratios.values()) > 2 else False if max(ratios.values()) <= 1.1 else None
    return Verdict(claim, agrees, f"its error on N relative to that on the CPU is {_said(ratios)}.")


def _faster(rows: Sequence[Row], where: str) -> Verdict:
    claim = f"Iterations are faster than a singular value decomposition on the {where}."
    ratios = [row for row in rows_of(rows, RATIO, where=where) if row.method == "svd"]
    if not ratios:
        return Verdict(claim, None, f"there was no {where}.")
    ends = [(row.low if row.low is not None else row.value, row.high or row.value) for row in ratios]
    agrees = True if all(low > 1 for low, _ in ends) else False if any(high < 1 for _, high in ends) else None
    return Verdict(claim, agrees, f"the time of svd relative to theirs is {_said({r.m: r.value for r in ratios})}.")


def _division(rows: Sequence[Row], method: str) -> Verdict:
    claim = f"Rounding disturbs the gradient of {method} more than that of iterations."
    ratios = _over(*(_medians(rows, GRADIENT, each, where="CPU", matrix="N") for each in (method, "iterations")))
    if not ratios:
        return Verdict(claim, None, "not measured.")
    worse = sum(ratio > 2 for ratio in ratios.values())
    agrees = False if not worse else True if 2 * worse > len(ratios) else None
    return Verdict(claim, agrees, f"on N, its rounding relative to that of six iterations is {_said(ratios)}.")


def _figures(rows: Sequence[Row], folder: Path) -> "Mapping[str, Figure]":
    looks = {method: (place, False) for place, method in enumerate(METHODS)}

    def lines(quantity: str, **facts: str) -> dict[str, list[Row]]:
        return {m: [row for row in rows_of(rows, quantity, **facts) if row.method == m] for m in METHODS}

    errors = {
        f"{q}, {matrix}": lines(q, matrix=matrix, where="CPU") for matrix in ("softmax", "N") for q in (ERROR, GRADIENT)
    }
    places = dict.fromkeys(row.fact("where") for row in rows_of(rows, TIME))
    drawn = partial(draw_bands, over=lambda row: row.m, looks=looks, x_label="landmarks m", log_x=True)
    made = {q: lines(q, matrix="made", where="CPU") for q in (ERROR, GRADIENT)}
    return {
        "": drawn(errors, band="quartiles over heads", y_label="relative error", limits=(3e-8, 10)),
        "made": draw_bands(
            made, over=lambda row: 10.0 ** int(row.fact("condition")), looks=looks, band="quartiles of 8 matrices",
            x_label="condition number", y_label="relative error", limits=(3e-8, 10), log_x=True,
        ),
        "time": drawn(
            {f"batch of 8, {where}": lines(TIME, where=where) for where in places},
            band="quartiles over turns", y_label="time, ms", limits=(1e-2, 1e4), columns=len(places),
        ),
    }  # fmt: skip


STUDIES = {
    "inversion": Study(
        shows="inverses by iterations beside solvers: time, error, and error of the gradient",
        source="Skyformer, arXiv:2111.00035, section 4.4; Nyströmformer, arXiv:2102.03902, section 3",
        needs="an encoder: nystrom[real] or --model",
        paper_needs="--model with a trained BERT-base, and a GPU",
        minutes=1.3,
        plan=_plan,
        tables=_tables,
        verdicts=_verdicts,
        figures=_figures,
    )
}
