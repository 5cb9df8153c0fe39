r"""Inverses of landmark matrices by products and by solvers: time, error, and the rounding of the gradient.

Ways to invert a matrix A of m landmarks, in float32:

- "iterations": six of `nystrom.linalg.pinv`, each of four products; and "24 iterations";
- "svd": `torch.linalg.pinv`; "solve": `torch.linalg.solve` (LU); "cholesky": `torch.cholesky_inverse`;
- "conjugate gradient": 24 steps for all columns of I, each of one product, so as many products as six iterations.

The last two need a symmetric positive definite A. The matrices are

- "softmax": the softmax matrix of the segment means (Nyströmformer's), of pretrained heads of three layers, or of all
  layers at the size "paper";
- "N": Skyformer's N with $\gamma = 0.1$ (`nystrom_papers.studies.approximation.preconditioner`), of the same heads;
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

Source: Chen et al. (2021), arXiv:2111.00035, section 4.4; Xiong et al. (2021), arXiv:2102.03902, section 3.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from nystrom.linalg.pinv import pinv_iterative
from nystrom_lab.measure.rows import Row
from nystrom_lab.report.table import Table
from nystrom_papers.studies.approximation.convergence import landmark_matrix, true_inverse
from nystrom_papers.studies.approximation.preconditioner import landmark_kernels, scaled
from nystrom_papers.studies.approximation.real_heads.recorded import RealHeads, find_heads
from nystrom_papers.studies.fidelity.beside_exact import time_calls
from nystrom_papers.studies.matrices.spectra import condition_number
from nystrom_papers.studies.reproduce.declared import Answer, Cells, Claim, Lines, Pivot, declare, each, select
from nystrom_papers.studies.reproduce.spread import spread_row
from nystrom_papers.studies.reproduce.study import Plan, Setting, part

_NUMBERS, _CONDITIONS, _TURNS, _BATCH, _LOST = (16, 32, 64, 128, 256), (1, 2, 3, 4, 5, 6), 15, 8, 1e30
ERROR, GRADIENT, CONDITION = "error of the inverse", "rounding of the gradient", "condition number"
TIME, RATIO = "time of a batch of 8", "time over that of iterations"
_Square = Float[Tensor, "t m m"]


def conjugate_gradient(a: _Square, *, steps: int = 24) -> _Square:
    """Invert symmetric positive definite matrices by conjugate gradients, for all columns of I at once."""
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
        *(part(f"errors-m={m}", _measure_real, real, m) for m in _NUMBERS),
        part("errors-made", _measure_made),
        *(part(f"times-m={m}", _measure_times, m) for m in _NUMBERS),
    ]
    plan = real.plan(parts, _NUMBERS, conditions=" ".join(f"1e{power}" for power in _CONDITIONS))
    return plan._replace(differs="the papers say this of their GPU and print no numbers; training is not measured")


def _measure_real(real: RealHeads, m: int) -> Iterable[Row]:
    last = real.encoder.layers - 1
    layers = real.layers("pretrained", None if real.size == "paper" else dict.fromkeys((0, last // 2, last)))
    softmax = torch.cat([landmark_matrix(each, m).flatten(0, 1) for each in layers])
    n, _ = scaled(landmark_kernels(layers, m), 0.1)
    for name, matrix, methods in (("softmax", softmax, _GENERAL), ("N", n, tuple(METHODS))):
        yield from error_rows(matrix, methods, {"matrix": name})


def _measure_made() -> Iterable[Row]:
    for power in _CONDITIONS:
        yield from error_rows(made_matrix(64, power), tuple(METHODS), {"matrix": "made", "condition": power})


def _places() -> dict[str, torch.device]:
    cuda = {"GPU": torch.device("cuda")} if torch.cuda.is_available() else {}
    return {"CPU": torch.device("cpu")} | cuda


def error_rows(matrix: _Square, methods: Sequence[str], facts: Mapping[str, object]) -> Iterable[Row]:
    """Rows of the errors of float32 inverses, and of the rounding of their gradients, on every available device."""
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


def _measure_times(m: int) -> Iterable[Row]:
    a = made_matrix(m, 2).float()
    for where, device in _places().items():
        calls = {name: partial(invert, a.to(device)) for name, invert in METHODS.items()}
        yield from time_calls(
            calls, _TURNS, beside="iterations", quantities=(TIME, RATIO), device=device, m=m, facts={"where": where}
        )


def _tables(rows: pd.DataFrame) -> list[Table]:
    tables = []
    for where in [where for where in rows["where"].unique() if where]:
        both = select(rows, TIME, where=where).merge(
            select(rows, RATIO, where=where), on=["method", "m"], suffixes=("", "_ratio")
        )
        tables += Pivot(
            title=f"time of a batch of 8 on the {where} in ms (ratio to iterations), medians",
            index={"inverse": "{method}"},
            columns=[Cells("m={m}", TIME, "{value:.3g} ({value_ratio:.2f})")],
            names={"method": tuple(METHODS)},
        ).tables(both)
        for matrix, quantity in product(("softmax", "N", "made"), (ERROR, GRADIENT)):
            conditions = select(rows, CONDITION, matrix=() if matrix == "made" else matrix)
            last = conditions.assign(quantity=quantity, where=where, method=" condition number")
            head = "κ=1e{condition}" if matrix == "made" else "m={m}"
            tables += Pivot(
                title=f"{quantity}, {matrix}, {where}: medians",
                index={"inverse": "{method}"},
                columns=[Cells(head, quantity, "{value:.1g}", matrix=matrix, where=where)],
            ).tables(pd.concat([rows, last]))
    return tables


def _over(rows: pd.DataFrame, quantity: str, ours: Mapping[str, Any], other: Mapping[str, Any]) -> dict[int, float]:
    """Ratios of medians, by m."""
    above, below = ({row.m: row.value for row in each(rows, quantity, **which)} for which in (ours, other))
    return {m: value / below[m] for m, value in above.items() if m in below}


def _shown(ratios: Mapping[int, float]) -> str:
    return ", ".join(f"{ratio:.2g} (m = {m})" for m, ratio in ratios.items())


def _slower(rows: pd.DataFrame) -> Answer:
    ratios = _over(rows, TIME, *({"method": "solve", "where": where} for where in ("GPU", "CPU")))
    if not ratios:
        return None, "there was no GPU."
    agrees = True if min(ratios.values()) >= 2 else False if max(ratios.values()) < 1 else None
    return agrees, f"its time relative to that on the CPU is {_shown(ratios)}."


def _less_stable(rows: pd.DataFrame) -> Answer:
    ratios = _over(rows, ERROR, *({"method": "solve", "matrix": "N", "where": where} for where in ("GPU", "CPU")))
    if not ratios:
        return None, "there was no GPU."
    agrees = True if max(ratios.values()) > 2 else False if max(ratios.values()) <= 1.1 else None
    return agrees, f"its error on N relative to that on the CPU is {_shown(ratios)}."


def _faster(where: str, rows: pd.DataFrame) -> Answer:
    ratios = each(rows, RATIO, where=where, method="svd")
    if not ratios:
        return None, f"there was no {where}."
    agrees = True if all(row.low > 1 for row in ratios) else False if any(row.high < 1 for row in ratios) else None
    return agrees, f"the time of svd relative to theirs is {_shown({row.m: row.value for row in ratios})}."


def _division(method: str, rows: pd.DataFrame) -> Answer:
    ours, theirs = ({"method": name, "where": "CPU", "matrix": "N"} for name in (method, "iterations"))
    ratios = _over(rows, GRADIENT, ours, theirs)
    if not ratios:
        return None, "not measured."
    worse = sum(ratio > 2 for ratio in ratios.values())
    agrees = False if not worse else True if 2 * worse > len(ratios) else None
    return agrees, f"on N, its rounding relative to that of six iterations is {_shown(ratios)}."


_CHEN, _XIONG = "Skyformer, section 4.4", "Nyströmformer, section 3"
_FASTER = "Iterations are faster than a singular value decomposition on the {}.".format
_DISTURBS = "Rounding disturbs the gradient of {} more than that of iterations.".format
_SHOWN = partial(Lines, names={"method": tuple(METHODS)}, options={"limits": (3e-8, 10), "line": "medians"})
STUDIES = {
    "inversion": declare(
        shows="inverses by iterations beside solvers: time, error, and error of the gradient",
        source="Skyformer, arXiv:2111.00035, section 4.4; Nyströmformer, arXiv:2102.03902, section 3",
        needs="an encoder: nystrom[real] or --model",
        paper_needs="--model with a trained BERT-base, and a GPU",
        minutes=1.3,
        plan=_plan,
        tables=[_tables],
        claims=[
            Claim("A solver is much slower on the GPU than on the CPU.", _slower, _CHEN),
            Claim("A solver is numerically less stable on the GPU than on the CPU.", _less_stable, _CHEN),
            Claim(_FASTER("GPU"), partial(_faster, "GPU"), _XIONG),
            Claim(_DISTURBS("conjugate gradient"), partial(_division, "conjugate gradient"), _CHEN),
            Claim(_FASTER("CPU"), partial(_faster, "CPU")),
            Claim(_DISTURBS("solve"), partial(_division, "solve")),
        ],
        figures={
            "": _SHOWN(
                of={"quantity": (ERROR, GRADIENT), "matrix": ("softmax", "N"), "where": "CPU"}, over="m",
                panel="{quantity}, {matrix}", x_label="landmarks m", y_label="relative error",
                band="quartiles over heads",
            ),
            "made": _SHOWN(
                of={"quantity": (ERROR, GRADIENT), "matrix": "made", "where": "CPU"}, over="condition",
                panel="{quantity}", x_label="logarithm of the condition number", y_label="relative error",
                band="quartiles of 8 matrices", options={"limits": (3e-8, 10), "line": "medians", "log_x": False},
            ),
            "time": _SHOWN(
                of={"quantity": TIME}, over="m", panel="batch of 8, {where}", x_label="landmarks m",
                y_label="time, ms", band="quartiles over turns", options={"line": "medians"},
            ),
        },
    )
}  # fmt: skip
