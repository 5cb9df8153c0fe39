r"""Fig. 1 and 2 of Nyströmformer's supplement: which landmarks, and how many.

With landmarks of queries and keys, the softmax matrix $S = \mathrm{softmax}(Q K^\top / \sqrt d)$ is approximated by
$$\hat S = F A^+ B, \quad F = \mathrm{softmax}(Q \tilde K^\top / \sqrt d), \quad
A = \mathrm{softmax}(\tilde Q \tilde K^\top / \sqrt d), \quad B = \mathrm{softmax}(\tilde Q K^\top / \sqrt d).$$
$A^+$ is the result of six iterations (eq. 14), or the exact Moore-Penrose inverse. Landmarks, by method:

- `nystrom`: segment means;
- `nystrom-kmeans`: the centres after five of Lloyd's iterations from the segment means;
- `nystrom-uniform`: tokens drawn independently, each with the same probability, the same for queries and keys;
- `nystrom-columns`: no landmarks before the softmax, but columns and rows of S itself at those tokens (eq. 3-6 of the
  paper), for which all of S is needed.

The errors of a head, in float64, are $\|\hat S - S\| / \|S\|$ of the matrix, in the Frobenius and in the spectral
norm, and $\|(\hat S - S) V\|_F / \|S V\|_F$ of the output. Rows hold the mean over the heads of a layer, the texts and
the draws, with quartiles. Times, in float32, are of choosing the landmarks of one tensor, and of the whole attention:
medians and quartiles of interleaved calls.

Claims, and the rule that decides each, for pretrained weights and six iterations.
`nystrom_lab.studies.reproduce.known` says how precisely means, shares and times are known. A claim is undecided where
its limit lies inside that uncertainty.

- "Segment-means with 64 landmark points outperforms uniform random sampling": the mean error of the matrix with segment
  means is below that with the draws, in the Frobenius and in the spectral norm, and the error is lower in more than
  half of the heads. If these three measures disagree, it is undecided.
- It "compares favorably to K-means": its mean error of the matrix is at most 1.1 times that of k-means, in the
  Frobenius and in the spectral norm. If the two norms disagree, it is undecided.
- It "is more efficient than the iterative procedure used by K-means": choosing the landmarks takes less time at each
  length.
- "The more landmarks the better the approximation": the mean error of segment means falls from 16 to 64 landmarks and
  from 64 to 256, both for the matrix and for the output.
- 16 landmarks are "more efficient", 256 require "more time": the time of attention rises from 16 to 64 landmarks and
  from 64 to 256.
- "64 landmarks is often sufficient to ensure a good approximation" (the paper itself): in at least half of the heads,
  the relative error of the output is at most 0.1.

Source: Xiong et al. (2021), arXiv:2102.03902, eq. 3-6, 13 and 16; its supplement, (A), Fig. 1 and 2, without numbers.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor
from torch.linalg import matrix_norm

from nystrom.linalg.pinv import pinv_iterative
from nystrom_lab.measure.rows import Row
from nystrom_lab.report.plots.lines import draw_lines
from nystrom_lab.report.plots.maps import draw_maps
from nystrom_lab.report.summary import Verdict
from nystrom_lab.report.table import Table
from nystrom_lab.studies.approximation.landmark_errors import (
    ATTENTION,
    CHOOSING,
    GOOD,
    INVERSES,
    MATRIX,
    NEARER,
    OUTPUT,
    SPECTRAL,
    approximations,
    error_rows,
    segment_approximation,
    time_rows,
)
from nystrom_lab.studies.approximation.real_heads.pictures import read_pictures, save_pictures
from nystrom_lab.studies.approximation.real_heads.recorded import LENGTH, WEIGHTS, LayerHeads, RealHeads, find_heads
from nystrom_lab.studies.approximation.real_heads.selection import only_row, over_layers
from nystrom_lab.studies.reproduce.encoders import Encoder
from nystrom_lab.studies.reproduce.known import mean_of, most, quartiles_of, share_of, unanimous
from nystrom_lab.studies.reproduce.study import Part, Plan, Setting, Study

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# In the order of the paper's columns.
_NAMES = {
    "nystrom-uniform": "random tokens",
    "nystrom": "segment means",
    "nystrom-kmeans": "k-means",
    "nystrom-columns": "columns of S",
}
_CHOSEN, _NUMBERS, _PICTURED = 64, (16, 32, 64, 128, 256), (16, 64, 256)
# An error that compares favorably is at most so many times the other.
_FAVORABLY = 1.1
_BAR = "attention weight, mean of 4 x 4 entries (negative: darkest)"


def _plan_choice(setting: Setting) -> Plan:
    return _plan(setting, find_heads(setting), (_CHOSEN,), inverses=tuple(INVERSES), draws=3, lengths=(LENGTH, 4096))


def _plan_numbers(setting: Setting) -> Plan:
    # There are five times as many matrices, so one inverse and, at the small size, one text and one draw are enough.
    heads = find_heads(setting, small_texts=1)
    return _plan(setting, heads, _NUMBERS, inverses=("iterative",), draws=1, lengths=(LENGTH,))


def _plan(
    setting: Setting,
    real: RealHeads,
    numbers: Sequence[int],
    *,
    inverses: Sequence[str],
    draws: int,
    lengths: Sequence[int],
) -> Plan:
    draws = 10 if setting.size == "paper" else draws
    real.encoder.check_length(max(lengths))

    def measure(heads: LayerHeads, folder: Path) -> Iterable[Row]:
        if heads.shown:
            save_pictures(heads, _maps(heads, numbers), folder)
        return error_rows(heads, numbers, inverses, draws)

    times = [Part(f"times-n={n}", partial(_times, real.encoder, n, numbers)) for n in lengths]
    timed = " ".join(map(str, lengths))
    return real.plan([*real.by_layer(measure), *times], numbers, draws=str(draws), timed=timed)


def _times(encoder: Encoder, n: int, numbers: Sequence[int], folder: Path) -> Iterable[Row]:
    return time_rows(encoder, n, numbers)


def _maps(heads: LayerHeads, numbers: Sequence[int]) -> dict[str, Tensor]:
    """The exact matrix, the approximate ones, and their relative errors, by the names of the figure's columns."""
    s = heads.softmax()
    if len(numbers) == 1:
        made = {
            method: next(iter(each)) for method, each in approximations(heads, s, _CHOSEN, pinv_iterative, 1).items()
        }
    else:
        made = {str(m): segment_approximation(heads, m, pinv_iterative) for m in _PICTURED}
    errors = {f"error of {name}": matrix_norm(each - s) / matrix_norm(s) for name, each in made.items()}
    return {"exact": s} | made | errors


