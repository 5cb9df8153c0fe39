"""What the rows of Theorem 2 say: verdicts by the rules of `statistical_dimension`, and its figures."""

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from nystrom_lab.measure.rows import Row
from nystrom_lab.report.plots.canvas import COLOURS, PAGE, REFERENCE, figure_of, plain_numbers
from nystrom_lab.report.plots.lines import draw_lines
from nystrom_lab.report.summary import Verdict
from nystrom_lab.studies.reproduce.known import Known, mean_of, most, roughly, share_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DELTA, SCORED = 0.1, 0.1
# Two heads are compared where the larger dimension is at least so many times the smaller.
_APART = 1.1
ERROR, TENTH = "relative error", "relative error that a tenth of the draws exceed"
WHOLE_TENTH = "relative error of the completion that a tenth of the draws exceed"
ABOVE, ORDERED = "share of draws above epsilon", "share of draws in the Loewner order"
BROKEN = "draws that break the chain of inequalities"
DIMENSION, BETA, BOUND = "statistical dimension", "beta", "draws of the bound"
NEEDED, NEEDED_ORDER = "draws needed for the error", "draws needed for the order"
KERNELS = ("gaussian", "matern52", "matern32", "laplace")


def head_of(row: Row) -> str:
    """The name of the head of a row, for people, such as "pretrained, layer 1, first"."""
    return f"{row.fact('weights')}, layer {int(row.fact('layer')) + 1}, {row.fact('head')}"


def values_of(rows: Sequence[Row], quantity: str, method: str) -> dict[tuple[str, str], float]:
    """Values by head and epsilon."""
    return {
        (head_of(row), row.fact("eps")): row.value for row in rows if row.quantity == quantity and row.method == method
    }


def decide(rows: Sequence[Row]) -> Sequence[Verdict]:
    """The verdicts, in the order of the rules."""
    return [
        _chain(rows),
        _constant(rows)._replace(ours=True),
        _growth(rows),
        _short_sequences(rows),
        _polylogarithmic(rows, "initialised"),
        _polylogarithmic(rows, "pretrained")._replace(ours=True),
        _any_kernel(rows),
    ]


def _chain(rows: Sequence[Row]) -> Verdict:
    claim = "If the Loewner order holds, the error of C is at most λ; it is never above that of the completion."
    counts = [row for row in rows if row.quantity == BROKEN]
    if not counts:
        return Verdict(claim, None, "no head was measured.")
    broken, draws = sum(row.value for row in counts), sum(row.repeats for row in counts)
    return Verdict(claim, broken == 0, f"{broken:.0f} breaches in {draws} draws.")


def _constant(rows: Sequence[Row]) -> Verdict:
    claim = "d_stat / β log(n / δ) draws, with the constant 1, are enough for the Loewner order."
    bounds, needed = values_of(rows, BOUND, "gaussian"), values_of(rows, NEEDED_ORDER, "uniform")
    measured = max((row.m for row in rows if row.m and row.quantity == ORDERED), default=0)
    ratios = {cell: d / bounds[cell] for cell, d in needed.items() if cell in bounds}
    found = [ratio for ratio in ratios.values() if not math.isnan(ratio)]
    if not found:
        return Verdict(claim, None, "no number of draws that was measured is enough for the order.")
    # A number that was not found is above the largest measured one, and so refutes a bound that is below that.
    answers = [
        roughly(measured / bounds[cell] if math.isnan(ratio) else ratio).within(most=1)
        for cell, ratio in ratios.items()
        if not math.isnan(ratio) or roughly(bounds[cell]).high <= measured
    ]
    return Verdict(
        claim,
        False if False in answers else True if answers.count(True) > len(ratios) / 2 else None,
        f"the bound is {1 / max(found):.1f} to {1 / min(found):.0f} times the draws that are needed, where "
        f"{len(found)} of {len(ratios)} were found.",
    )


def _growth(rows: Sequence[Row]) -> Verdict:
    needed, dimension = values_of(rows, NEEDED_ORDER, "uniform"), values_of(rows, DIMENSION, "gaussian")
    concordant = []
    for a, b in combinations([cell for cell in needed if cell in dimension], 2):
        apart = max(dimension[a], dimension[b]) >= _APART * min(dimension[a], dimension[b])
        # A number that was not found is above the largest measured one.
        few, many = (math.inf if math.isnan(x) else x for x in (needed[a], needed[b]))
        if a[1] == b[1] and apart and few != many:
            concordant.append((dimension[a] < dimension[b]) == (few < many))
    right, count = sum(concordant), len(concordant)
    return Verdict(
        "The draws that are needed grow with the statistical dimension.",
        share_of(right / max(count, 1), count).within(least=0.75),
        f"in {right} of {count} pairs of heads at the same ε, the one with the larger dimension needs more draws.",
    )


