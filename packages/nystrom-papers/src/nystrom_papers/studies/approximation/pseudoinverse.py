r"""Fig. 3 and 4 of Nyströmformer's supplement, and Lemma 1: the pseudoinverse by six iterations.

From $Z_0 = A^\top / (\|A\|_1 \|A\|_\infty)$ the iteration
$$Z_{k+1} = \tfrac14 Z_k (13 I - A Z_k (15 I - A Z_k (7 I - A Z_k)))$$
converges to the Moore-Penrose inverse $A^+$ of a softmax matrix of landmarks.
`nystrom_papers.studies.approximation.convergence` says what is measured. Rows hold medians and quartiles over heads and
texts; for shares they hold means. `method` names the start value: "paper", or that of the authors' code over a batch
("authors") or over the heads of one sequence ("sequence"). "ridge" inverts with a ridge and needs no iteration.

Fig. 4 shows six of these heads, with the distance below each. The claim is the first of Fig. 3.

Source: Xiong et al. (2021), arXiv:2102.03902, Lemma 1; its supplement, (B), Fig. 3 and 4, without numbers.
"""

from collections.abc import Iterable, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from nystrom.linalg.pinv import pinv_iterative
from nystrom_lab.measure.rows import Row
from nystrom_papers.report.plots.maps import draw_maps
from nystrom_papers.studies.approximation.convergence import (
    CONDITION,
    CUBED,
    DISTANCE,
    LEMMA_HOLDS_AT_START,
    MATRIX,
    NEAR,
    NEAR_ENOUGH,
    ORDER,
    REGULAR,
    RESIDUAL,
    STARTS_BELOW,
    attention_rows,
    convergence_rows,
    landmark_matrix,
    true_inverse,
)
from nystrom_papers.studies.approximation.real_heads.pictures import read_pictures, save_pictures
from nystrom_papers.studies.approximation.real_heads.recorded import WEIGHTS, RealHeads, find_heads
from nystrom_papers.studies.matrices.spectra import condition_number
from nystrom_papers.studies.reproduce.declared import Answer, Cells, Claim, Lines, Pivot, column, declare, each, only
from nystrom_papers.studies.reproduce.encoders import Weights
from nystrom_papers.studies.reproduce.known import Known, holds_for_share, share_in
from nystrom_papers.studies.reproduce.spread import spread_row
from nystrom_papers.studies.reproduce.study import Figures, Part, Plan, Setting, part

_PICTURED = (2, 4, 6)
SHOWN, ITERATIONS, STEPS = 64, 6, 24
# The order required, the least number of steps to see it in, and the norm that is above 1 by more than rounding.
_ORDER, _FEW, _ABOVE = 2.9, 12, 1 + 1e-9
_DTYPES, _PRINTED = ("float64", "float32"), (2, 4, 6, 12, 18, 24)
_BAR = "entry of the inverse / largest of A⁺"
_EACH = "distance of one head to the pseudoinverse"


def _plan_convergence(setting: Setting) -> Plan:
    real = find_heads(setting, small_texts=1)
    numbers = (16, 32, 64, 128, 256) if setting.size == "paper" else (16, 64, 128)
    parts = [
        Part("pictures", partial(_measure_shown, real)),
        *(part(f"{weights}-m={m}", _steps, real, weights, m) for weights, m in product(WEIGHTS, numbers)),
        *(part(f"{weights}-attention", _attention, real, weights) for weights in WEIGHTS),
    ]
    return real.plan(parts, numbers, steps=str(STEPS))


def _plan_six(setting: Setting) -> Plan:
    real = find_heads(setting, small_texts=1)
    return real.plan([Part("pictures", partial(_measure_shown, real))], (SHOWN,), steps=str(ITERATIONS))


def _steps(real: RealHeads, weights: Weights, m: int) -> Iterable[Row]:
    return convergence_rows(real.layers(weights), m, STEPS)


def _attention(real: RealHeads, weights: Weights) -> Iterable[Row]:
    return attention_rows(real.layers(weights), SHOWN, STEPS)


def _measure_shown(real: RealHeads, folder: Path) -> Iterable[Row]:
    """A row for each head that is shown, and the pictures of its inverses."""
    for heads in real.layers("pretrained", dict.fromkeys(layer for layer, _ in real.shown)):
        a = landmark_matrix(heads, SHOWN)
        inverse = true_inverse(a)
        maps = {"true": inverse} | {str(k): pinv_iterative(a, steps=k) for k in _PICTURED}
        distances = {
            f"distance {k}": torch.linalg.matrix_norm(maps[str(k)] - inverse) / torch.linalg.matrix_norm(inverse)
            for k in _PICTURED
        }
        condition = condition_number(torch.linalg.svdvals(a))
        save_pictures(heads, maps | distances | {"condition": condition}, folder)
        for head in heads.shown:
            kept = {"n": heads.q.shape[2], "m": SHOWN, "dtype": "float64"}
            facts = {"layer": heads.layer + 1, "head": head + 1}
            yield spread_row(f"{CONDITION} of one head", "softmax", condition[0, head], facts=facts, **kept)
            for k in _PICTURED:
                value = distances[f"distance {k}"][0, head]
                yield spread_row(_EACH, "paper", value, facts={**facts, "k": k}, **kept)


