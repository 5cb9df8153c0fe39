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
few $\epsilon$, and computing them adds at most $4 m \epsilon$. "Rounding" below is $4 m \epsilon$.

Claims, and the rule that decides each:

- Lemma 3 as printed, "all the singular values are within (0, 1)": in every matrix, the largest is below 1 by more than
  rounding, and the smallest is above rounding. It is refuted if a matrix has one within rounding of 1, or above it.
- Its sharp form, this library's: in every matrix, the largest is within rounding of 1, and the smallest is at least
  $\gamma / \max D$. It is undecided where that bound is below rounding.
- "which implies that $\|I - N\| < 1$": in every matrix, 1 less the norm is above rounding. It is undecided where it is
  within rounding of 0.

Source: Chen et al. (2021), arXiv:2111.00035, section 4.4, Lemma 3, which is proved and not measured.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from nystrom.attention.methods.skyformer import kernel_of_landmarks, mixed_landmarks
from nystrom.landmarks import draw
from nystrom_lab.measure.rows import Row
from nystrom_lab.report.plots.bands import draw_bands
from nystrom_lab.report.summary import Verdict
from nystrom_lab.report.table import Table
from nystrom_lab.studies.approximation.real_heads.recorded import WEIGHTS, LayerHeads, RealHeads, find_heads
from nystrom_lab.studies.approximation.real_heads.selection import rows_of
from nystrom_lab.studies.reproduce.encoders import Weights
from nystrom_lab.studies.reproduce.spread import spread_row
from nystrom_lab.studies.reproduce.study import Part, Plan, Setting, Study

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
        *(Part(weights, partial(_measure_real, real, weights)) for weights in WEIGHTS),
        *(Part(name.replace(" ", "-"), partial(_measure_made, name)) for name in _MADE),
    ]
    plan = real.plan(parts, _NUMBERS, ridges=" ".join(map(str, _RIDGES)), made=", ".join(_MADE))
    return plan._replace(differs="the paper proves it, and measures nothing of it")


def _measure_real(real: RealHeads, weights: Weights, folder: Path) -> Iterable[Row]:
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