def lengths_of(rows: Sequence[Row], eps: float = SCORED) -> dict[str, dict[int, float]]:
    """Statistical dimensions by head and length."""
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        if row.method == "lengths" and row.fact("eps") == str(eps) and row.n:
            found.setdefault(head_of(row), {})[row.n] = row.value
    return found


def _short_sequences(rows: Sequence[Row]) -> Verdict:
    claim = "For a short sequence the statistical dimension may be close to n; its share of n falls with the length."
    shares = [{n: value / n for n, value in of.items()} for of in lengths_of(rows).values() if len(of) > 1]
    if not shares:
        return Verdict(claim, None, "fewer than two lengths were measured.")
    first, last = [of[min(of)] for of in shares], [of[max(of)] for of in shares]
    shortest, longest = min(shares[0]), max(shares[0])
    falls = [roughly(a / b).above() for a, b in zip(first, last, strict=True)]
    return Verdict(
        claim,
        most([roughly(max(first)).within(least=0.5), *falls]),
        f"d_stat / n is {min(first):.2f} to {max(first):.2f} at n = {shortest} and {min(last):.2f} to {max(last):.2f} "
        f"at n = {longest}; it falls by more than a tenth in {falls.count(True)} of {len(shares)} heads.",
    )


def _polylogarithmic(rows: Sequence[Row], weights: str) -> Verdict:
    doubt = "" if weights == "initialised" else ", which the paper leaves open"
    claim = f"The statistical dimension grows no faster than a power of log n ({weights} weights{doubt})."
    heads = [of for head, of in lengths_of(rows).items() if head.startswith(weights) and len(of) > 1]
    if not heads:
        return Verdict(claim, None, "fewer than two lengths were measured.")
    *_, before, last = sorted(heads[0])
    allowed = (math.log(last) / math.log(before)) ** 2
    growth = [of[last] / of[before] for of in heads]
    return Verdict(
        claim,
        most((roughly(factor, 0.05).within(most=allowed) for factor in growth), 0.75),
        f"from n = {before} to {last} it grows by a factor of {min(growth):.2f} to {max(growth):.2f}; (log n)^2 grows "
        f"by a factor of {allowed:.2f}.",
    )


def _any_kernel(rows: Sequence[Row]) -> Verdict:
    claim = "Equations 4-6 take any positive semidefinite kernel."
    falls = {}
    for kernel in KERNELS:
        errors: dict[int, list[Row]] = {}
        for row in rows:
            if row.quantity == ERROR and row.method == kernel and row.m:
                errors.setdefault(row.m, []).append(row)
        if len(errors) > 1:
            falls[kernel] = _pooled(errors[max(errors)]).over(_pooled(errors[min(errors)]))
    said = ", ".join(f"{low:.2f} to {high:.2f} ({kernel})" for kernel, (low, high) in falls.items())
    missing = [None] * (len(KERNELS) - len(falls))
    return Verdict(
        claim,
        most([*(fall.within(most=0.5) for fall in falls.values()), *missing]),
        f"with the most draws the mean error is {said or 'an unmeasured share'} of that with the fewest, two standard "
        "errors to either side.",
    )


def _pooled(rows: Sequence[Row]) -> Known:
    """The mean over heads."""
    return Known(*(fmean(ends) for ends in zip(*map(mean_of, rows), strict=True)))


def draw_dimension(rows: Sequence[Row], folder: Path) -> "Mapping[str, Figure]":
    """The figure of the theorem, and one of the errors with each kernel."""
    figure = figure_of(PAGE, 5.8)
    (first, second), (third, fourth) = figure.subplots(2, 2)
    for axes, weights in ((first, "initialised"), (second, "pretrained")):
        _shares(axes, rows, weights)
    handles, labels = max((axes.get_legend_handles_labels() for axes in (first, second)), key=lambda each: len(each[0]))
    title = "share of draws whose error of C is above ε‖C‖; dashed: that are not in the Loewner order for λ = ε‖C‖"
    figure.legend(handles, labels, loc="outside upper center", ncols=6, title=title, title_fontsize=7.5)
    _needed(third, rows)
    _lengths(fourth, rows)
    kernels: dict[str, list[Row]] = {}
    for row in rows:
        if row.quantity == ERROR and row.method in KERNELS:
            kernels.setdefault(head_of(row), []).append(row)
    drawn = {"": figure}
    if kernels:
        drawn["kernels"] = draw_lines(
            kernels, over=lambda row: row.m, x_label="draws d", y_label="relative error", band="quartiles over draws"
        )
    return drawn