def _draw(folder: Path, columns: Mapping[str, str], title: str) -> "Figure":
    lines = read_pictures(folder)
    columns = {"exact": "softmax matrix", **columns}
    captions = {
        (line, name): f"error {float(value):.2f}"
        for line, found in lines.items()
        for key, value in found.items()
        if (name := key.removeprefix("error of ")) != key
    }
    return draw_maps(lines, columns=columns, captions=captions, bar=_BAR, title=title)


def _figures_of_choice(rows: Sequence[Row], folder: Path) -> "Mapping[str, Figure]":
    n = next(row.n for row in rows if row.quantity == MATRIX)
    return {"": _draw(folder, _NAMES, f"n = {n}, m = {_CHOSEN}, 6 iterations; error: relative, in the Frobenius norm")}


def _figures_of_numbers(rows: Sequence[Row], folder: Path) -> "Mapping[str, Figure]":
    n = next(row.n for row in rows if row.quantity == MATRIX)
    columns = {str(m): f"m = {m}" for m in _PICTURED}
    panels = {
        f"{quantity}, {weights} weights": [
            row for row in _errors(rows, quantity, weights=weights) if row.method != "nystrom-columns"
        ]
        for quantity in (MATRIX, OUTPUT)
        for weights in WEIGHTS
    }
    return {
        "": _draw(folder, columns, f"n = {n}, segment means, 6 iterations; error: relative, in the Frobenius norm"),
        "errors": draw_lines(
            panels,
            over=lambda row: row.m,
            x_label="landmarks m",
            y_label="relative error",
            band="quartiles over the heads of a layer, mean over layers",
        ),
    }


