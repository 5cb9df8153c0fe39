r"""How nearly low-rank attention matrices are, and how well conditioned: softmax, its exponentials, Gaussian scores.

For every head of some layers, over n, in float64:

- "softmax", $D^{-1} A$;
- "unnormalised", $A = \exp(Q K^\top / \sqrt d)$;
- "kernelized", $C = D_Q^{-1/2} A D_K^{-1/2}$, the Gaussian scores of Skyformer, eq. 3.

Measured are the singular values relative to the largest; the share of the first 64 in the sum of their squares (the
energy); the effective rank (the exponential of the entropy of the singular values over their sum); and the condition
number. Float64 resolves condition numbers up to about $1 / (n\, \mathrm{eps})$, some $10^{13}$; larger ones count as
that limit. Which of two matrices has the smaller condition number is known if at least one of them is below the limit.

Rows are means over the heads of a layer, pooled over the layers. Rules read the longest n, and both kinds of weights.

Source: Chen et al. (2021), arXiv:2111.00035, sections 1, 2 and 4.1; Xiong et al. (2021), arXiv:2102.03902, which refers
to Wang et al. (2020), arXiv:2006.04768. None of them prints numbers of this kind.
"""

import math
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import product

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from nystrom.kernels import gaussian_kernel, softmax_kernel
from nystrom_lab.measure.rows import Row
from nystrom_papers.studies.approximation.real_heads.selection import framed_over_layers
from nystrom_papers.studies.matrices.spectra import condition_number, effective_rank
from nystrom_papers.studies.reproduce.declared import (
    LONGEST,
    Answer,
    Cells,
    Claim,
    Lines,
    Pivot,
    Rule,
    declare,
    each,
    only,
)
from nystrom_papers.studies.reproduce.encoders import Encoder, Weights, find_encoder
from nystrom_papers.studies.reproduce.known import holds_for_share, mean_of, share_of
from nystrom_papers.studies.reproduce.spread import spread_row
from nystrom_papers.studies.reproduce.study import Plan, Setting, part

MATRICES = ("softmax", "unnormalised", "kernelized")
SINGULAR, ENERGY = "singular value over the first", "share of the first 64 in the energy"
RANK, CONDITION = "effective rank", "logarithm of the condition number"
BETTER = "share of heads with a smaller condition number than softmax"
_WEIGHTS: tuple[Weights, ...] = ("initialised", "pretrained")
_FIRST = 64
# Places of the singular values that are written to rows.
_SHOWN = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