def _shares(axes: "Axes", rows: Sequence[Row], weights: str) -> None:
    """Definition 2's delta over the draws, a line for each epsilon, of the head with the median dimension."""
    import matplotlib

    dimension = {
        head: value
        for (head, eps), value in values_of(rows, DIMENSION, "gaussian").items()
        if head.startswith(weights) and eps == str(SCORED)
    }
    if not dimension:
        axes.set_visible(False)
        return
    head = sorted(dimension, key=lambda each: dimension[each])[(len(dimension) - 1) // 2]
    those = [row for row in rows if row.method == "uniform" and row.m and head_of(row) == head]
    epsilons = sorted({row.fact("eps") for row in those if row.quantity == ABOVE}, key=float)
    for place, eps in enumerate(epsilons):
        colour = matplotlib.colormaps["viridis"](0.9 * place / max(1, len(epsilons) - 1))
        for quantity, style in ((ABOVE, "-"), (ORDERED, "--")):
            line = [row for row in those if row.quantity == quantity and row.fact("eps") == eps]
            heights = [row.value if quantity == ABOVE else 1 - row.value for row in line]
            label = f"ε = {eps}" if quantity == ABOVE else None
            axes.plot([row.m or 0 for row in line], heights, style, color=colour, label=label)
    axes.axhline(DELTA, color=REFERENCE, linewidth=0.8)
    axes.set_xscale("log", base=2)
    ticks = sorted({row.m or 0 for row in those})
    axes.set_xticks(ticks, [str(m) for m in ticks])
    axes.set_title(f"{head} head")
    axes.set_xlabel("draws d")
    axes.set_ylabel("share of draws δ")


def _needed(axes: "Axes", rows: Sequence[Row]) -> None:
    """The number of draws needed, and the bound, over the statistical dimension."""
    dimension = values_of(rows, DIMENSION, "gaussian")
    for quantity, method, label, colour, marker in (
        (BOUND, "gaussian", "the bound, constant 1", REFERENCE, "_"),
        (NEEDED_ORDER, "uniform", "needed for the order", COLOURS[1], "s"),
        (NEEDED_ORDER, "leverage", "the same, by leverage scores", COLOURS[2], "^"),
        (NEEDED, "uniform", "needed for the error of C", COLOURS[0], "o"),
    ):
        points = [
            (dimension[cell], value)
            for cell, value in values_of(rows, quantity, method).items()
            if cell in dimension and not math.isnan(value)
        ]
        axes.plot(
            [x for x, _ in points],
            [y for _, y in points],
            marker,
            color=colour,
            label=label,
            markersize=3.5,
            markerfacecolor="none",
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    low, high = min(dimension.values(), default=1), max(dimension.values(), default=2)
    axes.plot([low, high], [low, high], color="black", linewidth=0.7, linestyle=":", label="d = d_stat")
    plain_numbers(axes, "x")
    plain_numbers(axes, "y")
    axes.set_title(f"all heads and ε, δ = {DELTA:g}")
    axes.set_xlabel("statistical dimension")
    axes.set_ylabel("draws d")
    # Room above the bound.
    axes.set_ylim(top=2**19)
    axes.legend(fontsize=6.5, loc="upper left")


def _lengths(axes: "Axes", rows: Sequence[Row]) -> None:
    """The statistical dimension over n."""
    looks = {"initialised": (COLOURS[0], "o"), "pretrained": (COLOURS[1], "s")}
    heads = lengths_of(rows)
    axes.set_visible(bool(heads))
    for head, of in heads.items():
        weights = head.partition(",")[0]
        colour, marker = looks[weights]
        shown = [line.get_label() for line in axes.lines]
        label = f"{weights} weights" if f"{weights} weights" not in shown else None
        axes.plot(list(of), [value / n for n, value in of.items()], color=colour, marker=marker, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = sorted({n for of in heads.values() for n in of})
    axes.set_xticks(ticks, [str(n) for n in ticks])
    plain_numbers(axes, "y")
    axes.set_title(f"one line a head, ε = {SCORED:g}")
    axes.set_xlabel("tokens n")
    axes.set_ylabel("statistical dimension / n")
    if heads:
        axes.legend()
