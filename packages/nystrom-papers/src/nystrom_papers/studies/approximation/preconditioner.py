r"""Lemma 3 of Skyformer, as printed and in its sharp form: the singular values of the scaled landmark matrix.

With M the Gaussian kernel matrix of m landmarks, $\gamma > 0$ and $D = \mathrm{diag}((M + \gamma I) \mathbf 1)$,
$$N = D^{-1/2} (M + \gamma I) D^{-1/2}.$$
N is symmetric and positive definite. It is similar to $D^{-1} (M + \gamma I)$, whose entries are positive and whose
rows sum to 1. By Perron's theorem its largest eigenvalue is therefore 1, with multiplicity 1 and the eigenvector
$D^{1/2} \mathbf 1$. Since $M \succeq 0$, its smallest eigenvalue is at least $\gamma / \max D$. So the singular values
are in (0, 1], the largest is always 1, and $\|I - N\| = 1 - \sigma_{\min} < 1$: the conclusion of the lemma holds,
though "within (0, 1)" does not.

The landmarks are those of real heads, and synthetic ones: random landmarks; each landmark twice, as happens when they
are drawn with replacement; and landmarks in a small cluster. The factor $1 / m$ of Definition 1 has the same effect as
the ridge $m \gamma$. All is in float64. N has no negative entry and norm 1, so rounding moves its singular values by a
few $\epsilon$, and computing them adds at most $4 m \epsilon$. "Rounding" in the rules is $4 m \epsilon$.

Source: Chen et al. (2021), arXiv:2111.00035, section 4.4, Lemma 3, which is proved and not measured.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from nystrom.attention.methods.skyformer import kernel_of_landmarks, mixed_landmarks
from nystrom.landmarks import draw
from nystrom_lab.measure.rows import Row
from nystrom_papers.studies.approximation.real_heads.recorded import WEIGHTS, LayerHeads, RealHeads, find_heads
from nystrom_papers.studies.reproduce.declared import Answer, Cells, Claim, Lines, NotMeasured, Pivot, declare, each
from nystrom_papers.studies.reproduce.encoders import Weights
from nystrom_papers.studies.reproduce.spread import spread_row
from nystrom_papers.studies.reproduce.study import Plan, Setting, part

_NUMBERS, _RIDGES = (16, 64, 256), (0.1, 1e-3, 1e-6)
_MADE = ("random", "each twice", "small cluster")
LARGEST, SMALLEST, BOUND, NORM = "largest less 1", "smallest singular value", "bound on the smallest", "1 - |I - N|"
_LEAST, _MOST = "least of ", "most of "
_RATIO = _LEAST + SMALLEST + " over the bound"


def scaled(kernel: Float[Tensor, "t m m"], gamma: float) -> tuple[Float[Tensor, "t m m"], Float[Tensor, "t m"]]:
    """N of each landmark matrix, and the diagonal of D."""
    ridged = kernel + gamma * torch.eye(kernel.shape[-1], dtype=kernel.dtype)
    d = ridged.sum(dim=-1)
    return ridged / (d[:, :, None] * d[:, None, :]).sqrt(), d


def _plan(setting: Setting) -> Plan:
    real = find_heads(setting, small_texts=1)
    parts = [
        *(part(weights, _measure_real, real, weights) for weights in WEIGHTS),
        *(part(name.replace(" ", "-"), _measure_made, name) for name in _MADE),
    ]
    plan = real.plan(parts, _NUMBERS, ridges=" ".join(map(str, _RIDGES)), made=", ".join(_MADE))
    return plan._replace(differs="the paper proves it, and measures nothing of it")


def _measure_real(real: RealHeads, weights: Weights) -> Iterable[Row]:
    layers = real.layers(weights)
    for m in _NUMBERS:
        yield from singular_rows(landmark_kernels(layers, m), weights)


def landmark_kernels(layers: Sequence[LayerHeads], m: int) -> Float[Tensor, "t m m"]:
    """Gaussian kernel matrices of the landmarks of all heads of some layers, half of them queries and half keys."""
    draws = draw(m, None, torch.device("cpu"))
    return torch.cat([
        kernel_of_landmarks(
            mixed_landmarks(each.q, each.k, None, None, draws), "gaussian", each.q.shape[-1] ** -0.5
        ).flatten(0, 1)
        for each in layers
    ])  # fmt: skip


def _measure_made(name: str) -> Iterable[Row]:
    for m in _NUMBERS:
        x = torch.randn(8, 1, m, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        landmarks = {"random": x, "each twice": torch.cat([x[:, :, : m // 2]] * 2, dim=2), "small cluster": 1e-3 * x}
        yield from singular_rows(kernel_of_landmarks(landmarks[name], "gaussian", 32**-0.5)[:, 0], name)


def singular_rows(kernels: Float[Tensor, "t m m"], landmarks: str) -> Iterable[Row]:
    """Rows of the singular values of N over all matrices: their medians, and the extremes that decide."""
    m = kernels.shape[-1]
    for gamma in _RIDGES:
        n, d = scaled(kernels, gamma)
        values = torch.linalg.svdvals(n)
        norm = torch.linalg.matrix_norm(torch.eye(m, dtype=n.dtype) - n, ord=2)
        quantities = {LARGEST: values[:, 0] - 1, SMALLEST: values[:, -1], BOUND: gamma / d.amax(-1), NORM: 1 - norm}
        facts = {"landmarks": landmarks, "ridge": gamma}
        for quantity, of in quantities.items():
            for name, value in (("", of), (_LEAST, of.min()[None]), (_MOST, of.max()[None])):
                yield spread_row(name + quantity, "N", value, m=m, facts=facts, dtype="float64", median=True)
        ratio = (values[:, -1] / quantities[BOUND]).min()[None]
        yield spread_row(_RATIO, "N", ratio, m=m, facts=facts, dtype="float64")


def _rounding(row: Any) -> float:
    return 4 * row.m * torch.finfo(torch.float64).eps


def _largest(rows: pd.DataFrame) -> str:
    off = max(abs(row.value) for row in each(rows, (_LEAST + LARGEST, _MOST + LARGEST)))
    return f"the largest is within {off:.1g} of 1, and the smallest is"


def _all(rows: pd.DataFrame, *quantities: str) -> list[list[Any]]:
    groups = [each(rows, quantity) for quantity in quantities]
    if not all(groups):
        raise NotMeasured("some rows are missing.")
    return groups


def _as_printed(rows: pd.DataFrame) -> Answer:
    high, smallest = _all(rows, _MOST + LARGEST, _LEAST + SMALLEST)
    touched = any(row.value >= -_rounding(row) for row in high)
    positive = all(row.value > _rounding(row) for row in smallest)
    least = min(row.value for row in smallest)
    return False if touched else True if positive else None, f"{_largest(rows)} {least:.2g}."


def _sharp(rows: pd.DataFrame) -> Answer:
    ratios, bounds, low, high = _all(rows, _RATIO, _LEAST + BOUND, _LEAST + LARGEST, _MOST + LARGEST)
    is_one = all(abs(row.value) <= _rounding(row) for row in (*low, *high))
    bounded = all(r.value >= 1 - _rounding(b) / b.value for r, b in zip(ratios, bounds, strict=True))
    known = all(row.value > _rounding(row) for row in bounds)
    return False if not (is_one and bounded) else True if known else None, (
        f"{_largest(rows)} at least {min(row.value for row in ratios):.3g} times the bound."
    )


def _norm(rows: pd.DataFrame) -> Answer:
    (norms,) = _all(rows, _LEAST + NORM)
    above, beyond = (all(row.value > sign * _rounding(row) for row in norms) for sign in (1, -1))
    return True if above else None if beyond else False, (
        f"1 less the norm is at least {min(row.value for row in norms):.2g}."
    )


_LEMMA = "Skyformer, Lemma 3"
STUDIES = {
    "skyformer-lemma-3": declare(
        shows="singular values of the scaled landmark matrix, beside the lemma's sharp form",
        source="Skyformer, arXiv:2111.00035, Lemma 3",
        needs="an encoder: nystrom[real] or --model",
        paper_needs="--model with a trained BERT-base",
        minutes=0.1,
        plan=_plan,
        tables=[
            Pivot(
                title="singular values of N: the worst of all heads",
                index={"landmarks": "{landmarks}", "ridge": "{ridge}"}, left=1,
                columns=[
                    Cells(
                        "largest off 1", (_LEAST + LARGEST, _MOST + LARGEST), "{value:.1g}",
                        pick=lambda values: max(map(abs, values)),
                    ),
                    Cells("smallest, m={m}", _LEAST + SMALLEST, "{value:.2g}"),
                    Cells("over its bound", _RATIO, pick=min),
                ],
            )
        ],
        claims=[
            Claim("All singular values are within (0, 1).", _as_printed, _LEMMA),
            Claim(
                "The largest singular value is 1, and the smallest at least the ridge over the largest row sum.", _sharp
            ),
            Claim("The norm of I - N is below 1.", _norm, _LEMMA),
        ],
        figures={
            "": Lines(
                of={"quantity": (SMALLEST, BOUND)}, over="m", panel="landmarks: {landmarks}",
                line="{quantity}, ridge {ridge}", x_label="landmarks m", y_label="singular value",
                band="quartiles over heads", options={"limits": (1e-9, 2.0), "line": "medians"},
            )
        },
    )
}  # fmt: skip