def _plan(setting: Setting) -> Plan:
    encoder = find_encoder(setting)
    paper = setting.size == "paper"
    lengths = (64, 128, 256, 512, 1024, 2048) if paper else (64, 128, 256, 512)
    texts = 4 if paper else 1
    layers = tuple(range(encoder.layers) if paper else dict.fromkeys((0, encoder.layers // 2, encoder.layers - 1)))
    encoder.check_length(max(lengths), texts)
    parts = [
        part(f"{weights}-n={n}-layer={layer}", _measure, encoder, weights, n, layer, texts)
        for weights, n, layer in product(_WEIGHTS, lengths, layers)
    ]
    said = encoder.in_words(lengths=lengths, layers=[layer + 1 for layer in layers], sequences=texts)
    differs = "the papers cite this and measure nothing of it"
    return Plan(parts, said, differs if paper else f"{differs}; --size paper has all layers, more texts and lengths")


def _measure(encoder: Encoder, weights: Weights, n: int, layer: int, texts: int) -> Iterable[Row]:
    q, k, _ = encoder.record(n, texts, (layer,), weights=weights)[layer]
    facts = {"weights": weights, "layer": layer, "b": texts, "h": q.shape[1], "d": q.shape[3]}
    return spectrum_rows(q.double(), k.double(), facts=facts)


def spectrum_rows(
    q: Float[Tensor, "b h n d"], k: Float[Tensor, "b h n d"], *, facts: Mapping[str, object]
) -> Iterable[Row]:
    """Rows of the singular values of the three matrices of each head."""
    n, scale = q.shape[2], q.shape[-1] ** -0.5
    limit = 1 / (n * torch.finfo(q.dtype).eps)
    matrices = {
        "softmax": torch.softmax(scale * (q @ k.mT), dim=-1),
        "unnormalised": softmax_kernel(q, k, scale=scale),
        "kernelized": gaussian_kernel(q, k, scale=scale),
    }
    conditions: dict[str, Tensor] = {}
    for name, matrix in matrices.items():
        values = torch.linalg.svdvals(matrix)
        conditions[name] = condition_number(values).clamp(max=limit)
        row = partial(spread_row, method=name, n=n, facts=facts, dtype="float64")
        for place in _SHOWN:
            if place <= n:
                yield row(SINGULAR, values=values[..., place - 1] / values[..., 0], m=place)
        energy = values.square()
        yield row(ENERGY, values=energy[..., :_FIRST].sum(dim=-1) / energy.sum(dim=-1), m=_FIRST)
        yield row(RANK, values=effective_rank(values))
        yield row(CONDITION, values=conditions[name].log10())
    for name in MATRICES[1:]:
        known = torch.minimum(conditions[name], conditions["softmax"]) < limit
        if known.any():
            better = (conditions[name] < conditions["softmax"])[known].double()
            yield spread_row(BETTER, name, better, n=n, facts=facts, dtype="float64")


def _within(
    quantity: str, method: str, numbers: str, *, least: float = 0.0, most_: float = math.inf, m: int | None = None
) -> Rule:
    """The mean over heads lies between two limits, for both kinds of weights, at the longest n."""

    def decide(rows: pd.DataFrame) -> Answer:
        n = rows["n"].max()
        means = each(rows, quantity, method=method, n=n, m=m)
        shown = ", ".join(f"{mean.value:.4g} ({mean.weights})" for mean in means) or "not known"
        answers = [mean_of(mean).within(least, most_) for mean in means]
        return holds_for_share([*answers, *[None] * (len(_WEIGHTS) - len(means))]), f"{numbers} {shown} at n = {n}."

    return decide


def _similar(rows: pd.DataFrame) -> Answer:
    n = rows["n"].max()
    ranks = {w: [only(rows, RANK, method=x, weights=w, n=n) for x in ("softmax", "kernelized")] for w in _WEIGHTS}
    shown = ", ".join(f"{ours.value:.3g} and {kernel.value:.3g} ({w})" for w, (ours, kernel) in ranks.items())
    near = (mean_of(ours).over(mean_of(kernel)).within(0.5, 2) for ours, kernel in ranks.values())
    return holds_for_share(near), f"the effective ranks of softmax and Gaussian scores are {shown} at n = {n}."


def _better(weights: str, rows: pd.DataFrame) -> Answer:
    known = each(rows, BETTER, method="kernelized", weights=weights)
    count, better = sum(row.repeats for row in known), sum(row.value * row.repeats for row in known)
    if not count:
        return None, "float64 resolves neither of the two condition numbers in any head."
    shown = f"it is smaller in {better:.0f} of the {count} cases (a head at one length) where this is known."
    return share_of(better / count, count).within(least=0.75), shown


_CHEN = "Skyformer, section {}"
_CLAIMS = [
    Claim(
        "Attention matrices are nearly low-rank.",
        _within(ENERGY, "softmax", "the first 64 singular values hold a share of the energy of", least=0.9, m=_FIRST),
        "Nyströmformer, section 3",
    ),
    Claim(
        "The singular values of attention matrices decay very fast.",
        _within(SINGULAR, "softmax", "relative to the first, the 64th is", most_=0.1, m=_FIRST),
        _CHEN.format(2),
    ),
    Claim("They decay as those of an empirical kernel matrix do.", _similar, _CHEN.format(2)),
    Claim(
        "The unnormalised score matrices have extremely large condition numbers.",
        _within(CONDITION, "unnormalised", "the mean of their logarithm is", least=6.0),
        _CHEN.format(4.1),
    ),
    *(
        Claim(
            f"Gaussian scores have a more reasonable condition number than softmax ({weights} weights).",
            partial(_better, weights),
            _CHEN.format(4.1),
        )
        for weights in _WEIGHTS
    ),
]
_ORDER = {"weights": _WEIGHTS, "method": MATRICES}
_LINES = partial(Lines, panel="{weights} weights", names=_ORDER, band="means of the quartiles over heads")

STUDIES = {
    "low-rank": declare(
        shows="singular values of softmax and Gaussian score matrices",
        source="Nyströmformer, arXiv:2102.03902, section 3; Skyformer, arXiv:2111.00035, sections 2 and 4",
        needs="an encoder: nystrom[real] or --model",
        minutes=0.2,
        plan=_plan,
        framed=framed_over_layers(SINGULAR, ENERGY, RANK, CONDITION),
        tables=[
            Pivot(title=title, index={"matrix": "{method}, {weights}"}, columns=[cell], names=_ORDER)
            for title, cell in (
                ("effective rank, mean over heads", Cells("n={n}", RANK)),
                ("log10 of the condition number, mean over heads", Cells("n={n}", CONDITION)),
                ("share of the first 64 singular values in the energy", Cells("n={n}", ENERGY, m=_FIRST)),
                ("64th singular value over the first", Cells("n={n}", SINGULAR, m=_FIRST)),
            )
        ],
        claims=_CLAIMS,
        figures={
            "": _LINES(
                of={"quantity": SINGULAR, "n": LONGEST}, panel="{weights} weights, n = {n}", over="m",
                x_label="place of the singular value", y_label="singular value over the first",
            ),
            "rank": _LINES(of={"quantity": RANK}, over="n", x_label="tokens n", y_label=RANK),
            "condition": _LINES(
                of={"quantity": CONDITION}, over="n", x_label="tokens n", y_label="log10 of the condition number",
                options={"log_y": False},
            ),
        },
    ),
}  # fmt: skip
