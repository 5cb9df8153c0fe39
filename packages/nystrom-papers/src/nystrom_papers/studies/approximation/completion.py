r"""Lemma 1 of Skyformer and eq. 4: which matrices of queries and keys are positive semi-definite.

With $X = (Q; K)$ the 2n queries and keys of a head and c the scale of the scores, these are measured for each head:

- "softmax kernel, Q": $\mathrm{SM}(Q, Q) = \exp(c\, Q Q^\top)$, Lemma 1;
- "softmax kernel, completed": $\mathrm{SM}(X, X)$, eq. 4 with that kernel;
- "Gaussian, completed": $\kappa(X, X)$, eq. 4 as Skyformer takes it;
- "Gaussian": the scores $C = \kappa(Q, K)$ themselves;
- "softmax": $S = D^{-1} \mathrm{SM}(Q, K)$;
- "softmax, completed": $D^{-1} \mathrm{SM}(X, X)$, the softmax matrix of all 2n tokens.

The last three are not symmetric: whether $x^\top M x \ge 0$ for every x is decided by their symmetric part. The first
three are positive semi-definite by $\mathrm{SM}(x, y) = e^{c \|x\|^2 / 2} \kappa(x, y)\, e^{c \|y\|^2 / 2}$ and
Bochner's theorem.

Measured is the smallest eigenvalue over the largest in absolute value, in float64. For a matrix of N rows its rounding
error is about $N \epsilon\, (1 + c \max \|x\|^2)$, since the exponents are rounded in proportion to the norms. Four
times that is the "rounding" of the rows. A value below minus the rounding shows that a matrix is not positive
semi-definite.

Inputs are real heads and synthetic ones: random tokens, every token twice, keys opposite to the queries, long tokens,
tokens in a small cluster, and tokens found by gradient descent on the smallest eigenvalue of each matrix.

Source: Chen et al. (2021), arXiv:2111.00035, Lemma 1 and eq. 4. The inline Gaussian of eq. 4 lacks the minus sign.
"""

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from nystrom.attention.fused import softmax_rows
from nystrom.kernels import gaussian_kernel, softmax_kernel
from nystrom_lab.measure.rows import Row
from nystrom_lab.report.plots.canvas import MARKERS, PAGE, figure_of
from nystrom_papers.studies.approximation.real_heads.recorded import LENGTH, WEIGHTS, LayerHeads, find_heads
from nystrom_papers.studies.reproduce.declared import Answer, Cells, Claim, Pivot, declare, each, select
from nystrom_papers.studies.reproduce.spread import spread_row
from nystrom_papers.studies.reproduce.study import Figures, Plan, Setting, part

LEMMA, COMPLETED, SOFTMAX, SCORES = "softmax kernel, Q", "Gaussian, completed", "softmax", "Gaussian"
LEAST, BELOW, ROUNDING = "least eigenvalue over the largest", "share below rounding", "rounding"
_TOKENS, _FINEST = 128, 1e-6
_DRAWN, _SEARCHED = ("random", "every token twice", "opposite keys", "long tokens", "small cluster"), "searched"
MADE = (*_DRAWN, _SEARCHED)
_Heads = Float[Tensor, "t n d"]


def matrices(q: _Heads, k: _Heads) -> dict[str, Float[Tensor, "t r r"]]:
    """The symmetric parts of the matrices of each head, by name."""
    x, scale = torch.cat([q, k], dim=1), q.shape[-1] ** -0.5
    products = {
        LEMMA: softmax_kernel(q, q, scale=scale),
        "softmax kernel, completed": softmax_kernel(x, x, scale=scale),
        COMPLETED: gaussian_kernel(x, x, scale=scale),
        SCORES: gaussian_kernel(q, k, scale=scale),
        SOFTMAX: softmax_rows(q[None], k[None])[0],
        "softmax, completed": softmax_rows(x[None], x[None])[0],
    }
    return {name: (matrix + matrix.mT) / 2 for name, matrix in products.items()}


def least_eigenvalue(matrix: Float[Tensor, "t r r"]) -> Float[Tensor, " t"]:
    """The smallest eigenvalue of each matrix over the largest in absolute value."""
    values = torch.linalg.eigvalsh(matrix)
    return values[:, 0] / values.abs().amax(dim=-1)


def _plan(setting: Setting) -> Plan:
    real, tokens = find_heads(setting, small_texts=1), LENGTH if setting.size == "paper" else _TOKENS

    def measured(heads: LayerHeads, folder: Path) -> Iterable[Row]:
        q, k = (x[:, :, :tokens].flatten(0, 1) for x in (heads.q, heads.k))
        return eigenvalue_rows(q, k, heads.weights, layer=heads.layer)

    made = [
        part(name.replace(" ", "-"), lambda name: eigenvalue_rows(*made_heads(name), name), name) for name in _DRAWN
    ]
    said = {"tokens": str(tokens), "made inputs": ", ".join(MADE)}
    plan = real.plan([*real.by_layer(measured), *made, part(_SEARCHED, _measure_searched)], (), **said)
    said = {name: words for name, words in plan.setting.items() if name != "landmarks"}
    return plan._replace(setting=said, differs="the paper proves it, and measures nothing of it")


def eigenvalue_rows(q: _Heads, k: _Heads, inputs: str, *, layer: int | None = None) -> Iterable[Row]:
    """Rows of the smallest eigenvalues of the matrices of some heads."""
    for name, matrix in matrices(q, k).items():
        yield from _rows_of(name, matrix, torch.cat([q, k], dim=1), inputs, layer)