def _shown_maps(folder: Path) -> tuple[dict[str, dict[str, np.ndarray]], dict[str, dict[str, float]]]:
    """The inverses of each head, relative to the largest entry of the true inverse, and the numbers of each head."""
    lines, numbers = {}, {}
    for line, arrays in read_pictures(folder).items():
        largest = float(np.abs(arrays["true"]).max())
        lines[line] = {name: values / largest for name, values in arrays.items() if values.ndim == 2}
        numbers[line] = {name: float(value) for name, value in arrays.items() if value.ndim == 0}
    return lines, numbers


def _draw_inverses(columns: Mapping[str, str], title: str, folder: Path, *, all_heads: bool) -> Figures:
    """Pictures of the inverses of all heads, or of the best and the worst conditioned one."""
    lines, numbers = _shown_maps(folder)
    ordered = sorted(numbers, key=lambda line: numbers[line]["condition"])
    chosen = lines if all_heads else dict.fromkeys((ordered[0], ordered[-1]))
    captions = {(line, str(k)): f"distance {numbers[line][f'distance {k}']:.2f}" for line in numbers for k in _PICTURED}
    captions |= {(line, "true"): f"condition {numbers[line]['condition']:.0e}" for line in numbers}
    return {"": draw_maps(
        {line: lines[line] for line in chosen}, columns={"true": "pseudoinverse", **columns}, bar=_BAR, scale="signed",
        captions=captions, across=1 + all_heads, title=title,
    )}  # fmt: skip


def _draw_convergence(rows: pd.DataFrame, folder: Path) -> Figures:
    title = f"the best and the worst conditioned of the six heads, m = {SHOWN}"
    maps = _draw_inverses({str(k): f"{k} iterations" for k in _PICTURED}, title, folder, all_heads=False)
    over_steps = partial(
        Lines, over="k", x_label="iterations k", band="quartiles over heads", names={"weights": WEIGHTS}
    )
    norms = over_steps(
        of={"quantity": (RESIDUAL, DISTANCE), "method": "paper"}, panel="{quantity}, {weights} weights",
        line="m = {m}, {dtype}", y_label="norm", options={"limits": (1e-10, 1e3), "log_x": False, "line": "medians"},
    )  # fmt: skip
    attention = over_steps(
        of={"quantity": MATRIX}, panel=f"{{weights}} weights, m = {SHOWN}", line="inverse: {method}",
        y_label="relative error of attention",
        options={"limits": (1e-3, 10), "log_x": False, "line": "medians"},
    )  # fmt: skip
    drawn = {**maps, "convergence": norms.draw(rows), "attention": attention.draw(rows)}
    return {name: figure for name, figure in drawn.items() if figure is not None}


def _draw_six(rows: pd.DataFrame, folder: Path) -> Figures:
    title = f"m = {SHOWN}; distance: relative, in the Frobenius norm"
    return _draw_inverses({"6": "6 iterations"}, title, folder, all_heads=True)


def _six_are_enough(rows: pd.DataFrame) -> Answer:
    of = {"weights": "pretrained", "m": SHOWN, "dtype": "float64"}
    after = {**of, "method": "paper", "k": str(ITERATIONS)}
    share, rest = only(rows, NEAR, **after), only(rows, RESIDUAL, **after)
    near, errors = (column(rows, quantity, "k", method="paper", **of) for quantity in (NEAR, MATRIX))
    exact = only(rows, MATRIX, method="exact", **of)
    half = next((k for k, value in near.items() if value >= 0.5), f"more than {STEPS}")
    best = min(errors, key=lambda k: errors[k])
    return share_in(share).within(least=0.5), (
        f"after {ITERATIONS} with {SHOWN} landmarks, {share.value:.0%} of {share.repeats} heads are within "
        f"{NEAR_ENOUGH} of the pseudoinverse, and the median norm of I - A Z is {rest.value:.2f}; half of the heads "
        f"are that close after {half}. The attention matrix is nearest to the exact one after {best} (median error "
        f"{errors[best]:.2f}; {errors[str(ITERATIONS)]:.2f} after {ITERATIONS}, {exact.value:.2f} with the true "
        "pseudoinverse)."
    )


def _paper(rows: pd.DataFrame, quantity: str, dtype: str = "float64", **where: str) -> list[Any]:
    """Rows of pretrained weights with the paper's start value, a row for each m."""
    return each(rows, quantity, weights="pretrained", method="paper", dtype=dtype, **where)


