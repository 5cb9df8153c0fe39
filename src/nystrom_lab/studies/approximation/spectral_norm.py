r"""Fig. 1 of Skyformer: how far each method's output is from softmax attention's, over features and length.

For queries, keys and values of the first layer of an encoder, $Q, K, V = X W$ of an embedded text X, the error of a
method is the spectral norm $\|\hat O - O\|_2$ of the difference of the n x d outputs of a head, and relative to
$\|O\|_2$. Rows hold the mean over heads and texts, `low` and `high` being the quartiles.

The four methods of the paper's figure, with their size d: landmarks of nystrom and skyformer_softmax (what the figure
calls "Skyformer": d landmarks spread evenly, float32, with a ridge), random features of performer, queries and samples
of informer. Beside them the other methods of this library that approximate softmax attention, d being the mixtures of
linformer as initialised, and the keys that a query sees: longformer's window, bigbird's eight blocks, and the two
chunks of each of reformer's two rounds of hashes, with the keys that are given, and near_far's near tokens, heavy keys
and clusters together. linear has no such number.

At n = 512 there are two dense references in float64, which store n x n numbers and so are no methods of attention:

- "skyformer-independent", eq. 4-6 as printed: d landmarks drawn independently from the 2n queries and keys (Definition
  1), no ridge, the Moore-Penrose inverse; rows are normalised, and kept within the values' range, as
  skyformer_softmax does.
- "nystrom-columns", the standard Nyström method on d columns and rows of the softmax matrix itself (Nyströmformer,
  eq. 3-6): the same d tokens for both, drawn without replacement.

Claims and the rules that decide on them, on relative errors:

- "Significantly better with the increased number of features": in every panel the error of skyformer_softmax with the
  most features is at most half of its error with the fewest.
- "For other methods the gain is not obvious": in no panel does the error of nystrom, performer or informer fall by
  more than half from the fewest to the most features.
- Skyformer has the smallest error of the four methods at the same number of features: in at least nine tenths of the
  cells.

Where a panel has fewer than two sizes of one of the four, no rule decides.

Source: Chen et al. (2021), arXiv:2111.00035, section 4.5 and Fig. 1, which prints no numbers.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nystrom.attention.heads import build_attention
from nystrom.attention.method_names import near_far_keys, reformer_buckets, size_options
from nystrom.attention.registry import find_function
from nystrom.kernels import gaussian_kernel, half_norms
from nystrom.linalg import nystrom_columns_and_rows, nystrom_off_diagonal, spectral_norm, uniform_draws
from nystrom_lab.measure.rows import Row
from nystrom_lab.report.plots.lines import draw_lines
from nystrom_lab.report.summary import Verdict
from nystrom_lab.report.table import Table
from nystrom_lab.studies.reproduce.encoders import Encoder, Recording, Weights, find_encoder, instead_of_bert_base
from nystrom_lab.studies.reproduce.spread import spread_row
from nystrom_lab.studies.reproduce.study import Part, Plan, Setting, Study

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PAPERS = ("skyformer_softmax", "nystrom", "performer", "informer")
_OTHERS = ("linformer", "longformer", "bigbird", "reformer", "linear", "near_far")
_REFERENCES = ("skyformer-independent", "nystrom-columns")
# Where the dense references are computed.
_DENSE = 512
_WEIGHTS: tuple[Weights, ...] = ("initialised", "pretrained")
_ABSOLUTE, _RELATIVE = "spectral norm of the error", "relative spectral norm of the error"


def _plan(setting: Setting) -> Plan:
    if setting.size == "paper" and setting.model is None:
        raise ValueError("--size paper needs bert-base-cased: name its folder with --model.")
    lengths = (512, 1024, 2048, 4096) if setting.size == "paper" else (512, 1024, 2048)
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
        "methods": " ".join(_PAPERS + _OTHERS),
        "lengths": " ".join(map(str, lengths)),
        "features": " ".join(map(str, features)),
        "sequences": str(windows),
    }
    if setting.size == "small":
        model = f"{encoder.name} instead of bert-base-cased"
        lacks = model, f"{windows} texts", f"lengths to {max(lengths)} instead of 4096"
    else:
        lacks = instead_of_bert_base(encoder.folder), f"{encoder.prose.name} instead of Wikitext-2"
    return Plan(parts, said, ", ".join(filter(None, lacks)))


def _measure(
    encoder: Encoder, weights: Weights, n: int, features: Sequence[int], windows: int, folder: Path
) -> Iterable[Row]:
    given = encoder.record(n, windows, (0,), weights=weights)[0]
    exact = find_function("softmax")(*given)
    size = spectral_norm(exact.double())
    facts = {"weights": weights, "b": windows, "h": given.q.shape[1], "d": given.q.shape[3]}
    for method in _PAPERS + _OTHERS:
        for m in (None,) if method == "linear" else features:
            error = spectral_norm((_attend(method, given, m) - exact).double())
            yield spread_row(_ABSOLUTE, method, error, n=n, m=m, facts=facts, seed=0)
            yield spread_row(_RELATIVE, method, error / size, n=n, m=m, facts=facts, seed=0)
    if n == _DENSE:
        wide = Recording(*(x.double() for x in given))
        for m in features:
            for method, dense in zip(_REFERENCES, (_independent, _columns_and_rows), strict=True):
                error = spectral_norm(dense(wide, m) - exact.double())
                yield spread_row(_ABSOLUTE, method, error, n=n, m=m, facts=facts, seed=0, dtype="float64")
                yield spread_row(_RELATIVE, method, error / size, n=n, m=m, facts=facts, seed=0, dtype="float64")


def _attend(method: str, given: Recording, m: int | None) -> Float[Tensor, "b h n e"]:
    """A method's output with d = m."""
    n = given.k.shape[2]
    if method == "bigbird":
        options: dict[str, object] = {"num_random_blocks": 3, "block_size": (m or 0) // 8}
    elif method == "reformer":
        chunk = (m or 0) // 4
        options = {"chunk_size": chunk, "num_buckets": reformer_buckets(n, chunk), "shared_qk": False}
    elif method == "near_far":
        options = near_far_keys(m or 0)
    else:
        # A window is odd.
        options = size_options(method, None if m is None else m + (method == "longformer"))
    if method == "linformer":
        options["max_length"] = n
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        heads = build_attention(method, num_heads=given.q.shape[1], head_dim=given.q.shape[3], **options).eval()
        return heads(*given)


def _independent(given: Recording, m: int) -> Float[Tensor, "b h n e"]:
    """Eq. 4-6 of Skyformer on the softmax kernel, through the Gaussian kernel of Lemma 1, so that nothing overflows."""
    q, k, v = given
    scale = q.shape[-1] ** -0.5
    kernel = partial(gaussian_kernel, scale=scale)
    drawn = _draws(q, lambda generator: uniform_draws(q.shape[2] + k.shape[2], m, generator).indices)
    norms = half_norms(k, scale=scale)
    # The factors of the queries cancel against the sum of their row.
    scores = nystrom_off_diagonal(kernel, q, k, drawn) * torch.exp(norms - norms.amax(dim=2, keepdim=True)).mT
    total = scores.sum(dim=-1, keepdim=True)
    ratio = (scores @ v / torch.where(total > 0, total, 1.0)).clamp(v.amin(2, keepdim=True), v.amax(2, keepdim=True))
    return torch.where(total > 0, ratio, v.mean(dim=2, keepdim=True))


def _columns_and_rows(given: Recording, m: int) -> Float[Tensor, "b h n e"]:
    q, k, v = given
    s = torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, dim=-1)
    drawn = _draws(q, lambda generator: torch.randperm(q.shape[2], generator=generator)[:m])
    return nystrom_columns_and_rows(s, drawn, drawn) @ v