def _measure_made(name: str, folder: Path) -> Iterable[Row]:
    for m in _NUMBERS:
        x = torch.randn(8, 1, m, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        landmarks = {"random": x, "each twice": torch.cat([x[:, :, : m // 2]] * 2, dim=2), "small cluster": 1e-3 * x}
        yield from singular_rows(kernel_of_landmarks(landmarks[name], "gaussian", 32**-0.5)[:, 0], name)


def singular_rows(kernels: Float[Tensor, "t m m"], landmarks: str) -> Iterable[Row]:
    """Rows of the singular values of N over all matrices: their medians, and the extremes that decide.

    Args:
        kernels: Gaussian kernel matrices of landmarks, in float64.
        landmarks: Their name in the rows.
    """
    m = kernels.shape[-1]
    for gamma in _RIDGES:
        n, d = scaled(kernels, gamma)
        values = torch.linalg.svdvals(n)
        norm = torch.linalg.matrix_norm(torch.eye(m, dtype=n.dtype) - n, ord=2)
        found = {LARGEST: values[:, 0] - 1, SMALLEST: values[:, -1], BOUND: gamma / d.amax(-1), NORM: 1 - norm}
        facts = {"landmarks": landmarks, "ridge": gamma}
        for quantity, each in found.items():
            for name, value in (("", each), (_LEAST, each.min()[None]), (_MOST, each.max()[None])):
                yield spread_row(name + quantity, "N", value, m=m, facts=facts, dtype="float64", median=True)
        ratio = (values[:, -1] / found[BOUND]).min()[None]
        yield spread_row(_RATIO, "N", ratio, m=m, facts=facts, dtype="float64")


def _rounding(row: Row) -> float:
    assert row.m is not None, "every row has its landmarks"
    return 4 * row.m * torch.finfo(torch.float64).eps


def _tables(rows: Sequence[Row]) -> Sequence[Table]:
    lines = []
    for kind, gamma in dict.fromkeys((row.fact("landmarks"), row.fact("ridge")) for row in rows):
        ends, low, ratios = (
            [row.value for name in names for row in rows_of(rows, name, landmarks=kind, ridge=gamma)]
            for names in ((_LEAST + LARGEST, _MOST + LARGEST), (_LEAST + SMALLEST,), (_RATIO,))
        )
        lines.append(
            [kind, gamma, f"{max(map(abs, ends)):.1g}", *(f"{each:.2g}" for each in low), f"{min(ratios):.3g}"]
        )
    numbers = dict.fromkeys(row.m for row in rows)
    heads = ["landmarks", "ridge", "largest off 1", *(f"smallest, m={m}" for m in numbers), "over its bound"]
    return [Table("singular values of N: the worst of all heads", heads, lines)]


def _verdicts(rows: Sequence[Row]) -> Sequence[Verdict]:
    claims = (
        "All singular values are within (0, 1).",
        "The largest singular value is 1, and the smallest at least the ridge over the largest row sum.",
        "The norm of I - N is below 1.",
    )
    low, high = rows_of(rows, _LEAST + LARGEST), rows_of(rows, _MOST + LARGEST)
    smallest, bounds, norms = (rows_of(rows, _LEAST + quantity) for quantity in (SMALLEST, BOUND, NORM))
    ratios = rows_of(rows, _RATIO)
    if not all((low, high, smallest, bounds, norms, ratios)):
        return [Verdict(claim, None, "not measured.", ours=claim == claims[1]) for claim in claims]
    touched = any(row.value >= -_rounding(row) for row in high)
    positive = all(row.value > _rounding(row) for row in smallest)
    off = max(abs(row.value) for row in (*low, *high))
    is_one = all(abs(row.value) <= _rounding(row) for row in (*low, *high))
    bounded = all(r.value >= 1 - _rounding(b) / b.value for r, b in zip(ratios, bounds, strict=True))
    known = all(row.value > _rounding(row) for row in bounds)
    above, beyond = (all(row.value > sign * _rounding(row) for row in norms) for sign in (1, -1))
    least = min(row.value for row in smallest)
    return [
        Verdict(
            claims[0],
            False if touched else True if positive else None,
            f"the largest is within {off:.1g} of 1, and the smallest is {least:.2g}.",
        ),
        Verdict(
            claims[1],
            False if not (is_one and bounded) else True if known else None,
            f"the largest is within {off:.1g} of 1, and the smallest is at least "
            f"{min(r.value for r in ratios):.3g} times the bound.",
            ours=True,
        ),
        Verdict(
            claims[2],
            True if above else None if beyond else False,
            f"1 less the norm is at least {min(row.value for row in norms):.2g}.",
        ),
    ]


def _figures(rows: Sequence[Row], folder: Path) -> "Mapping[str, Figure]":
    kinds = dict.fromkeys(row.fact("landmarks") for row in rows)
    names = {f"{name}, ridge {gamma:g}": (quantity, gamma) for gamma, (name, quantity) in product(
        _RIDGES, (("smallest", SMALLEST), ("bound", BOUND)))}  # fmt: skip
    panels = {
        f"landmarks: {kind}": {
            name: rows_of(rows, quantity, landmarks=kind, ridge=str(gamma)) for name, (quantity, gamma) in names.items()
        }
        for kind in kinds
    }
    return {
        "": draw_bands(
            panels,
            over=lambda row: row.m,
            looks={name: (_RIDGES.index(gamma), quantity == BOUND) for name, (quantity, gamma) in names.items()},
            band="quartiles over heads",
            x_label="landmarks m",
            y_label="singular value",
            limits=(1e-9, 2.0),
            log_x=True,
        )
    }


STUDIES = {
    "skyformer-lemma-3": Study(
        shows="singular values of the scaled landmark matrix, beside the lemma's sharp form",
        source="Skyformer, arXiv:2111.00035, Lemma 3",
        needs="an encoder: nystrom[real] or --model",
        paper_needs="--model with a trained BERT-base",
        minutes=0.1,
        plan=_plan,
        tables=_tables,
        verdicts=_verdicts,
        figures=_figures,
    )
}
