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

Source: Chen et al. (2021), arXiv:2111.00035, Definitions 1 and 2, Theorem 2 and Limitations.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import combinations, product
from statistics import fmean
from typing import Any, NamedTuple

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from nystrom.kernels import gaussian_kernel, laplace_kernel, matern32_kernel, matern52_kernel
from nystrom_lab.measure.rows import Row
from nystrom_papers.studies.approximation.draw_errors import measure_draws, needed_draws, rounding
from nystrom_papers.studies.matrices.dense_nystrom import complete
from nystrom_papers.studies.matrices.spectra import leverage_scores, spectral_norm, statistical_dimension
from nystrom_papers.studies.reproduce.declared import Answer, Cells, Claim, Lines, NotMeasured, Pivot, declare, each
from nystrom_papers.studies.reproduce.encoders import Encoder, Weights, find_encoder
from nystrom_papers.studies.reproduce.known import Known, holds_for_share, mean_of, roughly, share_of
from nystrom_papers.studies.reproduce.spread import spread_row
from nystrom_papers.studies.reproduce.study import Plan, Setting, part

DELTA, SCORED = 0.1, 0.1
# Two heads are compared where the larger dimension is at least so many times the smaller.
_APART = 1.1
ERROR, TENTH = "relative error", "relative error that a tenth of the draws exceed"
WHOLE_TENTH = "relative error of the completion that a tenth of the draws exceed"
ABOVE, ORDERED = "share of draws above epsilon", "share of draws in the Loewner order"
BROKEN = "draws that break the chain of inequalities"
DIMENSION, BETA, BOUND = "statistical dimension", "beta", "draws of the bound"
NEEDED, NEEDED_ORDER = "draws needed for the error", "draws needed for the order"
EPSILONS = (0.5, 0.3, 0.2, 0.1, 0.05, 0.02)
_WEIGHTS: tuple[Weights, ...] = ("initialised", "pretrained")
KERNELS: Mapping[str, Callable[..., Tensor]] = {
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
        part(f"{weights}-layer={layer}-{which}-head", _head, encoder, weights, layer, which, extent)
        for weights, layer, which in places
    ]
    parts += [part(f"lengths-{weights}", _lengths, encoder, weights, layers, extent) for weights in _WEIGHTS]
    parts += [part(f"kernels-{weights}", _kernels, encoder, weights, layers, extent) for weights in _WEIGHTS]
    said = encoder.in_words(
        tokens=extent.n, columns=extent.columns, draws=extent.draws, lengths=extent.lengths,
        layers=[layer + 1 for layer in layers],
    )  # fmt: skip
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


