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

Rules read pretrained weights and six iterations.

Source: Xiong et al. (2021), arXiv:2102.03902, eq. 3-6, 13 and 16; its supplement, (A), Fig. 1 and 2, without numbers.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
from torch import Tensor
from torch.linalg import matrix_norm

from nystrom.linalg.pinv import pinv_iterative
from nystrom_lab.measure.rows import Row
from nystrom_papers.report.plots.maps import draw_maps
from nystrom_papers.studies.approximation.landmark_errors import (
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
from nystrom_papers.studies.approximation.real_heads.pictures import read_pictures, save_pictures
from nystrom_papers.studies.approximation.real_heads.recorded import LENGTH, WEIGHTS, LayerHeads, RealHeads, find_heads
from nystrom_papers.studies.approximation.real_heads.selection import framed_over_layers
from nystrom_papers.studies.reproduce.declared import Answer, Cells, Claim, Lines, Pivot, declare, each, only
from nystrom_papers.studies.reproduce.known import Known, holds_for_share, mean_of, quartiles_of, share_in, unanimous
from nystrom_papers.studies.reproduce.study import Figures, Plan, Setting, part

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

    times = [part(f"times-n={n}", time_rows, real.encoder, n, numbers) for n in lengths]
    timed = " ".join(map(str, lengths))
    return real.plan([*real.by_layer(measure), *times], numbers, draws=str(draws), timed=timed)


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


def _draw(folder: Path, columns: Mapping[str, str], title: str) -> Figures:
    lines = read_pictures(folder)
    columns = {"exact": "softmax matrix", **columns}
    captions = {
        (line, name): f"error {float(value):.2f}"
        for line, arrays in lines.items()
        for key, value in arrays.items()
        if (name := key.removeprefix("error of ")) != key
    }
    return {"": draw_maps(lines, columns=columns, captions=captions, bar=_BAR, title=title)}


def _draw_choice(rows: pd.DataFrame, folder: Path) -> Figures:
    title = f"n = {LENGTH}, m = {_CHOSEN}, 6 iterations; error: relative, in the Frobenius norm"
    return _draw(folder, _NAMES, title)


def _draw_numbers(rows: pd.DataFrame, folder: Path) -> Figures:
    title = f"n = {LENGTH}, segment means, 6 iterations; error: relative, in the Frobenius norm"
    errors = Lines(
        of={"quantity": (MATRIX, OUTPUT), "method": [method for method in _NAMES if method != "nystrom-columns"]},
        over="m", panel="{quantity}, {weights} weights", x_label="landmarks m", y_label="relative error",
        band="quartiles over the heads of a layer, mean over layers",
        names={"quantity": (MATRIX, OUTPUT), "weights": WEIGHTS},
    ).draw(rows)  # fmt: skip
    maps = _draw(folder, {str(m): f"m = {m}" for m in _PICTURED}, title)
    return maps if errors is None else {**maps, "errors": errors}


def _mean(rows: pd.DataFrame, quantity: str, method: str, m: int) -> Any:
    return only(rows, quantity, method=method, m=m, weights="pretrained", inverse="iterative")


def _against(method: str, rows: pd.DataFrame) -> tuple[list[Known], str]:
    """Ratios of the errors of a method to those of segment means in both norms, and the means in words."""
    ours, others = ([_mean(rows, norm, of, _CHOSEN) for norm in (MATRIX, SPECTRAL)] for of in ("nystrom", method))
    shown = " and ".join(
        f"{a.value:.3f} against {b.value:.3f} in the {name} norm ({a.value / b.value:.2f} times as large)"
        for a, b, name in zip(ours, others, ("Frobenius", "spectral"), strict=True)
    )
    return [mean_of(a).over(mean_of(b)) for a, b in zip(ours, others, strict=True)], shown


def _outperform(rows: pd.DataFrame) -> Answer:
    ratios, shown = _against("nystrom-uniform", rows)
    nearer = _mean(rows, NEARER, "nystrom", _CHOSEN)
    better = [None if (above := ratio.above()) is None else not above for ratio in ratios]
    return unanimous([*better, share_in(nearer).above(0.5)]), (
        f"mean relative error {shown}, nearer in {nearer.value:.0%} of {nearer.repeats} heads."
    )


def _compare(rows: pd.DataFrame) -> Answer:
    ratios, shown = _against("nystrom-kmeans", rows)
    return unanimous(ratio.within(most=_FAVORABLY) for ratio in ratios), f"mean relative error {shown}."


def _choosing(rows: pd.DataFrame) -> Answer:
    means, kmeans = (
        {(row.n, row.m): row for row in each(rows, CHOOSING, method=method)} for method in ("nystrom", "nystrom-kmeans")
    )
    times = [f"{row.value:.2f} against {kmeans[at].value:.2f} ms at n = {at[0]}" for at, row in means.items()]
    return holds_for_share(quartiles_of(kmeans[at]).over(quartiles_of(row)).above() for at, row in means.items()), (
        f"choosing takes {', '.join(times) or 'a time that was not measured'}."
    )


def _more_is_better(rows: pd.DataFrame) -> Answer:
    matrix, output = ([_mean(rows, quantity, "nystrom", m) for m in _PICTURED] for quantity in (MATRIX, OUTPUT))
    return holds_for_share(
        mean_of(few).over(mean_of(many)).above() for of in (matrix, output) for few, many in pairwise(of)
    ), (f"mean relative error of the matrix {_listed(matrix)}, of the output {_listed(output)} with 16, 64, 256.")


def _more_takes_longer(rows: pd.DataFrame) -> Answer:
    times = sorted(each(rows, ATTENTION, method="nystrom", m=_PICTURED), key=lambda row: (row.n, row.m))
    return holds_for_share(quartiles_of(many).over(quartiles_of(few)).above() for few, many in pairwise(times)), (
        f"attention takes {_listed(times)} ms with 16, 64 and 256."
    )


def _enough(rows: pd.DataFrame) -> Answer:
    good = _mean(rows, GOOD, "nystrom", 64)
    return share_in(good).within(least=0.5), (
        f"the relative error of the output is at most 0.1 in {good.value:.0%} of {good.repeats} heads."
    )


def _listed(rows: Sequence[Any]) -> str:
    return ", ".join(f"{row.value:.3f}" for row in rows)


_SUPPLEMENT = "Nyströmformer, supplement (A)"
_TIMES = Pivot(
    title="median times in ms, first layer of one text",
    index={"landmarks": "{method}", "n": "{n}", "m": "{m}"},
    columns=[Cells("choosing", CHOOSING, "{value:.2f}"), Cells("attention", ATTENTION, "{value:.2f}")],
    names={"method": _NAMES},
    left=1,
)
_study = partial(declare, framed=framed_over_layers(MATRIX, SPECTRAL, OUTPUT, NEARER, GOOD))
STUDIES = {
    "supplement-figure-1": _study(
        shows="attention matrices from random landmarks, segment means and k-means, beside the softmax matrix",
        source="Nyströmformer, supplement, Fig. 1",
        needs="an encoder: nystrom[real] or --model",
        paper_needs="--model with a trained BERT-base",
        minutes=1.9,
        plan=_plan_choice,
        tables=[
            Pivot(
                title=f"relative errors at m = {_CHOSEN}, mean over heads, {{weights}} weights",
                index={"landmarks": "{method}", "inverse": "{inverse}"},
                columns=[
                    Cells("Frobenius", MATRIX, m=_CHOSEN),
                    Cells("quartiles of a layer", MATRIX, "{low:.2g}–{high:.2g}", m=_CHOSEN),
                    Cells("spectral", SPECTRAL, m=_CHOSEN),
                    Cells("output", OUTPUT, m=_CHOSEN),
                ],
                names={"weights": WEIGHTS, "inverse": tuple(INVERSES), "method": _NAMES},
            ),
            _TIMES,
        ],
        claims=[
            Claim("Segment means with 64 landmarks outperform uniform random sampling.", _outperform, _SUPPLEMENT),
            Claim("Segment means compare favorably to k-means.", _compare, _SUPPLEMENT),
            Claim("Segment means are more efficient than the iterations of k-means.", _choosing, _SUPPLEMENT),
        ],
        figures=_draw_choice,
    ),
    "supplement-figure-2": _study(
        shows="attention matrices from 16, 64 and 256 landmarks, beside the softmax matrix",
        source="Nyströmformer, supplement, Fig. 2",
        needs="an encoder: nystrom[real] or --model",
        paper_needs="--model with a trained BERT-base",
        minutes=1.3,
        plan=_plan_numbers,
        tables=[
            *(
                Pivot(
                    title=f"{quantity}, pretrained weights",
                    index={"landmarks": "{method}"},
                    columns=[Cells("m={m}", quantity, weights="pretrained")],
                    names={"method": _NAMES},
                )
                for quantity in (MATRIX, OUTPUT)
            ),
            _TIMES,
        ],
        claims=[
            Claim("The more landmarks the better the approximation.", _more_is_better, _SUPPLEMENT),
            Claim("16 landmarks are more efficient, 256 require more time.", _more_takes_longer, _SUPPLEMENT),
            Claim(
                "64 landmarks are often sufficient to ensure a good approximation.", _enough, "Nyströmformer, section 3"
            ),
        ],
        figures=_draw_numbers,
    ),
}  # fmt: skip
