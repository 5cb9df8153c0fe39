r"""Fig. 2 and 3 of Nyströmformer: a softmax matrix, the three factors of its approximation, and their product.

$S = \mathrm{softmax}(Q K^\top / \sqrt d)$ is approximated by $\hat S = F Z B$ (eq. 15) with 64 segment means and six
iterations for the inverse, in float64. For each head, these compare the two matrices:

- the cosine similarity and Pearson's correlation of all entries, taken as two long vectors;
- the relative error $\|\hat S - S\|_F / \|S\|_F$;
- the total variation $\tfrac12 \sum_j |\hat S_{ij} - S_{ij}|$ of a row, averaged over the rows. Rows of S sum to 1 and
  those of $\hat S$ nearly so. If no entry were negative, this would be the share of the weight that falls on other
  tokens.

Rows hold the mean over the heads and texts of a layer, with quartiles. The matrix of near_far is measured beside that
of Nyström attention, with near_far's default options except `exact_up_to=0`: at 512 tokens it would otherwise be exact.
No claim rests on it.

Fig. 2 illustrates and claims nothing. It shows the one of the six heads of Fig. 3 whose similarity is the third
smallest.

Source: Xiong et al. (2021), arXiv:2102.03902, eq. 13 and 15, Fig. 2 and 3, without numbers.
"""

from collections.abc import Iterable
from functools import partial
from pathlib import Path

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from nystrom.attention.fused import softmax_rows
from nystrom.attention.methods.near_far import near_far_rows
from nystrom.attention.methods.nystrom import nystrom_factors
from nystrom_lab.measure.rows import Row
from nystrom_papers.report.plots.factors import draw_factors
from nystrom_papers.report.plots.maps import draw_maps
from nystrom_papers.studies.approximation.real_heads.pictures import read_pictures, save_pictures
from nystrom_papers.studies.approximation.real_heads.recorded import WEIGHTS, LayerHeads, find_heads
from nystrom_papers.studies.approximation.real_heads.selection import framed_over_layers
from nystrom_papers.studies.reproduce.declared import Answer, Cells, Claim, Pivot, declare, only
from nystrom_papers.studies.reproduce.known import share_in
from nystrom_papers.studies.reproduce.spread import spread_row
from nystrom_papers.studies.reproduce.study import Figures, Plan, Setting

_LANDMARKS, _LIKE = 64, 0.9
# Methods, with their numbers of landmarks.
_METHODS = {"nystrom": _LANDMARKS, "near_far": None}
_COSINE, _CORRELATION = "cosine similarity", "correlation"
_ERROR, _VARIATION = "relative error of the matrix", "total variation of a row"
_SIMILAR = "share of heads with a cosine similarity of 0.9"
_MEASURES = {_COSINE: "cosine", _CORRELATION: "correlation", _ERROR: "error", _VARIATION: "variation"}
_BAR = "attention weight, mean of 4 x 4 entries"
_FACTOR_BAR = "attention weight, long axes in means of 4"


def _plan(setting: Setting) -> Plan:
    real = find_heads(setting)
    return real.plan(real.by_layer(_measure), (_LANDMARKS,), methods=" ".join(_METHODS))


def _measure(heads: LayerHeads, folder: Path) -> Iterable[Row]:
    s = heads.softmax()
    factors = nystrom_factors(heads.q, heads.k, num_landmarks=_LANDMARKS)
    left, right = softmax_rows(heads.q, factors.k_landmarks), softmax_rows(factors.q_landmarks, heads.k)
    approximate = left @ factors.inverse @ right
    near_far = near_far_rows(heads.q, heads.k, torch.arange(s.shape[-1]), exact_up_to=0)
    similarities = {"nystrom": similarity(s, approximate), "near_far": similarity(s, near_far)}
    maps = {"exact": s, "left": left, "inverse": factors.inverse, "right": right, "nystrom": approximate}
    cosines = {f"{method} {_COSINE}": measured[_COSINE] for method, measured in similarities.items()}
    save_pictures(heads, maps | {"near_far": near_far} | cosines, folder)
    for method, m in _METHODS.items():
        kept = {"n": s.shape[-1], "m": m, "dtype": "float64"}
        for quantity, values in similarities[method].items():
            yield spread_row(quantity, method, values, facts=heads.facts, **kept)
            for head in heads.shown if quantity in _MEASURES else ():
                facts = {"layer": heads.layer + 1, "head": head + 1}
                yield spread_row(f"{quantity} of one head", method, values[0, head], facts=facts, **kept)


