r"""How nearly low-rank attention matrices are, and how well conditioned: softmax, its exponentials, Gaussian scores.

For every head of some layers, over n, in float64:

- "softmax", $D^{-1} A$;
- "unnormalised", $A = \exp(Q K^\top / \sqrt d)$;
- "kernelized", $C = D_Q^{-1/2} A D_K^{-1/2}$, the Gaussian scores of Skyformer, eq. 3.

Measured are the singular values relative to the largest; the share of the first 64 in the sum of their squares (the
energy); the effective rank (the exponential of the entropy of the singular values over their sum); and the condition
number. Float64 resolves condition numbers up to about $1 / (n\, \mathrm{eps})$, some $10^{13}$; larger ones count as
that limit. Which of two matrices has the smaller condition number is known if at least one of them is below the limit.

Claims, and the rule that decides each. Unless stated otherwise, a rule is applied at the longest n and must hold for
both kinds of weights. `nystrom_lab.studies.reproduce.known` says how precisely means and shares are known. A claim is
undecided where its limit lies inside that uncertainty, or where a kind of weights was not measured.

- Attention matrices are nearly low-rank, which makes few landmarks enough: the first 64 singular values of softmax hold
  at least nine tenths of the energy, in the mean over heads.
- "A very fast rate of singular value decay": the 64th singular value of softmax is at most a tenth of the first, in the
  mean over heads.
- The decay is "similar to that of an empirical kernel matrix": the effective ranks of softmax and of the Gaussian
  scores, in the mean over heads, differ by at most a factor of 2.
- "The un-normalized attention score matrices tend to have extremely large condition numbers": for A, the mean of the
  logarithm to base 10 is at least 6.
- Kernelized attention has "a more reasonable condition number than self-attention": the condition number of C is below
  that of $D^{-1} A$ in at least three quarters of the cases, one for each head at each n, in which it is known which is
  smaller. Initialised and pretrained weights have a verdict each.

Source: Chen et al. (2021), arXiv:2111.00035, sections 1, 2 and 4.1; Xiong et al. (2021), arXiv:2102.03902, which refers
to Wang et al. (2020), arXiv:2006.04768. None of them prints numbers of this kind.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from nystrom.kernels import gaussian_kernel, softmax_kernel
from nystrom_lab.measure.rows import Row
from nystrom_lab.report.plots.lines import draw_lines
from nystrom_lab.report.summary import Verdict
from nystrom_lab.report.table import Table
from nystrom_lab.studies.approximation.real_heads.selection import only_row, over_layers, rows_of
from nystrom_lab.studies.matrices.spectra import condition_number, effective_rank
from nystrom_lab.studies.reproduce.encoders import Encoder, Weights, find_encoder
from nystrom_lab.studies.reproduce.known import mean_of, most, share_of
from nystrom_lab.studies.reproduce.spread import spread_row
from nystrom_lab.studies.reproduce.study import Part, Plan, Setting, Study

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
        Part(f"{weights}-n={n}-layer={layer}", partial(_measure, encoder, weights, n, layer, texts))
        for weights, n, layer in product(_WEIGHTS, lengths, layers)
    ]
    said = {
        "model": encoder.name,
        "texts": encoder.prose.name,
        "lengths": " ".join(map(str, lengths)),
        "layers": " ".join(str(layer + 1) for layer in layers),
        "sequences": str(texts),
    }
    differs = "the papers cite this and measure nothing of it"
    return Plan(parts, said, differs if paper else f"{differs}; --size paper has all layers, more texts and lengths")


def _measure(encoder: Encoder, weights: Weights, n: int, layer: int, texts: int, folder: Path) -> Iterable[Row]:
    q, k, _ = encoder.record(n, texts, (layer,), weights=weights)[layer]
    facts = {"weights": weights, "layer": layer, "b": texts, "h": q.shape[1], "d": q.shape[3]}
    return spectrum_rows(q.double(), k.double(), facts=facts)


def spectrum_rows(
    q: Float[Tensor, "b h n d"], k: Float[Tensor, "b h n d"], *, facts: Mapping[str, object]
) -> Iterable[Row]:
    """Rows of the singular values of the three matrices of each head.

    Args:
        q: Queries, in float64.
        k: As many keys.
        facts: Facts of the heads, for the rows.
    """
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


def _pooled(rows: Sequence[Row], quantity: str, matrix: str, weights: str, n: int, m: int | None = None) -> Row:
    """The mean over all heads of all layers."""
    of = rows_of(rows, quantity, weights=weights)
    chosen = over_layers(row for row in of if (row.method, row.n, row.m) == (matrix, n, m))
    return only_row(chosen, f"{quantity} of {matrix}, {weights} weights, n = {n}")


def _lengths(rows: Sequence[Row]) -> list[int]:
    return sorted({row.n for row in rows if row.n})


def _tables(rows: Sequence[Row]) -> Sequence[Table]:
    lengths = _lengths(rows)
    tables = []
    for title, quantity, m in (
        (f"{RANK}, mean over heads", RANK, None),
        ("log10 of the condition number, mean over heads", CONDITION, None),
        ("share of the first 64 singular values in the energy", ENERGY, _FIRST),
        ("64th singular value over the first", SINGULAR, _FIRST),
    ):
        lines = [
            [f"{matrix}, {weights}", *(f"{_pooled(rows, quantity, matrix, weights, n, m).value:.3g}" for n in lengths)]
            for weights, matrix in product(_kinds(rows), MATRICES)
        ]
        tables.append(Table(title, ["matrix", *(f"n={n}" for n in lengths)], lines))
    return tables


def _kinds(rows: Sequence[Row]) -> list[str]:
    """Kinds of weights that have rows at every length."""
    found = {(row.fact("weights"), row.n) for row in rows}
    return [weights for weights in _WEIGHTS if all((weights, n) in found for n in _lengths(rows))]


def _verdicts(rows: Sequence[Row]) -> Sequence[Verdict]:
    n, kinds = max(_lengths(rows)), _kinds(rows)
    missing = [None] * (len(_WEIGHTS) - len(kinds))

    def decided(
        claim: str, quantity: str, m: int | None, matrix: str, rule: str, least: float, largest: float
    ) -> Verdict:
        means = {weights: _pooled(rows, quantity, matrix, weights, n, m) for weights in kinds}
        said = ", ".join(f"{row.value:.4g} ({weights})" for weights, row in means.items())
        answers = [mean_of(row).within(least, largest) for row in means.values()]
        return Verdict(claim, most([*answers, *missing]), f"{rule} {said or 'not known'} at n = {n}.")

    infinite = float("inf")
    return [
        decided(
            "Attention matrices are nearly low-rank.", ENERGY, _FIRST, "softmax",
            "the first 64 singular values hold a share of the energy of", 0.9, infinite,
        ),
        decided(
            "The singular values of attention matrices decay very fast.", SINGULAR, _FIRST, "softmax",
            "relative to the first, the 64th is", 0.0, 0.1,
        ),
        _similar(rows, n, kinds, missing),
        decided(
            "The unnormalised score matrices have extremely large condition numbers.", CONDITION, None, "unnormalised",
            "the mean of their logarithm is", 6.0, infinite,
        ),
        *(_better(rows, weights) for weights in _WEIGHTS),
    ]  # fmt: skip


def _similar(rows: Sequence[Row], n: int, kinds: Sequence[str], missing: Sequence[None]) -> Verdict:
    ranks = {w: [_pooled(rows, RANK, matrix, w, n) for matrix in ("softmax", "kernelized")] for w in kinds}
    said = ", ".join(f"{ours.value:.3g} and {kernel.value:.3g} ({w})" for w, (ours, kernel) in ranks.items())
    near = [mean_of(ours).over(mean_of(kernel)).within(0.5, 2) for ours, kernel in ranks.values()]
    return Verdict(
        "They decay as those of an empirical kernel matrix do.",
        most([*near, *missing]),
        f"the effective ranks of softmax and Gaussian scores are {said or 'not known'} at n = {n}.",
    )


def _better(rows: Sequence[Row], weights: str) -> Verdict:
    claim = f"Gaussian scores have a more reasonable condition number than softmax ({weights} weights)."
    those = [row for row in rows_of(rows, BETTER, weights=weights) if row.method == "kernelized"]
    known = sum(row.repeats for row in those)
    if not known:
        return Verdict(claim, None, "float64 resolves neither of the two condition numbers in any head.")
    better = sum(row.value * row.repeats for row in those)
    return Verdict(
        claim,
        share_of(better / known, known).within(least=0.75),
        f"it is smaller in {better:.0f} of the {known} cases (a head at one length) where this is known.",
    )


def _figures(rows: Sequence[Row], folder: Path) -> "Mapping[str, Figure]":
    longest = max(_lengths(rows))
    values = _panels([row for row in rows if row.quantity == SINGULAR and row.n == longest])
    drawn = {
        "": draw_lines(
            {f"{title}, n = {longest}": inside for title, inside in values.items()},
            over=lambda row: row.m,
            x_label="place of the singular value",
            y_label="singular value over the first",
            band="means of the quartiles over heads",
        )
    }
    for which, quantity, label in (("rank", RANK, RANK), ("condition", CONDITION, "log10 of the condition number")):
        drawn[which] = draw_lines(
            _panels([row for row in rows if row.quantity == quantity]),
            over=lambda row: row.n,
            x_label="tokens n",
            y_label=label,
            band="means of the quartiles over heads",
            log_y=quantity == RANK,
        )
    return drawn


def _panels(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by kind of weights, averaged over the heads of all layers."""
    panels: dict[str, list[Row]] = {}
    for row in over_layers(rows):
        panels.setdefault(f"{row.fact('weights')} weights", []).append(row)
    return panels


STUDIES = {
    "low-rank": Study(plan=_plan, tables=_tables, verdicts=_verdicts, figures=_figures),
}