def _errors(
    rows: Sequence[Row], quantity: str, *, weights: str = "pretrained", inverse: str = "iterative"
) -> list[Row]:
    """Rows of one quantity, averaged over all heads."""
    return over_layers(
        row
        for row in rows
        if row.quantity == quantity and row.fact("weights") == weights and row.fact("inverse") == inverse
    )


def _row(rows: Sequence[Row], quantity: str, method: str, m: int, **chosen: str) -> Row:
    of = [row for row in _errors(rows, quantity, **chosen) if row.method == method and row.m == m]
    return only_row(of, f"{quantity} of {method}, m = {m}")


def _value(rows: Sequence[Row], quantity: str, method: str, m: int, **chosen: str) -> float:
    return _row(rows, quantity, method, m, **chosen).value


def _times_of(rows: Sequence[Row], quantity: str, method: str) -> dict[tuple[int, int], Row]:
    """Rows of medians by n and m."""
    return {(row.n or 0, row.m or 0): row for row in rows if row.quantity == quantity and row.method == method}


def _tables_of_choice(rows: Sequence[Row]) -> Sequence[Table]:
    tables = []
    for weights in WEIGHTS:
        lines = []
        for inverse in INVERSES:
            for method, name in _NAMES.items():
                cells = [
                    _value(rows, quantity, method, _CHOSEN, weights=weights, inverse=inverse)
                    for quantity in (MATRIX, SPECTRAL, OUTPUT)
                ]
                row = _row(rows, MATRIX, method, _CHOSEN, weights=weights, inverse=inverse)
                quartiles = f"{row.low:.2g}–{row.high:.2g}"
                lines.append([name, inverse, f"{cells[0]:.3g}", quartiles, *(f"{cell:.3g}" for cell in cells[1:])])
        title = f"relative errors at m = {_CHOSEN}, mean over heads, {weights} weights"
        tables.append(
            Table(
                title,
                ["landmarks", "inverse", "Frobenius", "quartiles of a layer", "spectral", "output"],
                lines,
                left=2,
            )
        )
    return [*tables, _time_table(rows)]


def _tables_of_numbers(rows: Sequence[Row]) -> Sequence[Table]:
    numbers = sorted({row.m for row in rows if row.m})
    tables = []
    for quantity in (MATRIX, OUTPUT):
        lines = [
            [name, *(f"{_value(rows, quantity, method, m):.3g}" for m in numbers)] for method, name in _NAMES.items()
        ]
        tables.append(Table(f"{quantity}, pretrained weights", ["landmarks", *(f"m={m}" for m in numbers)], lines))
    return [*tables, _time_table(rows)]


def _time_table(rows: Sequence[Row]) -> Table:
    lines = []
    for method, name in _NAMES.items():
        choosing, whole = (_times_of(rows, quantity, method) for quantity in (CHOOSING, ATTENTION))
        lines += [[name, str(n), str(m), *(f"{of[n, m].value:.2f}" for of in (choosing, whole))] for n, m in choosing]
    return Table("median times in ms, first layer of one text", ["landmarks", "n", "m", "choosing", "attention"], lines)


