r"""Definition 2 and Theorem 2 of Skyformer: the error of independent draws beside the statistical dimension.

$C = \kappa(Q / p^{1/4}, K / p^{1/4})$ is the Gaussian score matrix of a head, $\bar C$ its completion of 2n x 2n, and
$\tilde C$ the approximation from d columns drawn independently and uniformly (Definition 1). Let
$\lambda = \varepsilon \|C\|$. The leverage scores $\ell_i$ are the diagonal of $\bar C (\bar C + \lambda I)^{-1}$, the
statistical dimension is $d_{stat} = \sum_i \ell_i$, and $\beta = d_{stat} / (2n \max_i \ell_i)$. The theorem says: with
$$d \ge \mathrm{const} \cdot \frac{d_{stat}}\beta \log \frac n\delta$$
$\tilde C \preceq \bar C \preceq \tilde C + \lambda I$ (the Loewner order) holds with probability $1 - \delta$, and then
$\|C - \tilde C\| \le \lambda$.

All is measured in float64, at $\delta = 0.1$. The heads are the first and the middle one of the first and the last
layer with pretrained weights, and the first one of the first layer with initialised weights, whose heads are alike. For
each:

- the errors over many draws of each d, the share of draws that exceed $\varepsilon \|C\|$ (the $\delta$ of
  Definition 2), and the share that are in the Loewner order;
- how many draws are needed for the error, and how many for the order;
- for the first heads, the same with draws in proportion to the leverage scores at $\varepsilon = 0.1$.

Measured too are, for these heads of both layers with either kind of weights, $d_{stat}$ over n; and, for the first
heads, the errors with other kernels in place of the Gaussian, over a tenth of the draws. The paper states the theorem
and measures nothing.

Claims, and the rule that decides each. `nystrom_lab.studies.reproduce.known` says how precisely a number is known; a
number of one head is known to a tenth of itself. A claim is undecided where its limit lies inside that uncertainty.

- "If the Loewner order holds, the error is at most $\lambda$": in no draw is the error of C above that of its
  completion, and no draw in the order has an error of C above $\lambda$, at any $\varepsilon$. One breach refutes it.
- The bound with the constant 1, which is this library's, is enough: for more than half of all pairs of a head and an
  $\varepsilon$, the draws needed for the order are at most the bound. One pair that needs more than the bound refutes
  it. A pair for which no measured number was enough needs more than the largest one: it refutes the bound if that is
  below the largest, and is open otherwise.
- The number of draws needed grows with $d_{stat}$: of two heads at the same $\varepsilon$ whose dimensions differ by at
  least a tenth, the one with the larger dimension needs more draws, in at least three quarters of such pairs. Where no
  measured number was enough, the number needed is above the largest. Pairs whose numbers are equal are left out. (At a
  smaller $\varepsilon$ both grow by definition.)
- Limitations: "for small n the statistical dimension might be close to n": at the shortest n it is at least n/2 in some
  head, and d_stat / n falls from the shortest to the longest n in every head ($\varepsilon = 0.1$).
- "$d_{stat}$ should be $\tilde O(1)$", that is a power of log n: from the second longest n to the longest it grows at
  most as $(\log n)^2$ in at least three quarters of the heads, where the growth of a head is known to a twentieth of
  itself. For pretrained weights, for which the paper leaves it open, this is this library's claim.
- Equations 4-6 take "any PSD kernel": with each kernel, the mean error over the heads with the most draws is at most
  half of that with the fewest.

That draws in proportion to the leverage scores need fewer columns is no claim of the paper; the tables have their
numbers.

Source: Chen et al. (2021), arXiv:2111.00035, Definitions 1 and 2, Theorem 2 and Limitations.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from nystrom.kernels import gaussian_kernel, laplace_kernel, matern32_kernel, matern52_kernel
from nystrom_lab.measure.rows import Row, cpu_name, new_row
from nystrom_lab.report.table import Table
from nystrom_lab.studies.approximation.draw_errors import measure_draws, needed_draws, rounding
from nystrom_lab.studies.approximation.draw_findings import (
    ABOVE,
    BETA,
    BOUND,
    BROKEN,
    DELTA,
    DIMENSION,
    ERROR,
    NEEDED,
    NEEDED_ORDER,
    ORDERED,
    SCORED,
    TENTH,
    WHOLE_TENTH,
    decide,
    draw_dimension,
    values_of,
)
from nystrom_lab.studies.matrices.column_draws import leverage_draws, uniform_draws
from nystrom_lab.studies.matrices.dense_nystrom import complete
from nystrom_lab.studies.matrices.spectra import leverage_scores, spectral_norm, statistical_dimension
from nystrom_lab.studies.reproduce.encoders import Encoder, Weights, find_encoder
from nystrom_lab.studies.reproduce.spread import spread_row
from nystrom_lab.studies.reproduce.study import Part, Plan, Setting, Study

EPSILONS = (0.5, 0.3, 0.2, 0.1, 0.05, 0.02)
_WEIGHTS: tuple[Weights, ...] = ("initialised", "pretrained")
_KERNELS: Mapping[str, Callable[..., Tensor]] = {
    "gaussian": gaussian_kernel,
    "matern52": matern52_kernel,
    "matern32": matern32_kernel,
    "laplace": laplace_kernel,
}


class _Extent(NamedTuple):
    """How much is measured: tokens, numbers of columns, draws of each, and lengths for the dimension."""

    n: int
    columns: Sequence[int]
    draws: int
    lengths: Sequence[int]


_EXTENTS = {
    "small": _Extent(256, (8, 16, 32, 64, 128, 256), 100, (64, 128, 256, 512, 1024)),
    "paper": _Extent(1024, (8, 16, 32, 64, 128, 256, 512, 1024, 2048), 1000, (64, 128, 256, 512, 1024, 2048, 4096)),
}


def _plan(setting: Setting) -> Plan:
    extent = _EXTENTS[setting.size]
    encoder = find_encoder(setting)
    encoder.check_length(max(extent.lengths))
    layers = tuple(dict.fromkeys((0, encoder.layers - 1)))
    places: list[tuple[Weights, int, str]] = [("initialised", 0, "first")]
    places.extend(("pretrained", layer, which) for layer in layers for which in ("first", "middle"))
    parts = [
        Part(f"{weights}-layer={layer}-{which}-head", partial(_head, encoder, weights, layer, which, extent))
        for weights, layer, which in places
    ]
    parts += [Part(f"lengths-{weights}", partial(_lengths, encoder, weights, layers, extent)) for weights in _WEIGHTS]
    parts += [Part(f"kernels-{weights}", partial(_kernels, encoder, weights, layers, extent)) for weights in _WEIGHTS]
    said = {
        "model": encoder.name,
        "texts": encoder.prose.name,
        "tokens": str(extent.n),
        "columns": " ".join(map(str, extent.columns)),
        "draws": str(extent.draws),
        "lengths": " ".join(map(str, extent.lengths)),
        "layers": " ".join(str(layer + 1) for layer in layers),
    }
    differs = "the paper states the theorem and measures nothing"
    if setting.size == "small":
        differs += f"; --size paper has n = {_EXTENTS['paper'].n} and {_EXTENTS['paper'].draws} draws"
    return Plan(parts, said, differs)


def _recorded(
    encoder: Encoder, weights: Weights, layer: int, n: int
) -> dict[str, tuple[Float[Tensor, "n d"], Float[Tensor, "n d"]]]:
    """Queries and keys of the first and the middle head of a layer, in float64."""
    q, k, _ = encoder.record(n, 1, (layer,), weights=weights)[layer]
    return {which: (q[0, i].double(), k[0, i].double()) for which, i in (("first", 0), ("middle", q.shape[1] // 2))}


def _head(encoder: Encoder, weights: Weights, layer: int, which: str, extent: _Extent, folder: Path) -> Iterable[Row]:
    q, k = _recorded(encoder, weights, layer, extent.n)[which]
    facts = {"weights": weights, "layer": layer, "head": which}
    return head_rows(q, k, columns=extent.columns, draws=extent.draws, leverage=which == "first", facts=facts)


def head_rows(
    q: Float[Tensor, "n d"],
    k: Float[Tensor, "n d"],
    *,
    columns: Sequence[int],
    draws: int,
    leverage: bool,
    facts: Mapping[str, object],
) -> Iterable[Row]:
    """Rows of one head: errors over draws, the dimension, the bound, and how many draws are needed.

    Args:
        q: Queries, in float64.
        k: As many keys.
        columns: Numbers of columns d, rising.
        draws: Draws of each number.
        leverage: Whether columns are drawn in proportion to their leverage scores too.
        facts: Facts of the head, for the rows.
    """
    n, kernel = len(q), partial(gaussian_kernel, scale=q.shape[-1] ** -0.5)
    completion = complete(kernel, q, k)
    norm, slack = spectral_norm(completion[:n, n:]).item(), rounding(completion)
    scores = {eps: leverage_scores(completion, eps * norm) for eps in EPSILONS}

    def row(
        quantity: str,
        method: str,
        value: float | None,
        m: int | None = None,
        eps: float | None = None,
        repeats: int = 1,
    ) -> Row:
        return new_row(
            study="", quantity=quantity, method=method, value=float("nan") if value is None else value, unit="", n=n,
            m=m, facts=facts if eps is None else {**facts, "eps": eps}, dtype="float64", seed=0, repeats=repeats,
            device=cpu_name(), note=f"more than {columns[-1]} draws" if value is None else "",
        )  # fmt: skip

    broken, found = 0, {}
    ways = {"uniform": lambda m: partial(uniform_draws, 2 * n, m)}
    if leverage:
        ways["leverage"] = lambda m: partial(leverage_draws, scores[SCORED], m)
    for method, draw in ways.items():
        found[method] = [measure_draws(completion, draw(m), draws=draws, seed=0) for m in columns]
        for m, (block, whole, least) in zip(columns, found[method], strict=True):
            yield spread_row(ERROR, method, block / norm, n=n, m=m, facts=facts, dtype="float64", seed=0)
            yield row(TENTH, method, block.quantile(1 - DELTA).item() / norm, m, repeats=draws)
            yield row(WHOLE_TENTH, method, whole.quantile(1 - DELTA).item() / norm, m, repeats=draws)
            broken += (block > whole + slack).sum().item()
            for eps in EPSILONS:
                ordered = (least >= -slack) & (whole <= eps * norm)
                yield row(ABOVE, method, (block > eps * norm).double().mean().item(), m, eps, draws)
                yield row(ORDERED, method, ordered.double().mean().item(), m, eps, draws)
                broken += (ordered & (block > eps * norm + slack)).sum().item()
    yield row(BROKEN, "all", broken, repeats=draws * len(columns) * len(found))
    for eps in EPSILONS:
        dimension, most = scores[eps].sum().item(), scores[eps].amax().item()
        yield row(DIMENSION, "gaussian", dimension, eps=eps)
        yield row(BETA, "gaussian", dimension / (2 * n * most), eps=eps)
        yield row(BOUND, "gaussian", 2 * n * most * math.log(n / DELTA), eps=eps)
        for method, errors in found.items():
            needed = needed_draws(columns, [each.block for each in errors], eps * norm, DELTA)
            yield row(NEEDED, method, needed, eps=eps, repeats=draws)
            needed = needed_draws(columns, [each.whole for each in errors], eps * norm, DELTA)
            yield row(NEEDED_ORDER, method, needed, eps=eps, repeats=draws)


def _lengths(encoder: Encoder, weights: Weights, layers: Sequence[int], extent: _Extent, folder: Path) -> Iterable[Row]:
    for n, layer in product(extent.lengths, layers):
        for which, (q, k) in _recorded(encoder, weights, layer, n).items():
            completion = complete(partial(gaussian_kernel, scale=q.shape[-1] ** -0.5), q, k)
            norm = spectral_norm(completion[:n, n:])
            for eps in (SCORED, EPSILONS[0]):
                yield spread_row(
                    DIMENSION,
                    "lengths",
                    statistical_dimension(completion, eps * norm),
                    n=n,
                    facts={"weights": weights, "layer": layer, "head": which, "eps": eps},
                    dtype="float64",
                )


def _kernels(encoder: Encoder, weights: Weights, layers: Sequence[int], extent: _Extent, folder: Path) -> Iterable[Row]:
    for layer, (name, kernel) in product(layers, _KERNELS.items()):
        q, k = _recorded(encoder, weights, layer, extent.n)["first"]
        completion = complete(partial(kernel, scale=q.shape[-1] ** -0.5), q, k)
        norm = spectral_norm(completion[: extent.n, extent.n :])
        for m in extent.columns:
            draw = partial(uniform_draws, 2 * extent.n, m)
            block = measure_draws(completion, draw, draws=extent.draws // 10, seed=0, eigenvalues=False).block
            facts = {"weights": weights, "layer": layer, "head": "first"}
            yield spread_row(ERROR, name, block / norm, n=extent.n, m=m, facts=facts, dtype="float64", seed=0)


def _tables(rows: Sequence[Row]) -> Sequence[Table]:
    heads = [f"ε={eps:g}" for eps in EPSILONS]
    tables = []
    for title, quantity, method in (
        ("statistical dimension, out of 2n", DIMENSION, "gaussian"),
        ("draws of the bound with constant 1", BOUND, "gaussian"),
        (f"{NEEDED_ORDER}, δ = {DELTA:g}", NEEDED_ORDER, "uniform"),
        (f"{NEEDED}, δ = {DELTA:g}", NEEDED, "uniform"),
        (f"{NEEDED_ORDER}, by leverage scores", NEEDED_ORDER, "leverage"),
        (f"{NEEDED}, by leverage scores", NEEDED, "leverage"),
    ):
        values = values_of(rows, quantity, method)
        places = dict.fromkeys(head for head, _ in values)
        lines = [[head, *(_cell(values.get((head, f"{eps}"))) for eps in EPSILONS)] for head in places]
        tables.append(Table(title, ["head", *heads], lines))
    errors = [row for row in rows if row.quantity == ERROR and row.method in _KERNELS]
    columns = sorted({row.m for row in errors if row.m})
    lines = []
    for weights, kernel in product(_WEIGHTS, _KERNELS):
        those = [row for row in errors if row.method == kernel and row.fact("weights") == weights]
        if those:
            means = (fmean(row.value for row in those if row.m == m) for m in columns)
            lines.append([f"{kernel}, {weights}", *(f"{mean:.3f}" for mean in means)])
    tables.append(Table("mean relative error of kernels over heads", ["kernel", *(f"d={m}" for m in columns)], lines))
    return tables


def _cell(value: float | None) -> str:
    return "" if value is None else "–" if value != value else f"{value:.0f}"


STUDIES = {
    "skyformer-theorem-2": Study(
        shows="error of independent draws beside the statistical dimension",
        source="Skyformer, arXiv:2111.00035, Definition 2 and Theorem 2",
        needs="an encoder: nystrom[real] or --model",
        minutes=2.7,
        plan=_plan,
        tables=_tables,
        verdicts=decide,
        figures=draw_dimension,
    ),
}