def _draws(q: Float[Tensor, "b h n d"], draw: Callable[[torch.Generator], Int[Tensor, " m"]]) -> Int[Tensor, "b h m"]:
    """Draws for each head and sequence."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.stack([draw(generator) for _ in range(q.shape[0] * q.shape[1])])
    return drawn.unflatten(0, tuple(q.shape[:2]))


def _panels(rows: Sequence[Row], quantity: str) -> dict[str, list[Row]]:
    panels: dict[str, list[Row]] = {}
    for row in rows:
        if row.quantity == quantity:
            weights = row.facts["weights"]
            panels.setdefault(f"{weights}, n = {row.n}", []).append(row)
    return panels


def _figures(rows: Sequence[Row], folder: Path) -> "Mapping[str, Figure]":
    papers, others = (*_PAPERS, *_REFERENCES), ("skyformer_softmax", *_OTHERS)
    return {
        "": _figure(rows, _RELATIVE, "relative error", papers),
        "absolute": _figure(rows, _ABSOLUTE, "spectral norm of the error", papers),
        "others": _figure(rows, _RELATIVE, "relative error", others),
    }


def _figure(rows: Sequence[Row], quantity: str, label: str, methods: Sequence[str]) -> "Figure":
    panels = _panels([row for row in rows if row.method in methods], quantity)
    columns = max(1, len({row.n for row in rows}))
    figure = draw_lines(
        panels,
        over=lambda row: row.m,
        x_label="features d",
        y_label=label,
        band="quartiles over heads and texts",
        columns=columns,
    )
    # The standard Nyström method is off by powers of ten where its sample is singular: panels end above the others.
    for axes, inside in zip(figure.axes, panels.values(), strict=False):
        top = 3 * max(row.value for row in inside if row.method != "nystrom-columns")
        if any(row.value > top for row in inside):
            axes.set_ylim(top=top)
            axes.annotate(
                "nystrom-columns: points\nthat are missing are above", (0.97, 0.98), xycoords="axes fraction", va="top",
                ha="right", fontsize=6.5, bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
            )  # fmt: skip
    return figure


def _tables(rows: Sequence[Row]) -> Sequence[Table]:
    tables = []
    for quantity in (_RELATIVE, _ABSOLUTE):
        for title, panel in _panels(rows, quantity).items():
            features = sorted({row.m for row in panel if row.m})
            lines = [
                [method, *(f"{errors.get(m, errors.get(None, math.nan)):.3g}" for m in features)]
                for method, errors in _errors(panel).items()
            ]
            tables.append(Table(f"{quantity}, {title}", ["method", *(f"d={m}" for m in features)], lines))
    return tables


def _errors(panel: Sequence[Row]) -> dict[str, dict[int | None, float]]:
    """Errors by method and size."""
    errors: dict[str, dict[int | None, float]] = {}
    for row in panel:
        errors.setdefault(row.method, {})[row.m] = row.value
    return errors


_CLAIMS = (
    "The modified Nyström method gains from more features.",
    "For the other methods the gain is not obvious.",
    "At the same number of features the modified Nyström method has the smallest error of the four.",
)


def _verdicts(rows: Sequence[Row]) -> Sequence[Verdict]:
    panels: list[dict[str, dict[int, float]]] = []
    for panel in _panels(rows, _RELATIVE).values():
        errors = _errors([row for row in panel if row.method in _PAPERS and row.m])
        panels.append({method: {m: value for m, value in of.items() if m} for method, of in errors.items()})
    if not panels or any(len(of.get(method, {})) < 2 for of in panels for method in _PAPERS):
        return [Verdict(claim, None, "a panel has fewer than two sizes of one of the methods.") for claim in _CLAIMS]
    # The first error over the last: how many times it falls.
    falls = {method: [of[method][min(of[method])] / of[method][max(of[method])] for of in panels] for method in _PAPERS}
    ours, others = falls["skyformer_softmax"], {method: max(falls[method]) for method in _PAPERS[1:]}
    cells = [(of, m) for of in panels for m in of["skyformer_softmax"]]
    wins = sum(all(of["skyformer_softmax"][m] <= of[other][m] for other in _PAPERS[1:]) for of, m in cells)
    return [
        Verdict(
            _CLAIMS[0],
            min(ours) >= 2,
            f"from the fewest to the most features its error falls {min(ours):.1f} to {max(ours):.1f} times.",
        ),
        Verdict(
            _CLAIMS[1],
            max(others.values()) <= 2,
            "their errors fall at most " + ", ".join(f"{f:.1f} ({m})" for m, f in others.items()) + " times.",
        ),
        Verdict(
            _CLAIMS[2],
            wins >= 0.9 * len(cells),
            f"it has it in {wins} of {len(cells)} cells.",
        ),
    ]


STUDIES = {
    "skyformer-figure-1": Study(plan=_plan, tables=_tables, verdicts=_verdicts, figures=_figures),
}