def _rows_of(
    name: str, matrix: Float[Tensor, "t r r"], x: Float[Tensor, "t s d"], inputs: str, layer: int | None
) -> Iterable[Row]:
    least, n = least_eigenvalue(matrix), x.shape[1] // 2
    size = x.shape[-1] ** -0.5 * x.square().sum(-1).amax(-1)
    rounding = 4 * matrix.shape[-1] * torch.finfo(torch.float64).eps * (1 + size)
    facts = {"inputs": inputs, "layer": layer}
    yield spread_row(BELOW, name, (least < -rounding).double(), n=n, facts=facts, dtype="float64")
    for quantity, value in ((LEAST, least.min()), (ROUNDING, rounding.max())):
        yield Row(
            quantity=quantity, method=name, value=value.item(), n=n, facts=facts, dtype="float64", repeats=len(least)
        )


def made_heads(inputs: str) -> tuple[_Heads, _Heads]:
    """Queries and keys of one of the kinds of drawn input."""
    q, k = torch.randn(2, 8, 64, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return {
        "random": (q, k),
        "every token twice": (torch.cat([q[:, :32]] * 2, dim=1), torch.cat([k[:, :32]] * 2, dim=1)),
        "opposite keys": (q, -q),
        "long tokens": (3 * q, 3 * k),
        "small cluster": (1 + 1e-3 * q, 1 + 1e-3 * k),
    }[inputs]


def _measure_searched() -> Iterable[Row]:
    start = torch.randn(8, 32, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for which in matrices(start[:, :16], start[:, 16:]):
        x = searched(start, which)
        yield from _rows_of(which, matrices(x[:, :16], x[:, 16:])[which], x, _SEARCHED, None)


def searched(x: Float[Tensor, "t s d"], which: str, *, steps: int = 100) -> Float[Tensor, "t s d"]:
    """Queries and keys that Adam has moved towards a smaller least eigenvalue of a matrix."""
    x, half = x.clone().requires_grad_(), x.shape[1] // 2
    optimizer = torch.optim.Adam([x], lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        least_eigenvalue(matrices(x[:, :half], x[:, half:])[which]).sum().backward()
        optimizer.step()
    return x.detach()


def _semidefinite(method: str, rows: pd.DataFrame) -> Answer:
    least, below = (each(rows, quantity, method=method) for quantity in (LEAST, BELOW))
    coarse = max((row.value for row in each(rows, ROUNDING, method=method)), default=1.0)
    if missing := [kind for kind in (*WEIGHTS, *MADE) if kind not in {row.inputs for row in least}]:
        return None, f"not measured: {', '.join(missing)}."
    worst = min(least, key=lambda row: row.value)
    return False if any(row.value > 0 for row in below) else None if coarse > _FINEST else True, (
        f"the smallest eigenvalue over the largest is at least {worst.value:.1g} ({worst.inputs}), known to "
        f"{coarse:.1g} at worst."
    )


def _indefinite(rows: pd.DataFrame) -> Answer:
    real = {method: each(rows, BELOW, method=method, inputs=WEIGHTS) for method in (SOFTMAX, SCORES)}
    if not all(real.values()):
        return None, "real heads were not measured."
    shares = {
        method: sum(row.value * row.repeats for row in of) / sum(row.repeats for row in of)
        for method, of in real.items()
    }
    shown = " and ".join(f"{share:.0%} of the real heads ({method})" for method, share in shares.items())
    agrees = True if min(shares.values()) >= 0.75 else False if min(shares.values()) <= 0.25 else None
    return agrees, f"the symmetric part has an eigenvalue below 0 in {shown}."


def _figures(rows: pd.DataFrame, folder: Path) -> Figures:
    figure = figure_of(PAGE, 3.4)
    axes = figure.subplots()
    least: Any = select(rows, LEAST).pivot_table("value", "method", "inputs", aggfunc="min", sort=False)
    for place, (method, values) in enumerate(least.iterrows()):
        shift = (place - (len(least) - 1) / 2) * 0.11
        axes.plot([x + shift for x in range(len(values))], values, MARKERS[place], linestyle="", label=method)
    axes.axhline(0, color="0.6", linewidth=0.8)
    axes.set_yscale("symlog", linthresh=1e-12)
    axes.set_ylim(-3, 3)
    axes.set_yticks([sign * 10.0**power for sign in (-1, 1) for power in (0, -4, -8, -12)] + [0])
    axes.set_xticks(range(least.shape[1]), [str(kind).replace(" ", "\n", 1) for kind in least])
    axes.set_ylabel("smallest eigenvalue over the largest")
    axes.grid(True, axis="y")
    figure.legend(loc="outside lower center", ncols=3)
    return {"": figure}


STUDIES = {
    "skyformer-lemma-1": declare(
        shows="smallest eigenvalues of score matrices, and of their completion to queries and keys",
        source="Skyformer, arXiv:2111.00035, Lemma 1 and eq. 4",
        needs="an encoder: nystrom[real] or --model",
        paper_needs="--model with a trained BERT-base",
        minutes=0.1,
        plan=_plan,
        tables=[
            Pivot(
                title="smallest eigenvalue over the largest, the least of all heads",
                index={"inputs": "{inputs}"},
                columns=[
                    Cells("{method}", LEAST, "{value:.1g}", pick=min),
                    Cells("known to", ROUNDING, "{value:.1g}", pick=max),
                ],
            )
        ],
        claims=[
            Claim(
                "SM(Q, Q) of the softmax kernel is positive semi-definite.", partial(_semidefinite, LEMMA),
                "Skyformer, Lemma 1",
            ),
            Claim(
                "Gaussian scores completed to 2n rows are positive semi-definite.", partial(_semidefinite, COMPLETED),
                "Skyformer, eq. 4",
            ),
            Claim(
                "The softmax matrix and the Gaussian scores themselves are not positive semi-definite.", _indefinite,
                "Skyformer, section 4.2",
            ),
        ],
        figures=_figures,
    )
}  # fmt: skip