def _third_order(rows: pd.DataFrame) -> Answer:
    cubed, orders = (_paper(rows, quantity) for quantity in (CUBED, ORDER))
    if not cubed or not orders:
        return None, "no head came near enough to the pseudoinverse to see an order."
    seen = (Known(row.low, row.low).within(least=_ORDER) if row.repeats >= _FEW else None for row in orders)
    return holds_for_share([*(row.value == 1 for row in cubed), *seen]), (
        f"{min(row.value for row in cubed):.1%} of the steps that start below 1 end within the cube; the lower "
        f"quartiles of the order are {', '.join(f'{row.low:.2f} (m = {row.m})' for row in orders)}, each over at least "
        f"{min(row.repeats for row in orders)} steps."
    )


def _start(rows: pd.DataFrame) -> Answer:
    regular, starts, coarse = (
        _paper(rows, quantity, dtype)
        for quantity, dtype in ((REGULAR, "float64"), (STARTS_BELOW, "float64"), (STARTS_BELOW, "float32"))
    )
    above = [row for row in _paper(rows, RESIDUAL, k="0") if row.high > _ABOVE]
    if not regular:
        return None, "no head was measured."
    shares = [", ".join(f"{row.value:.0%} (m = {row.m})" for row in of) for of in (regular, starts, coarse)]
    beyond = f", above 1 in a quarter of them or more at m = {', '.join(str(row.m) for row in above)}" if above else ""
    return False if above else True if all(row.value == 1 for row in regular) else None, (
        f"it is below 1 in {shares[0]} of the heads{beyond}. As computed it is below 1 in {shares[1]} in float64, and "
        f"in {shares[2]} in float32; the others round to 1."
    )


_INDEX = {"weights": "{weights}", "m": "{m}"}
_PAPER: dict[str, Any] = {"method": "paper", "dtype": "float64"}
STUDIES = {
    "supplement-figure-3": declare(
        shows="the pseudoinverse after 2, 4 and 6 iterations, and the order of convergence",
        source="Nyströmformer, supplement, Fig. 3 and Lemma 1",
        needs="an encoder: nystrom[real] or --model",
        paper_needs="--model with a trained BERT-base",
        minutes=0.6,
        plan=_plan_convergence,
        tables=[
            Pivot(
                title="distance to the pseudoinverse after k iterations, medians", index=_INDEX, left=1,
                columns=[
                    Cells("cond.", CONDITION, "{value:.1e}"),
                    *(Cells(f"k={k}", DISTANCE, "{value:.2g}", k=str(k), **_PAPER) for k in _PRINTED),
                ],
                names={"weights": WEIGHTS},
            ),
            Pivot(
                title="Lemma 1: steps within the cube, and order; heads within 0.1 of the pseudoinverse after 6 "
                "iterations in float64 and float32; distance with a ridge",
                index=_INDEX, left=1,
                columns=[
                    Cells("cubed", CUBED, "{value:.1%}"),
                    Cells("order", ORDER, "{value:.2f}"),
                    *(Cells(x, NEAR, "{value:.0%}", method="paper", k="6", dtype=x) for x in _DTYPES),
                    Cells("ridge", DISTANCE, "{value:.2g}", method="ridge", dtype="float64"),
                ],
                names={"weights": WEIGHTS},
            ),
            Pivot(
                title="share of heads whose start value is below 1 as computed, in its residual and in the norm of "
                "Lemma 1, each in float64 and in float32",
                index={**_INDEX, "z0": "{method}"},
                columns=[
                    Cells(head if dtype == "float64" else dtype, quantity, "{value:.0%}", dtype=dtype, k="0")
                    for head, quantity in (("|I-AZ|", STARTS_BELOW), ("Lemma 1", LEMMA_HOLDS_AT_START))
                    for dtype in _DTYPES
                ],
                names={"weights": WEIGHTS},
            ),
        ],
        claims=[
            Claim(
                "Six iterations achieve a good approximation of the pseudoinverse.", _six_are_enough,
                "Nyströmformer, supplement (B)",
            ),
            Claim("The iteration converges in the third order (Lemma 1).", _third_order, "Nyströmformer, Lemma 1"),
            Claim("The start value ensures a norm of I - A Z_0 below 1.", _start, "Nyströmformer, section 3"),
        ],
        figures=_draw_convergence,
    ),
    "supplement-figure-4": declare(
        shows="the pseudoinverse of six heads after 6 iterations",
        source="Nyströmformer, supplement, Fig. 4",
        needs="an encoder: nystrom[real] or --model",
        paper_needs="--model with a trained BERT-base",
        minutes=0.1,
        plan=_plan_six,
        tables=[
            Pivot(
                title=f"relative distance to the pseudoinverse after k steps, m = {SHOWN}",
                index={"layer": "{layer}", "head": "{head}"},
                columns=[
                    Cells("cond.", f"{CONDITION} of one head", "{value:.1e}"),
                    *(Cells(f"k={k}", _EACH, "{value:.2g}", k=str(k)) for k in _PICTURED),
                ],
            )
        ],
        figures=_draw_six,
    ),
}  # fmt: skip