def _verdicts_of_choice(rows: Sequence[Row]) -> Sequence[Verdict]:
    ours, drawn, clusters = (
        {quantity: _row(rows, quantity, method, _CHOSEN) for quantity in (MATRIX, SPECTRAL)}
        for method in ("nystrom", "nystrom-uniform", "nystrom-kmeans")
    )
    nearer = _row(rows, NEARER, "nystrom", _CHOSEN)
    means, kmeans = (_times_of(rows, CHOOSING, method) for method in ("nystrom", "nystrom-kmeans"))
    times = [f"{means[size].value:.2f} against {kmeans[size].value:.2f} ms at n = {size[0]}" for size in means]
    better = [mean_of(drawn[norm]).over(mean_of(ours[norm])).above() for norm in ours]
    return [
        Verdict(
            "Segment means with 64 landmarks outperform uniform random sampling.",
            unanimous([*better, share_of(nearer.value, nearer.repeats).above(0.5)]),
            f"mean relative error {_against(ours, drawn)}, nearer in {nearer.value:.0%} of {nearer.repeats} heads.",
        ),
        Verdict(
            "Segment means compare favorably to k-means.",
            unanimous(mean_of(ours[norm]).over(mean_of(clusters[norm])).within(most=_FAVORABLY) for norm in ours),
            f"mean relative error {_against(ours, clusters)}.",
        ),
        Verdict(
            "Segment means are more efficient than the iterations of k-means.",
            most(quartiles_of(kmeans[size]).over(quartiles_of(means[size])).above() for size in means),
            f"choosing takes {', '.join(times) or 'a time that was not measured'}.",
        ),
    ]


def _against(ours: Mapping[str, Row], others: Mapping[str, Row]) -> str:
    """Means in both norms, and the ratio of ours to the others."""
    return " and ".join(
        f"{ours[norm].value:.3f} against {others[norm].value:.3f} in the {name} norm "
        f"({ours[norm].value / others[norm].value:.2f} times as large)"
        for norm, name in ((MATRIX, "Frobenius"), (SPECTRAL, "spectral"))
    )


def _verdicts_of_numbers(rows: Sequence[Row]) -> Sequence[Verdict]:
    matrix, output = ([_row(rows, quantity, "nystrom", m) for m in _PICTURED] for quantity in (MATRIX, OUTPUT))
    good = _row(rows, GOOD, "nystrom", 64)
    times = [row for (_, m), row in sorted(_times_of(rows, ATTENTION, "nystrom").items()) if m in _PICTURED]
    return [
        Verdict(
            "The more landmarks the better the approximation.",
            most(mean_of(few).over(mean_of(many)).above() for of in (matrix, output) for few, many in pairwise(of)),
            f"mean relative error of the matrix {_listed(matrix)}, of the output {_listed(output)} with 16, 64, 256.",
        ),
        Verdict(
            "16 landmarks are more efficient, 256 require more time.",
            most(quartiles_of(many).over(quartiles_of(few)).above() for few, many in pairwise(times)),
            f"attention takes {_listed(times)} ms with 16, 64 and 256.",
        ),
        Verdict(
            "64 landmarks are often sufficient to ensure a good approximation.",
            share_of(good.value, good.repeats).within(least=0.5),
            f"the relative error of the output is at most 0.1 in {good.value:.0%} of {good.repeats} heads.",
        ),
    ]


def _listed(rows: Sequence[Row]) -> str:
    return ", ".join(f"{row.value:.3f}" for row in rows)


STUDIES = {
    "supplement-figure-1": Study(
        shows="attention matrices from random landmarks, segment means and k-means, beside the softmax matrix",
        source="Nyströmformer, supplement, Fig. 1",
        needs="an encoder: nystrom[real] or --model",
        paper_needs="--model with a trained BERT-base",
        minutes=1.9,
        plan=_plan_choice,
        tables=_tables_of_choice,
        verdicts=_verdicts_of_choice,
        figures=_figures_of_choice,
    ),
    "supplement-figure-2": Study(
        shows="attention matrices from 16, 64 and 256 landmarks, beside the softmax matrix",
        source="Nyströmformer, supplement, Fig. 2",
        needs="an encoder: nystrom[real] or --model",
        paper_needs="--model with a trained BERT-base",
        minutes=1.3,
        plan=_plan_numbers,
        tables=_tables_of_numbers,
        verdicts=_verdicts_of_numbers,
        figures=_figures_of_numbers,
    ),
}
