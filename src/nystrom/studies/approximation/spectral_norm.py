r"""Fig. 1 of Skyformer: how far each method's output is from softmax attention's, over features and length.

For queries, keys and values of the first layer of an encoder, $Q, K, V = X W$ of an embedded text X, the error of a
method is the spectral norm $\|\hat O - O\|_2$ of the difference of the n x d outputs of a head, and relative to
$\|O\|_2$. Rows hold the mean over heads and texts, `low` and `high` being the quartiles.

Size m: landmarks of nystrom and skyformer_softmax (what the paper's figure calls "Skyformer"), random features of
performer, queries and samples of informer, mixtures of linformer as initialised, tokens of longformer's window.

Claims and the rules that decide on them, on relative errors:

- "Significantly better with the increased number of features": in every panel the error of skyformer_softmax with the
  most features is at most half of its error with the fewest.
- "For other methods the gain is not obvious": in no panel does the error of nystrom, performer or informer fall by
  more than half from the fewest to the most features.
- Skyformer has the smallest error of the four methods at the same number of features: in at least nine tenths of the
  cells.

Source: Chen et al. (2021), arXiv:2111.00035, section 4.5 and Fig. 1, which prints no numbers.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from nystrom.attention.heads import build_attention
from nystrom.attention.registry import find_function
from nystrom.measure.rows import Row
from nystrom.report.plots.lines import draw_lines
from nystrom.report.summary import Table, Verdict
from nystrom.studies.reproduce.encoders import Encoder, Weights, find_encoder
from nystrom.studies.reproduce.spread import spread_row
from nystrom.studies.reproduce.study import Part, Plan, Setting, Study
from nystrom.train.method_names import size_options

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PAPERS = ("skyformer_softmax", "nystrom", "performer", "informer")
_OTHERS = ("linformer", "longformer")
_WEIGHTS: tuple[Weights, ...] = ("initialised", "pretrained")
_ABSOLUTE, _RELATIVE = "spectral norm of the error", "relative spectral norm of the error"


def _plan(setting: Setting) -> Plan:
    if setting.size == "paper" and setting.model is None:
        raise ValueError("--size paper needs bert-base-cased: name its folder with --model.")
    lengths = (512, 1024, 2048, 4096) if setting.size == "paper" else (512, 1024)
    windows, features = (10 if setting.size == "paper" else 2), (16, 32, 64, 128, 256)
    encoder = find_encoder(setting)
    encoder.check_length(max(lengths), windows)
    parts = [
        Part(f"{weights}-n={n}", partial(_measure, encoder, weights, n, features, windows))
        for weights, n in product(_WEIGHTS, lengths)
    ]
    said = {
        "model": encoder.name,
        "texts": encoder.prose.name,
        "lengths": " ".join(map(str, lengths)),
        "features": " ".join(map(str, features)),
        "sequences": str(windows),
    }
    differs = (
        ""
        if setting.size == "paper"
        else (f"{encoder.name} instead of bert-base-cased, {windows} texts, lengths to {max(lengths)} instead of 4096")
    )
    return Plan(parts, said, differs)


def _measure(
    encoder: Encoder, weights: Weights, n: int, features: Sequence[int], windows: int, folder: Path
) -> Iterable[Row]:
    q, k, v = encoder.record(n, windows, (0,), weights=weights)[0]
    exact = find_function("softmax")(q, k, v)
    size = _spectral_norm(exact)
    for method, m in product(_PAPERS + _OTHERS, features):
        options = size_options(method, m + (method == "longformer"))
        if method == "linformer":
            options["max_length"] = n
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            heads = build_attention(method, num_heads=q.shape[1], head_dim=q.shape[3], **options).eval()
            error = _spectral_norm(heads(q, k, v) - exact)
        sizes = f"weights={weights} b={windows} h={q.shape[1]} d={q.shape[3]}"
        for quantity, values in ((_ABSOLUTE, error), (_RELATIVE, error / size)):
            yield spread_row(quantity, method, values, n=n, m=m, sizes=sizes, seed=0)


def _spectral_norm(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.matrix_norm(x.double(), ord=2)


def _panels(rows: Sequence[Row], quantity: str) -> dict[str, list[Row]]:
    panels: dict[str, list[Row]] = {}
    for row in rows:
        if row.quantity == quantity:
            weights = row.sizes.split()[0].removeprefix("weights=")
            panels.setdefault(f"{weights} weights, n = {row.n}", []).append(row)
    return panels


def _figures(rows: Sequence[Row], folder: Path) -> "Mapping[str, Figure]":
    return {
        which: draw_lines(
            _panels(rows, quantity),
            over=lambda row: row.m,
            x_label="features d",
            y_label=label,
            band="quartiles over heads and texts",
        )
        for which, quantity, label in (("", _RELATIVE, "relative error"), ("absolute", _ABSOLUTE, "spectral norm"))
    }


def _tables(rows: Sequence[Row]) -> Sequence[Table]:
    tables = []
    for title, panel in _panels(rows, _RELATIVE).items():
        features = sorted({row.m for row in panel if row.m})
        errors = _errors(panel)
        lines = [[method, *(f"{errors[method][m]:.3f}" for m in features)] for method in errors]
        tables.append(Table(f"{_RELATIVE}, {title}", ["method", *(f"d={m}" for m in features)], lines))
    return tables


def _errors(panel: Sequence[Row]) -> dict[str, dict[int, float]]:
    """Errors by method and size."""
    errors: dict[str, dict[int, float]] = {}
    for row in panel:
        errors.setdefault(row.method, {})[row.m or 0] = row.value
    return errors


def _verdicts(rows: Sequence[Row]) -> Sequence[Verdict]:
    panels = [_errors(panel) for panel in _panels(rows, _RELATIVE).values()]
    falls = {
        method: [errors[method][max(errors[method])] / errors[method][min(errors[method])] for errors in panels]
        for method in _PAPERS
    }
    ours, others = falls["skyformer_softmax"], {m: max(1 / f for f in falls[m]) for m in _PAPERS[1:]}
    cells = [(errors, m) for errors in panels for m in errors["skyformer_softmax"]]
    wins = sum(all(errors["skyformer_softmax"][m] <= errors[other][m] for other in _PAPERS[1:]) for errors, m in cells)
    return [
        Verdict(
            "The modified Nyström method gains from more features.",
            max(ours) <= 0.5,
            f"from the fewest to the most features its error falls to {min(ours):.2f} to {max(ours):.2f} of itself.",
        ),
        Verdict(
            "For the other methods the gain is not obvious.",
            max(others.values()) <= 2,
            "their errors fall at most by " + ", ".join(f"{f:.1f} ({m})" for m, f in others.items()) + " times.",
        ),
        Verdict(
            "At the same number of features the modified Nyström method has the smallest error of the four.",
            wins >= 0.9 * len(cells),
            f"it has it in {wins} of {len(cells)} cells.",
        ),
    ]


STUDIES = {
    "skyformer-figure-1": Study(plan=_plan, tables=_tables, verdicts=_verdicts, figures=_figures),
}
