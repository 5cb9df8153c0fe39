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

Source: Xiong et al. (2021), arXiv:2102.03902, Lemma 2; its supplement, Lemma 2 and Proposition 1 (eq. 12).
"""

from collections.abc import Iterable
from functools import partial
from itertools import product
from pathlib import Path

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from nystrom.attention.fused import softmax_rows
from nystrom.landmarks import segment_means
from nystrom.linalg.pinv import iterate, pinv_exact, pinv_iterative, start_value
from nystrom_lab.measure.rows import Row
from nystrom_papers.studies.approximation.convergence import landmark_matrix
from nystrom_papers.studies.approximation.real_heads.recorded import WEIGHTS, LayerHeads, RealHeads, find_heads
from nystrom_papers.studies.reproduce.declared import Answer, Cells, Claim, Lines, Pivot, column, declare, each, only
from nystrom_papers.studies.reproduce.encoders import Weights
from nystrom_papers.studies.reproduce.known import quartiles_of
from nystrom_papers.studies.reproduce.spread import spread_row
from nystrom_papers.studies.reproduce.study import Part, Plan, Setting

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
        by_quantity: dict[str, list[Tensor]] = {}
        for heads, output in zip(layers, outputs, strict=True):
            for quantity, values in proposition(heads, output, m, inverse(landmark_matrix(heads, m))).items():
                by_quantity.setdefault(quantity, []).append(values.flatten())
        for quantity, parts in by_quantity.items():
            values = torch.cat(parts)
            yield spread_row(
                quantity, "nystrom", values, n=outputs[0].shape[2], m=m, facts={"weights": weights, "inverse": kind},
                dtype="float64", median=quantity != _WITHIN,
            )  # fmt: skip


def _measure_lemma(real: RealHeads, weights: Weights, folder: Path) -> Iterable[Row]:
    layers = real.layers(weights)
    inputs = zip(*((heads.q, heads.k, heads.v) for heads in layers), strict=True)
    q, k, v = (torch.cat([x[:, :, :_TOKENS].flatten(0, 1) for x in each]) for each in inputs)
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
                quantity, "nystrom", values, n=_TOKENS, m=_TOKENS, facts={"weights": weights, "k": step},
                dtype="float64", median=quantity != _ALL_WITHIN,
            )  # fmt: skip


def proposition(
    heads: LayerHeads, output: Float[Tensor, "b h n e"], m: int, z: Float[Tensor, "b h m m"]
) -> dict[str, Float[Tensor, "b h"]]:
    """The error of each head, and the bounds on it, relative to the norm of the values."""
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


def _holds(quantity: str, rows: pd.DataFrame) -> tuple[bool | None, str]:
    """Whether a bound holds in every head: one breach refutes it; it holds only if all was measured."""
    of = each(rows, quantity)
    if not of:
        return None, "was not measured"
    kinds = {(row.weights, row.inverse) for row in of} if quantity == _WITHIN else {row.weights for row in of}
    complete = kinds >= set(product(WEIGHTS, _INVERSES) if quantity == _WITHIN else WEIGHTS)
    least = min(row.value for row in of)
    return False if least < 1 else True if complete else None, f"holds in {least:.1%} of the heads"


def _proposition(rows: pd.DataFrame) -> Answer:
    agrees, shown = _holds(_WITHIN, rows)
    of = {"weights": "pretrained", "inverse": "iterative"}
    if len(each(rows, (_RATIO, _PLAIN), m=64, **of)) < 2:
        return agrees, f"it {shown}."
    ratios, plain, bound = (column(rows, quantity, **of) for quantity in (_RATIO, _PLAIN, _BOUND))
    return agrees, (
        f"it {shown}; with pretrained weights and six iterations the bound is {min(ratios.values()):.0f} to "
        f"{max(ratios.values()):.1g} times the error (medians, by m). The norm of Z alone gives a bound of "
        f"{plain[64]:.0f} at m = 64, Proposition 1 one of {bound[64]:.1g}."
    )


def _lemma(rows: pd.DataFrame) -> Answer:
    agrees, shown = _holds(_ALL_WITHIN, rows)
    return agrees, f"it {shown} after any number of iterations."


def _converges(rows: pd.DataFrame) -> Answer:
    early, last = (only(rows, _ALL_ERROR, weights="pretrained", k=str(k)) for k in (6, _STEPS))
    return quartiles_of(last).within(most=_CONVERGED), (
        f"the median error is {early.value:.2g} after 6 iterations and {last.value:.2g} after {_STEPS}, "
        f"{last.high:.2g} at the upper quartile."
    )


_SHOWN = partial(
    Lines, names={"weights": WEIGHTS}, line="{quantity}", y_label="relative to ‖V‖", band="quartiles over heads"
)
_MEDIANS = {"line": "medians"}
STUDIES = {
    "supplement-proposition-1": declare(
        shows="the bound on the error beside the error, over the landmarks",
        source="Nyströmformer, supplement, Proposition 1 and Lemma 2",
        needs="an encoder: nystrom[real] or --model",
        paper_needs="--model with a trained BERT-base",
        minutes=0.8,
        plan=_plan,
        tables=[
            Pivot(
                title="Proposition 1: medians over heads, relative to the norm of the values",
                index={"weights": "{weights}", "inverse": "{inverse}", "m": "{m}"},
                columns=[
                    Cells(head, quantity, "{value:.2g}")
                    for head, quantity in (
                        ("error", _ERROR), ("bound", _BOUND), ("1+|Z|", _PLAIN), ("bound/error", _RATIO)
                    )
                ],
                names={"weights": WEIGHTS},
                left=2,
            ),
            Pivot(
                title=f"Lemma 2: {_TOKENS} tokens, each a landmark; medians over heads",
                index={"weights": "{weights}", "k": "{k}"},
                columns=[
                    Cells(head, quantity, "{value:.2g}", k=[str(k) for k in range(0, _STEPS + 1, 6)])
                    for head, quantity in (("error", _ALL_ERROR), ("bound", _ALL_BOUND))
                ],
                names={"weights": WEIGHTS},
                left=1,
            ),
        ],
        claims=[
            Claim(
                "The error is at most the bound of Proposition 1.", _proposition,
                "Nyströmformer, supplement, Proposition 1",
            ),
            Claim(
                "With every token a landmark the error is at most the bound of Lemma 2.", _lemma,
                "Nyströmformer, supplement, Lemma 2",
            ),
            Claim(
                "With every token a landmark the approximation converges to attention.", _converges,
                "Nyströmformer, Lemma 2",
            ),
        ],
        figures={
            "": _SHOWN(
                of={"quantity": (_ERROR, _BOUND, _PLAIN)}, over="m", panel="Z {inverse}, {weights} weights",
                x_label="landmarks m", options={**_MEDIANS, "limits": (1e-3, 1e9)},
            ),
            "lemma": _SHOWN(
                of={"quantity": (_ALL_ERROR, _ALL_BOUND)}, over="k",
                panel=f"{_TOKENS} tokens and landmarks, {{weights}} weights", x_label="iterations k",
                options={**_MEDIANS, "limits": (1e-10, 1e10), "log_x": False},
            ),
        },
    ),
}  # fmt: skip