def _head(encoder: Encoder, weights: Weights, layer: int, which: str, extent: _Extent) -> Iterable[Row]:
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

    With `leverage` columns are drawn in proportion to their leverage scores too.
    """
    n, kernel = len(q), partial(gaussian_kernel, scale=q.shape[-1] ** -0.5)
    completion = complete(kernel, q, k)
    norm, slack = spectral_norm(completion[:n, n:]).item(), rounding(completion)
    scores = {eps: leverage_scores(completion, eps * norm) for eps in EPSILONS}

    def row(
        quantity: str, method: str, value: float | None, m: int | None = None, eps: float | None = None,
        repeats: int = 1,
    ) -> Row:  # fmt: skip
        return Row(
            quantity=quantity, method=method, value=float("nan") if value is None else value, n=n, m=m,
            facts=facts if eps is None else {**facts, "eps": eps}, dtype="float64", seed=0, repeats=repeats,
            note=f"more than {columns[-1]} draws" if value is None else "",
        )  # fmt: skip

    broken, by_method = 0, {}
    shares = {"uniform": torch.ones(2 * n, dtype=q.dtype)} | ({"leverage": scores[SCORED]} if leverage else {})
    for method, of in shares.items():
        by_method[method] = [measure_draws(completion, partial(drawn, of, m), draws=draws, seed=0) for m in columns]
        for m, (block, whole, least) in zip(columns, by_method[method], strict=True):
            yield spread_row(ERROR, method, block / norm, n=n, m=m, facts=facts, dtype="float64", seed=0)
            yield row(TENTH, method, block.quantile(1 - DELTA).item() / norm, m, repeats=draws)
            yield row(WHOLE_TENTH, method, whole.quantile(1 - DELTA).item() / norm, m, repeats=draws)
            broken += (block > whole + slack).sum().item()
            for eps in EPSILONS:
                ordered = (least >= -slack) & (whole <= eps * norm)
                yield row(ABOVE, method, (block > eps * norm).double().mean().item(), m, eps, draws)
                yield row(ORDERED, method, ordered.double().mean().item(), m, eps, draws)
                broken += (ordered & (block > eps * norm + slack)).sum().item()
    yield row(BROKEN, "all", broken, repeats=draws * len(columns) * len(by_method))
    for eps in EPSILONS:
        dimension, most = scores[eps].sum().item(), scores[eps].amax().item()
        yield row(DIMENSION, "gaussian", dimension, eps=eps)
        yield row(BETA, "gaussian", dimension / (2 * n * most), eps=eps)
        yield row(BOUND, "gaussian", 2 * n * most * math.log(n / DELTA), eps=eps)
        for method, errors in by_method.items():
            needed = needed_draws(columns, [each.block for each in errors], eps * norm, DELTA)
            yield row(NEEDED, method, needed, eps=eps, repeats=draws)
            needed = needed_draws(columns, [each.whole for each in errors], eps * norm, DELTA)
            yield row(NEEDED_ORDER, method, needed, eps=eps, repeats=draws)


def drawn(shares: Float[Tensor, " all"], m: int, generator: torch.Generator) -> Int[Tensor, " m"]:
    """Columns drawn independently, with replacement and in proportion to shares."""
    if (shares == shares[0]).all():
        return torch.randint(len(shares), (m,), generator=generator)
    return torch.multinomial(shares / shares.sum(), m, replacement=True, generator=generator)


def _lengths(encoder: Encoder, weights: Weights, layers: Sequence[int], extent: _Extent) -> Iterable[Row]:
    for n, layer in product(extent.lengths, layers):
        for which, (q, k) in _recorded(encoder, weights, layer, n).items():
            completion = complete(partial(gaussian_kernel, scale=q.shape[-1] ** -0.5), q, k)
            norm = spectral_norm(completion[:n, n:])
            for eps in (SCORED, EPSILONS[0]):
                yield spread_row(
                    DIMENSION, "lengths", statistical_dimension(completion, eps * norm), n=n,
                    facts={"weights": weights, "layer": layer, "head": which, "eps": eps}, dtype="float64",
                )  # fmt: skip


def _kernels(encoder: Encoder, weights: Weights, layers: Sequence[int], extent: _Extent) -> Iterable[Row]:
    for layer, (name, kernel) in product(layers, KERNELS.items()):
        q, k = _recorded(encoder, weights, layer, extent.n)["first"]
        completion = complete(partial(kernel, scale=q.shape[-1] ** -0.5), q, k)
        norm = spectral_norm(completion[: extent.n, extent.n :])
        for m in extent.columns:
            draw = partial(drawn, torch.ones(2 * extent.n), m)
            block = measure_draws(completion, draw, draws=extent.draws // 10, seed=0, eigenvalues=False).block
            facts = {"weights": weights, "layer": layer, "head": "first"}
            yield spread_row(ERROR, name, block / norm, n=extent.n, m=m, facts=facts, dtype="float64", seed=0)


def _chain(rows: pd.DataFrame) -> Answer:
    counts = each(rows, BROKEN)
    broken, draws = sum(row.value for row in counts), sum(row.repeats for row in counts)
    return broken == 0 if counts else None, f"{broken:.0f} breaches in {draws} draws."


def _by_head(rows: pd.DataFrame, quantity: str, method: str) -> dict[tuple[str, ...], float]:
    """Values by head and epsilon."""
    return {(*_head_of(row), row.eps): row.value for row in each(rows, quantity, method=method)}


def _head_of(row: Any) -> tuple[str, ...]:
    return row.weights, row.layer, row.head


def _constant(rows: pd.DataFrame) -> Answer:
    bounds, needed = _by_head(rows, BOUND, "gaussian"), _by_head(rows, NEEDED_ORDER, "uniform")
    measured = max((row.m for row in each(rows, ORDERED)), default=0)
    ratios = {cell: d / bounds[cell] for cell, d in needed.items() if cell in bounds}
    finite = [ratio for ratio in ratios.values() if not math.isnan(ratio)]
    if not finite:
        return None, "no number of draws that was measured is enough for the order."
    # A number that was not found is above the largest measured one, and so refutes a bound that is below that.
    answers = [
        roughly(measured / bounds[cell] if math.isnan(ratio) else ratio).within(most=1)
        for cell, ratio in ratios.items()
        if not math.isnan(ratio) or roughly(bounds[cell]).high <= measured
    ]
    return False if False in answers else True if answers.count(True) > len(ratios) / 2 else None, (
        f"the bound is {1 / max(finite):.1f} to {1 / min(finite):.0f} times the draws that are needed, where "
        f"{len(finite)} of {len(ratios)} were found."
    )


def _growth(rows: pd.DataFrame) -> Answer:
    needed, dimension = _by_head(rows, NEEDED_ORDER, "uniform"), _by_head(rows, DIMENSION, "gaussian")
    concordant = []
    for a, b in combinations([cell for cell in needed if cell in dimension], 2):
        apart = max(dimension[a], dimension[b]) >= _APART * min(dimension[a], dimension[b])
        # A number that was not found is above the largest measured one.
        few, many = (math.inf if math.isnan(x) else x for x in (needed[a], needed[b]))
        if a[-1] == b[-1] and apart and few != many:
            concordant.append((dimension[a] < dimension[b]) == (few < many))
    right, count = sum(concordant), len(concordant)
    return share_of(right / max(count, 1), count).within(least=0.75), (
        f"in {right} of {count} pairs of heads at the same ε, the one with the larger dimension needs more draws."
    )


def _lengths_of(rows: pd.DataFrame, **where: str) -> list[dict[int, float]]:
    """Statistical dimensions over n of each head, at the middle epsilon."""
    by_head: dict[tuple[str, ...], dict[int, float]] = {}
    for row in each(rows, DIMENSION, method="lengths", eps=str(SCORED), **where):
        by_head.setdefault(_head_of(row), {})[row.n] = row.value
    heads = [of for of in by_head.values() if len(of) > 1]
    if not heads:
        raise NotMeasured("fewer than two lengths were measured.")
    return heads


def _short_sequences(rows: pd.DataFrame) -> Answer:
    shares = [{n: value / n for n, value in of.items()} for of in _lengths_of(rows)]
    first, last = [of[min(of)] for of in shares], [of[max(of)] for of in shares]
    falls = [roughly(a / b).above() for a, b in zip(first, last, strict=True)]
    return holds_for_share([roughly(max(first)).within(least=0.5), *falls]), (
        f"d_stat / n is {min(first):.2f} to {max(first):.2f} at n = {min(shares[0])} and {min(last):.2f} to "
        f"{max(last):.2f} at n = {max(shares[0])}; it falls by more than a tenth in {falls.count(True)} of "
        f"{len(shares)} heads."
    )


def _polylogarithmic(weights: str, rows: pd.DataFrame) -> Answer:
    heads = _lengths_of(rows, weights=weights)
    *_, before, last = sorted(heads[0])
    allowed = (math.log(last) / math.log(before)) ** 2
    growth = [of[last] / of[before] for of in heads]
    return holds_for_share((roughly(factor, 0.05).within(most=allowed) for factor in growth), 0.75), (
        f"from n = {before} to {last} it grows by a factor of {min(growth):.2f} to {max(growth):.2f}; (log n)^2 grows "
        f"by a factor of {allowed:.2f}."
    )


def _any_kernel(rows: pd.DataFrame) -> Answer:
    falls = {}
    for kernel in KERNELS:
        numbers = {row.m for row in each(rows, ERROR, method=kernel)}
        if len(numbers) > 1:
            few, many = (each(rows, ERROR, method=kernel, m=end(numbers)) for end in (min, max))
            falls[kernel] = _pooled(many).over(_pooled(few))
    shown = ", ".join(f"{low:.2f} to {high:.2f} ({kernel})" for kernel, (low, high) in falls.items())
    missing = [None] * (len(KERNELS) - len(falls))
    return holds_for_share([*(fall.within(most=0.5) for fall in falls.values()), *missing]), (
        f"with the most draws the mean error is {shown or 'an unmeasured share'} of that with the fewest, two standard "
        "errors to either side."
    )


def _pooled(rows: Sequence[Any]) -> Known:
    """The mean over heads."""
    return Known(*(fmean(ends) for ends in zip(*map(mean_of, rows), strict=True)))


_THEOREM, _LIMITS = "Skyformer, Theorem 2", "Skyformer, Limitations"
_POLYLOG = "The statistical dimension grows no faster than a power of log n ({}).".format
_HEADS = partial(Lines, panel="{weights}, layer {number}, {head}", options={"columns": 3})

STUDIES = {
    "skyformer-theorem-2": declare(
        shows="error of independent draws beside the statistical dimension",
        source="Skyformer, arXiv:2111.00035, Definition 2 and Theorem 2",
        needs="an encoder: nystrom[real] or --model",
        minutes=2.7,
        plan=_plan,
        tables=[
            *(
                Pivot(
                    title=title, index={"head": "{weights}, layer {number}, {head}"},
                    columns=[Cells("ε={eps}", quantity, "{value:.0f}", method=method)], missing="",
                )
                for title, quantity, method in (
                    ("statistical dimension, out of 2n", DIMENSION, "gaussian"),
                    ("draws of the bound with constant 1", BOUND, "gaussian"),
                    (f"{NEEDED_ORDER}, δ = {DELTA:g}", NEEDED_ORDER, "uniform"),
                    (f"{NEEDED}, δ = {DELTA:g}", NEEDED, "uniform"),
                    (f"{NEEDED_ORDER}, by leverage scores", NEEDED_ORDER, "leverage"),
                    (f"{NEEDED}, by leverage scores", NEEDED, "leverage"),
                )
            ),
            Pivot(
                title="mean relative error of kernels over heads", index={"kernel": "{method}, {weights}"},
                columns=[Cells("d={m}", ERROR, "{value:.3f}", pick=fmean)],
                names={"weights": _WEIGHTS, "method": tuple(KERNELS)},
            ),
        ],
        claims=[
            Claim(
                "If the Loewner order holds, the error of C is at most λ; it is never above that of the completion.",
                _chain, _THEOREM,
            ),
            Claim("d_stat / β log(n / δ) draws, with the constant 1, are enough for the Loewner order.", _constant),
            Claim("The draws that are needed grow with the statistical dimension.", _growth, _THEOREM),
            Claim(
                "For a short sequence the statistical dimension may be close to n; its share of n falls with the "
                "length.",
                _short_sequences, _LIMITS,
            ),
            Claim(_POLYLOG("initialised weights"), partial(_polylogarithmic, "initialised"), _LIMITS),
            Claim(_POLYLOG("pretrained weights, which the paper leaves open"), partial(_polylogarithmic, "pretrained")),
            Claim("Equations 4-6 take any positive semidefinite kernel.", _any_kernel, "Skyformer, section 4.2"),
        ],
        figures={
            "": _HEADS(
                of={"quantity": (DIMENSION, BOUND, NEEDED_ORDER, NEEDED), "method": ("gaussian", "uniform")},
                over="eps", line="{quantity}", x_label="ε", y_label="draws, or dimension", band="",
            ),
            "draws": _HEADS(
                of={"quantity": ABOVE, "method": "uniform"}, over="m", line="ε = {eps}", x_label="draws d",
                y_label="share δ of draws above ε", band="", options={"log_y": False, "columns": 3},
            ),
            "lengths": Lines(
                of={"quantity": DIMENSION, "method": "lengths", "eps": str(SCORED)}, over="n",
                panel="{weights} weights", line="layer {number}, {head}", x_label="tokens n",
                y_label="statistical dimension", band="",
            ),
            "kernels": _HEADS(
                of={"quantity": ERROR, "method": tuple(KERNELS)}, over="m", x_label="draws d",
                y_label="relative error", band="quartiles over draws",
            ),
        },
    ),
}  # fmt: skip
