r"""Proposition 1 and Lemma 2 of Nyströmformer: bounds on the error, beside the error.

With m segment means as landmarks, A their softmax matrix, $Z^*$ its approximate inverse and $\|X\|_\infty$ the largest
absolute row sum of X,
$$E = \|S V - F Z^* B V\|_\infty \le (1 + \|A^+\|_\infty + \|A^+ - Z^*\|_\infty)\, \|V\|_\infty.$$
Rows of F and B sum to 1, so $E \le (1 + \|Z^*\|_\infty) \|V\|_\infty$ holds too. This second bound, "by the norm of Z
alone", is never the larger of the two. With every token a landmark (Lemma 2), $F = A = B = S$ and
$$\|S V - S Z_k S V\|_\infty \le \|S^+ - Z_k\|_\infty \|V\|_\infty,$$
where $Z_k$ is the inverse after k iterations. This is measured on the first 128 tokens.

All is in float64 and relative to $\|V\|_\infty$ of the head. Rows hold medians and quartiles over heads and texts.
$Z^*$ is the result of six iterations ("iterative") or $A^+$ itself ("exact").

Claims, and the rule that decides each:

- Proposition 1: E is at most the bound in every head, for both kinds of weights and both inverses, at every m. One head
  beyond the bound refutes it. Where a kind of weights or an inverse is missing, it is undecided.
- Lemma 2, the bound: the error is at most the bound in every head, after every number of iterations, for both kinds of
  weights. One head beyond the bound refutes it.
- Lemma 2, "the approximate self-attention will converge to the true self-attention": with pretrained weights, the upper
  quartile of the error is at most 0.001 after 24 iterations. It is refuted if the lower quartile is above 0.001, and
  undecided if 0.001 lies between the two.

Source: Xiong et al. (2021), arXiv:2102.03902, Lemma 2; its supplement, Lemma 2 and Proposition 1 (eq. 12).
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from nystrom.attention.fused import softmax_rows
from nystrom.landmarks import segment_means
from nystrom.linalg.pinv import iterate, pinv_exact, pinv_iterative, start_value
from nystrom_lab.measure.rows import Row
from nystrom_lab.report.plots.bands import draw_bands
from nystrom_lab.report.summary import Verdict
from nystrom_lab.report.table import Table
from nystrom_lab.studies.approximation.convergence import landmark_matrix
from nystrom_lab.studies.approximation.real_heads.recorded import WEIGHTS, LayerHeads, RealHeads, find_heads
from nystrom_lab.studies.approximation.real_heads.selection import rows_of, step_of
from nystrom_lab.studies.reproduce.encoders import Weights
from nystrom_lab.studies.reproduce.known import most, quartiles_of
from nystrom_lab.studies.reproduce.spread import spread_row
from nystrom_lab.studies.reproduce.study import Part, Plan, Setting, Study

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NUMBERS, _TOKENS, _STEPS = (16, 32, 64, 128, 256), 128, 24
_INVERSES = {"iterative": pinv_iterative, "exact": pinv_exact}
_ERROR, _BOUND, _PLAIN = "error of the output", "bound of Proposition 1", "bound by the norm of Z alone"
_RATIO, _WITHIN = "bound over error", "share of heads within the bound"
_ALL_ERROR, _ALL_BOUND = "error with all tokens as landmarks", "bound of Lemma 2"
_ALL_WITHIN, _CONVERGED = "share of heads within the bound of Lemma 2", 1e-3


def _plan(setting: Setting) -> Plan:
    real = find_heads(setting)
    parts = [
        Part(f"{weights}-{name}", partial(measure, real, weights))
        for weights in WEIGHTS
        for name, measure in (("proposition", _measure_proposition), ("lemma", _measure_lemma))
    ]
    return real.plan(parts, _NUMBERS, tokens=str(_TOKENS), steps=str(_STEPS))


def _measure_proposition(real: RealHeads, weights: Weights, folder: Path) -> Iterable[Row]:
    layers = real.layers(weights)
    outputs = [heads.softmax() @ heads.v for heads in layers]
    for m, (kind, inverse) in product(_NUMBERS, _INVERSES.items()):
        found: dict[str, list[Tensor]] = {}
        for heads, output in zip(layers, outputs, strict=True):
            for quantity, values in proposition(heads, output, m, inverse(landmark_matrix(heads, m))).items():
                found.setdefault(quantity, []).append(values.flatten())
        for quantity, parts in found.items():
            values = torch.cat(parts)
            yield spread_row(
                quantity,
                "nystrom",
                values,
                n=outputs[0].shape[2],
                m=m,
                facts={"weights": weights, "inverse": kind},
                dtype="float64",
                median=quantity != _WITHIN,
            )


def _measure_lemma(real: RealHeads, weights: Weights, folder: Path) -> Iterable[Row]:
    layers = real.layers(weights)
    q, k, v = (torch.cat([x[:, :, :_TOKENS].flatten(0, 1) for x in each]) for each in _inputs(layers))
    s, size = softmax_rows(q[None], k[None])[0], infinity_norm(v)
    inverse, z = pinv_exact(s), start_value(s)
    for step in range(_STEPS + 1):
        error = infinity_norm((s - s @ z @ s) @ v) / size
        bound = infinity_norm(inverse - z)
        z = iterate(s, z, 1)
        for quantity, values in (
            (_ALL_ERROR, error), (_ALL_BOUND, bound), (_ALL_WITHIN, (error <= bound).double())
        ):  # fmt: skip
            yield spread_row(
                quantity,
                "nystrom",
                values,
                n=_TOKENS,
                m=_TOKENS,
                facts={"weights": weights, "k": step},
                dtype="float64",
                median=quantity != _ALL_WITHIN,
            )


def _inputs(layers: Sequence[LayerHeads]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    return [each.q for each in layers], [each.k for each in layers], [each.v for each in layers]


def proposition(
    heads: LayerHeads, output: Float[Tensor, "b h n e"], m: int, z: Float[Tensor, "b h m m"]
) -> dict[str, Float[Tensor, "b h"]]:
    """The error of each head, and the bounds on it, relative to the norm of the values.

    Args:
        heads: The heads.
        output: The exact outputs.
        m: Number of landmarks.
        z: Approximate inverses.
    """
    q_landmarks, k_landmarks = segment_means(heads.q, m), segment_means(heads.k, m)
    approximate = softmax_rows(heads.q, k_landmarks) @ (z @ (softmax_rows(q_landmarks, heads.k) @ heads.v))
    error = infinity_norm(output - approximate) / infinity_norm(heads.v)
    inverse = pinv_exact(landmark_matrix(heads, m))
    bound = 1 + infinity_norm(inverse) + infinity_norm(inverse - z)
    within = (error <= bound).double()
    return {_ERROR: error, _BOUND: bound, _PLAIN: 1 + infinity_norm(z), _RATIO: bound / error, _WITHIN: within}


def infinity_norm(x: Float[Tensor, "*b r c"]) -> Float[Tensor, "*b"]:
    """The largest absolute row sum of each matrix."""
    return torch.linalg.matrix_norm(x, ord=torch.inf)


def _tables(rows: Sequence[Row]) -> Sequence[Table]:
    first, second = [], []
    for weights in WEIGHTS:
        for row in rows_of(rows, _ERROR, weights=weights):
            inverse = row.fact("inverse")
            bound, plain, ratio = (
                next(
                    other.value
                    for other in rows_of(rows, quantity, weights=weights, inverse=inverse)
                    if other.m == row.m
                )
                for quantity in (_BOUND, _PLAIN, _RATIO)
            )
            first.append(
                [weights, inverse, str(row.m), f"{row.value:.2g}", f"{bound:.2g}", f"{plain:.2g}", f"{ratio:.2g}"]
            )
        for row in rows_of(rows, _ALL_ERROR, weights=weights):
            step = row.fact("k")
            (bound,) = rows_of(rows, _ALL_BOUND, weights=weights, k=step)
            if int(step) % 6 == 0:
                second.append([weights, step, f"{row.value:.2g}", f"{bound.value:.2g}"])
    return [
        Table(
            "Proposition 1: medians over heads, relative to the norm of the values",
            ["weights", "inverse", "m", "error", "bound", "1+|Z|", "bound/error"],
            first,
            left=2,
        ),
        Table(
            f"Lemma 2: {_TOKENS} tokens, each a landmark; medians over heads",
            ["weights", "k", "error", "bound"],
            second,
        ),
    ]


def _verdicts(rows: Sequence[Row]) -> Sequence[Verdict]:
    within, lemma = rows_of(rows, _WITHIN), rows_of(rows, _ALL_WITHIN)
    kinds = {(row.fact("weights"), row.fact("inverse")) for row in within}
    ratios = [row.value for row in rows_of(rows, _RATIO, weights="pretrained", inverse="iterative")]
    plain, bound = (
        {row.m: row.value for row in rows_of(rows, quantity, weights="pretrained", inverse="iterative")}
        for quantity in (_PLAIN, _BOUND)
    )
    early, last = (rows_of(rows, _ALL_ERROR, weights="pretrained", k=str(k)) for k in (6, _STEPS))
    return [
        Verdict(
            "The error is at most the bound of Proposition 1.",
            _holds(within, kinds >= set(product(WEIGHTS, _INVERSES))),
            f"it {_least(within)}; with pretrained weights and six iterations the bound is "
            f"{min(ratios):.0f} to {max(ratios):.1g} times the error (medians, by m). The norm of Z alone gives a "
            f"bound of {plain[64]:.0f} at m = 64, Proposition 1 one of {bound[64]:.1g}."
            if ratios and 64 in plain
            else f"it {_least(within)}.",
        ),
        Verdict(
            "With every token a landmark the error is at most the bound of Lemma 2.",
            _holds(lemma, {row.fact("weights") for row in lemma} >= set(WEIGHTS)),
            f"it {_least(lemma)} after any number of iterations.",
        ),
        Verdict(
            "With every token a landmark the approximation converges to attention.",
            most(quartiles_of(row).within(most=_CONVERGED) for row in last),
            f"the median error is {early[0].value:.2g} after 6 iterations and {last[0].value:.2g} after {_STEPS}, "
            f"{quartiles_of(last[0]).high:.2g} at the upper quartile."
            if early and last
            else f"{_STEPS} iterations were not measured.",
        ),
    ]


def _holds(shares: Sequence[Row], complete: bool) -> bool | None:
    """Whether a bound holds in every head: one breach refutes it; it holds only if all was measured."""
    return False if any(row.value < 1 for row in shares) else True if complete else None


def _least(shares: Sequence[Row]) -> str:
    return f"holds in {min(row.value for row in shares):.1%} of the heads" if shares else "was not measured"


def _figures(rows: Sequence[Row], folder: Path) -> "Mapping[str, Figure]":
    names = {"error": _ERROR, "bound of Proposition 1": _BOUND, "bound by the norm of Z alone": _PLAIN}
    panels = {
        f"{label}, {weights} weights": {
            name: rows_of(rows, quantity, weights=weights, inverse=inverse) for name, quantity in names.items()
        }
        for inverse, label in (("iterative", "Z of 6 iterations"), ("exact", "Z = A⁺"))
        for weights in WEIGHTS
    }
    lemma = {
        f"{_TOKENS} tokens and landmarks, {weights} weights": {
            name: rows_of(rows, quantity, weights=weights)
            for quantity, name in ((_ALL_ERROR, "error"), (_ALL_BOUND, "bound of Lemma 2"))
        }
        for weights in WEIGHTS
    }
    return {
        "": draw_bands(
            panels,
            over=lambda row: row.m,
            looks={name: (place, name != "error") for place, name in enumerate(names)},
            band="quartiles over heads",
            x_label="landmarks m",
            y_label="relative to ‖V‖",
            limits=(1e-3, 1e9),
            log_x=True,
        ),
        "lemma": draw_bands(
            lemma,
            over=step_of,
            looks={"error": (0, False), "bound of Lemma 2": (1, True)},
            band="quartiles over heads",
            x_label="iterations k",
            y_label="relative to ‖V‖",
            limits=(1e-10, 1e10),
        ),
    }


STUDIES = {
    "supplement-proposition-1": Study(
        shows="the bound on the error beside the error, over the landmarks",
        source="Nyströmformer, supplement, Proposition 1 and Lemma 2",
        needs="an encoder: nystrom[real] or --model",
        paper_needs="--model with a trained BERT-base",
        minutes=0.8,
        plan=_plan,
        tables=_tables,
        verdicts=_verdicts,
        figures=_figures,
    ),
}
