r"""Fig. 3 and 4 of Nyströmformer's supplement, and Lemma 1: the pseudoinverse by six iterations.

From $Z_0 = A^\top / (\|A\|_1 \|A\|_\infty)$ the iteration
$$Z_{k+1} = \tfrac14 Z_k (13 I - A Z_k (15 I - A Z_k (7 I - A Z_k)))$$
converges to the Moore-Penrose inverse $A^+$ of a softmax matrix of landmarks.
`nystrom_lab.studies.approximation.convergence` says what is measured. Rows hold medians and quartiles over heads and
texts; for shares they hold means. `method` names the start value: "paper", or that of the authors' code over a batch
("authors") or over the heads of one sequence ("sequence"). "ridge" inverts with a ridge and needs no iteration.

Claims, and the rule that decides each, for pretrained weights and float64:

- "The iterative method achieves a good approximation of the ground truth only with 6 iterations": with 64 landmarks,
  $\|Z_6 - A^+\|_F \le 0.1 \|A^+\|_F$ in at least half of the heads. It is undecided if one half lies within the
  uncertainty of the share (`nystrom_lab.studies.reproduce.known`).
- Lemma 1, "converges in the third-order" from $\|A A^+ - A Z_0\| < 1$: at every m, every step from an error $e_k < 1$
  ends at most at $e_k^3$, up to rounding, and the lower quartile of the observed orders is at least 2.9. An m with
  fewer than 12 observed orders is undecided.
- "This choice ensures that $\|I - A Z_0\|_2 < 1$" (the paper itself): the norm is below 1 in every head at every m. It
  is $1 - \sigma_{\min}^2 / (\|A\|_1 \|A\|_\infty)$, often so near 1 that it is 1 as computed. It therefore counts as
  below 1 where $\sigma_{\min}$ is above $m\, \epsilon\, \sigma_{\max}$; other heads are undecided. The claim is refuted
  if at some m the upper quartile of the computed norm is above 1 by more than $10^{-9}$. The shares as computed are in
  the table and in the verdict.

Fig. 4 shows six of these heads, with the distance below each. Its claim is the first of these, and is decided there.

Source: Xiong et al. (2021), arXiv:2102.03902, Lemma 1; its supplement, (B), Fig. 3 and 4, without numbers.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from nystrom.linalg.pinv import pinv_iterative
from nystrom_lab.measure.rows import Row
from nystrom_lab.report.plots.maps import draw_maps
from nystrom_lab.report.table import Table
from nystrom_lab.studies.approximation.convergence import (
    CONDITION,
    attention_rows,
    convergence_rows,
    landmark_matrix,
    true_inverse,
)
from nystrom_lab.studies.approximation.convergence_report import (
    ITERATIONS,
    SHOWN,
    STEPS,
    convergence_tables,
    decide_convergence,
    draw_attention,
    draw_convergence,
)
from nystrom_lab.studies.approximation.real_heads.pictures import read_pictures, save_pictures
from nystrom_lab.studies.approximation.real_heads.recorded import WEIGHTS, RealHeads, find_heads
from nystrom_lab.studies.approximation.real_heads.selection import rows_of
from nystrom_lab.studies.matrices.spectra import condition_number
from nystrom_lab.studies.reproduce.encoders import Weights
from nystrom_lab.studies.reproduce.spread import spread_row
from nystrom_lab.studies.reproduce.study import Part, Plan, Setting, Study

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PICTURED = (2, 4, 6)
_BAR = "entry of the inverse / largest of A⁺"
_EACH = "distance of one head to the pseudoinverse"


def _plan_convergence(setting: Setting) -> Plan:
    real = find_heads(setting, small_texts=1)
    numbers = (16, 32, 64, 128, 256) if setting.size == "paper" else (16, 64, 128)
    parts = [
        Part("pictures", partial(_measure_shown, real)),
        *(
            Part(f"{weights}-m={m}", partial(_measure_steps, real, weights, m))
            for weights, m in product(WEIGHTS, numbers)
        ),
        *(Part(f"{weights}-attention", partial(_measure_attention, real, weights)) for weights in WEIGHTS),
    ]
    return real.plan(parts, numbers, steps=str(STEPS))


def _plan_six(setting: Setting) -> Plan:
    real = find_heads(setting, small_texts=1)
    return real.plan([Part("pictures", partial(_measure_shown, real))], (SHOWN,), steps=str(ITERATIONS))


def _measure_steps(real: RealHeads, weights: Weights, m: int, folder: Path) -> Iterable[Row]:
    return convergence_rows(real.layers(weights), m, STEPS)


def _measure_attention(real: RealHeads, weights: Weights, folder: Path) -> Iterable[Row]:
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


def _tables_of_six(rows: Sequence[Row]) -> Sequence[Table]:
    lines = []
    for condition in rows_of(rows, f"{CONDITION} of one head"):
        layer, head = condition.fact("layer"), condition.fact("head")
        cells = [row.value for k in _PICTURED for row in rows_of(rows, _EACH, layer=layer, head=head, k=str(k))]
        lines.append([layer, head, f"{condition.value:.1e}", *(f"{cell:.2g}" for cell in cells)])
    heads = ["layer", "head", "cond.", *(f"k={k}" for k in _PICTURED)]
    return [Table(f"relative distance to the pseudoinverse after k steps, m = {SHOWN}", heads, lines, left=2)]


def _shown_maps(folder: Path) -> tuple[dict[str, dict[str, np.ndarray]], dict[str, dict[str, float]]]:
    """The inverses of each head, relative to the largest entry of the true inverse, and the numbers of each head."""
    lines, numbers = {}, {}
    for line, found in read_pictures(folder).items():
        largest = float(np.abs(found["true"]).max())
        lines[line] = {name: values / largest for name, values in found.items() if values.ndim == 2}
        numbers[line] = {name: float(value) for name, value in found.items() if value.ndim == 0}
    return lines, numbers


def _captions(numbers: Mapping[str, Mapping[str, float]]) -> dict[tuple[str, str], str]:
    captions = {
        (line, str(k)): f"distance {each[f'distance {k}']:.2f}" for line, each in numbers.items() for k in _PICTURED
    }
    return captions | {(line, "true"): f"condition {each['condition']:.0e}" for line, each in numbers.items()}


def _figures_of_convergence(rows: Sequence[Row], folder: Path) -> "Mapping[str, Figure]":
    lines, numbers = _shown_maps(folder)
    ordered = sorted(numbers, key=lambda line: numbers[line]["condition"])
    chosen = dict.fromkeys((ordered[0], ordered[-1]))
    columns = {"true": "pseudoinverse"} | {str(k): f"{k} iterations" for k in _PICTURED}
    maps = draw_maps(
        {line: lines[line] for line in chosen},
        columns=columns,
        bar=_BAR,
        scale="signed",
        captions=_captions(numbers),
        title=f"the best and the worst conditioned of the six heads, m = {SHOWN}",
    )
    return {"": maps, "convergence": draw_convergence(rows), "attention": draw_attention(rows)}


def _figures_of_six(rows: Sequence[Row], folder: Path) -> "Mapping[str, Figure]":
    lines, numbers = _shown_maps(folder)
    return {
        "": draw_maps(
            lines,
            columns={"true": "pseudoinverse", "6": "6 iterations"},
            bar=_BAR,
            scale="signed",
            captions=_captions(numbers),
            across=2,
            title=f"m = {SHOWN}; distance: relative, in the Frobenius norm",
        )
    }


STUDIES = {
    "supplement-figure-3": Study(
        shows="the pseudoinverse after 2, 4 and 6 iterations, and the order of convergence",
        source="Nyströmformer, supplement, Fig. 3 and Lemma 1",
        needs="an encoder: nystrom[real] or --model",
        paper_needs="--model with a trained BERT-base",
        minutes=0.6,
        plan=_plan_convergence,
        tables=convergence_tables,
        verdicts=decide_convergence,
        figures=_figures_of_convergence,
    ),
    "supplement-figure-4": Study(
        shows="the pseudoinverse of six heads after 6 iterations",
        source="Nyströmformer, supplement, Fig. 4",
        needs="an encoder: nystrom[real] or --model",
        paper_needs="--model with a trained BERT-base",
        minutes=0.1,
        plan=_plan_six,
        tables=_tables_of_six,
        verdicts=lambda rows: (),
        figures=_figures_of_six,
    ),
}