def similarity(
    exact: Float[Tensor, "b h n s"], approximate: Float[Tensor, "b h n s"]
) -> dict[str, Float[Tensor, "b h"]]:
    """Measures of how alike the two matrices of each head are, by the names of quantities."""
    x, y = exact.flatten(-2), approximate.flatten(-2)
    cosine = torch.cosine_similarity(x, y, dim=-1)
    about = [each - each.mean(dim=-1, keepdim=True) for each in (x, y)]
    return {
        _COSINE: cosine,
        _CORRELATION: torch.cosine_similarity(about[0], about[1], dim=-1),
        _ERROR: (y - x).norm(dim=-1) / x.norm(dim=-1),
        _VARIATION: 0.5 * (approximate - exact).abs().sum(dim=-1).mean(dim=-1),
        _SIMILAR: (cosine >= _LIKE).double(),
    }


def _alike(rows: pd.DataFrame) -> Answer:
    similar, cosine, variation = (
        only(rows, quantity, method="nystrom", weights="pretrained") for quantity in (_SIMILAR, _COSINE, _VARIATION)
    )
    return share_in(similar).within(least=0.5), (
        f"the cosine similarity is at least {_LIKE} in {similar.value:.0%} of {similar.repeats} heads, "
        f"{cosine.value:.2f} in the mean, and the total variation of a row is {variation.value:.2f} in the mean."
    )


def _draw_factors(rows: pd.DataFrame, folder: Path) -> Figures:
    lines = read_pictures(folder)
    ordered = sorted(lines, key=lambda line: float(lines[line][f"nystrom {_COSINE}"]))
    line = ordered[min(2, len(ordered) - 1)]
    cosine = float(lines[line][f"nystrom {_COSINE}"])
    title = f"{line}: n = {rows['n'].max()}, m = {_LANDMARKS}, cosine similarity {cosine:.2f}"
    return {"": draw_factors(lines[line], title=title, bar=_FACTOR_BAR)}


def _draw_heads(rows: pd.DataFrame, folder: Path) -> Figures:
    lines = read_pictures(folder)
    names = {"exact": "softmax", "nystrom": "Nyström", "near_far": "near and far"}
    captions = {
        (names[method], line): f"cosine {float(arrays[f'{method} {_COSINE}']):.2f}"
        for line, arrays in lines.items()
        for method in _METHODS
    }
    return {
        "": draw_maps(
            {name: {line: arrays[key] for line, arrays in lines.items()} for key, name in names.items()},
            columns={line: line.replace(", ", "\n") for line in lines},
            captions=captions,
            bar=_BAR,
        )
    }


_study = partial(
    declare,
    plan=_plan,
    framed=framed_over_layers(*_MEASURES, _SIMILAR),
    tables=[
        Pivot(
            title=f"all heads, m = {_LANDMARKS}",
            index={"weights": "{weights}", "beside exact attention": "{quantity}"},
            columns=[
                Cells(head, tuple(_MEASURES), text, method=method)
                for method in _METHODS
                for head, text in ((method, "{value:.3f}"), ("quartiles of a layer", "{low:.3f}–{high:.3f}"))
            ],
            names={"weights": WEIGHTS, "quantity": tuple(_MEASURES)},
        ),
        Pivot(
            title="the heads that are shown",
            index={name: f"{{{name}}}" for name in ("method", "layer", "head")},
            columns=[Cells(head, f"{quantity} of one head", "{value:.3f}") for quantity, head in _MEASURES.items()],
            left=1,
        ),
    ],
)
STUDIES = {
    "nystromformer-figure-2": _study(
        shows="one attention matrix and the three factors of its approximation",
        source="Nyströmformer, arXiv:2102.03902, Fig. 2",
        needs="an encoder: nystrom[real] or --model",
        paper_needs="--model with a trained BERT-base",
        minutes=0.3,
        figures=_draw_factors,
    ),
    "nystromformer-figure-3": _study(
        shows="attention of several heads, exact above approximate",
        source="Nyströmformer, arXiv:2102.03902, Fig. 3",
        needs="an encoder: nystrom[real] or --model",
        paper_needs="--model with a trained BERT-base",
        minutes=0.4,
        claims=[
            Claim(
                "The attention patterns of the approximation and of softmax are quite similar.", _alike,
                "Nyströmformer, Fig. 3",
            )
        ],
        figures=_draw_heads,
    ),
}  # fmt: skip
