r"""Counted multiplications and stored numbers of every method over n and m, beside the formulas.

One sequence, one head, $d = d_v = 64$, float32, forward pass. Multiplications are those of matrix products, and stored
numbers are the peak beyond the inputs, both as defined by `nystrom_lab.measure.counting`. Everything is counted, and
nothing is timed. m is what the cost of a method grows with: landmarks, features, mixtures, queries and samples, or the
window. reformer and bigbird have their default options, and linear has none.

Nyströmformer's formulas are $n + m^3 + n m^2 + m n d_v$ multiplications and $m d + nm + m^2 + mn + n d_v$ stored
numbers (section 3, "Complexity analysis"), up to a constant. This library multiplies the inverse with the m x $d_v$
result of the right factor rather than with the n x m left factor, so $n m^2$ does not arise.

The exponent of a count is the slope of its logarithm over that of n, by least squares over the three longest n. At the
small size these are at least 128 m, since the claims are for m far below n. Quadratic methods are counted up to a
shorter n.

Claims, and the rule that decides each. Counts have no noise. A claim is undecided where it has no rows, a count has
fewer than three lengths, or the three longest n are below 32 m.

- Nyströmformer "scales linearly": the exponents of multiplications and stored numbers are at most 1.05, at every m.
  The verdict also has the exponents up to n = 2048, where the terms in m alone weigh.
- Its multiplications are $O(n + m^3 + n m^2 + m n d_v)$, and its memory is $O(m d + nm + m^2 + mn + n d_v)$: at every m
  they grow with n no faster than that; their exponent is at most 0.05 above that of the formula. The verdict also has
  the ratios of the counts to the formula.
- Softmax attention is quadratic: the exponent of its multiplications is between 1.95 and 2.05, as is that of the
  numbers stored by the materialised form.

Source: Xiong et al. (2021), arXiv:2102.03902, section 3, and the description page of Nyströmformer.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import linear_regression
from typing import TYPE_CHECKING

import torch

from nystrom.attention.heads import build_attention
from nystrom.attention.method_names import SIZES, size_options
from nystrom.attention.registry import METHODS
from nystrom_lab.measure.counting import count_multiplications, count_stored_numbers
from nystrom_lab.measure.rows import Row, cpu_name, new_row
from nystrom_lab.report.plots.lines import draw_lines
from nystrom_lab.report.summary import Verdict
from nystrom_lab.report.table import Table
from nystrom_lab.studies.reproduce.known import Known, most
from nystrom_lab.studies.reproduce.study import Part, Plan, Setting, Study

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MULTIPLICATIONS, STORED = "multiplications", "stored numbers"
PAPER, PAPER_STORED = "n + m^3 + n m^2 + m n d_v", "m d + 2 n m + m^2 + n d_v"
_WIDTH = 64
# The largest exponent of a linear count, the largest gap of equal exponents, and the least n of a claim over m.
_LINEAR, _APART, _FAR = 1.05, 0.05, 32
_DEFAULTS = ("reformer", "bigbird")
# The longest n of quadratic methods; materialised scores take a quarter of a gigabyte there.
_LIMITS = {"softmax": 16384, "kernelized": 16384, "softmax-materialised": 8192}


def _plan(setting: Setting) -> Plan:
    lengths = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
    sizes = (32, 64, 128, 256) if setting.size == "paper" else (32, 64, 128)
    parts = [Part(f"n={n}", partial(_measure, n, sizes)) for n in lengths]
    said = {"lengths": " ".join(map(str, lengths)), "m": " ".join(map(str, sizes)), "width": f"d = d_v = {_WIDTH}"}
    return Plan(parts, said, "the papers give formulas and count nothing")


def _measure(n: int, sizes: Sequence[int], folder: Path) -> Iterable[Row]:
    return count_rows(n, sizes)


def count_rows(n: int, sizes: Sequence[int]) -> Iterable[Row]:
    """Rows of the counts of all methods at one length, and of the formulas.

    Args:
        n: Tokens.
        sizes: Numbers m.
    """
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, _WIDTH, generator=generator) for _ in range(3))

    def row(quantity: str, method: str, value: float, m: int | None) -> Row:
        return new_row(
            study="", quantity=quantity, method=method, value=value, unit="", n=n, m=m,
            facts={"b": 1, "h": 1, "d": _WIDTH}, seed=0, device=cpu_name(),
        )  # fmt: skip

    for method, m in _cells(n, sizes):
        options = _options(method, n, m)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            heads = build_attention(method.partition("-")[0], num_heads=1, head_dim=_WIDTH, **options).eval()
            call = partial(heads, q, k, v)
            # Leaves what the first call sets up out of the count.
            call()
            yield row(MULTIPLICATIONS, method, count_multiplications(call), m)
            yield row(STORED, method, count_stored_numbers(call), m)
        if method == "nystrom" and m:
            yield row(PAPER, method, n + m**3 + n * m**2 + m * n * _WIDTH, m)
            yield row(PAPER_STORED, method, m * _WIDTH + n * m + m**2 + m * n + n * _WIDTH, m)


def _cells(n: int, sizes: Sequence[int]) -> Iterable[tuple[str, int | None]]:
    """Methods with the sizes at which they are counted."""
    for method in (*METHODS, "softmax-materialised"):
        sized = method in SIZES and method not in _DEFAULTS
        if n <= _LIMITS.get(method, n):
            yield from product((method,), sizes if sized else (None,))


def _options(method: str, n: int, m: int | None) -> dict[str, object]:
    if method == "softmax-materialised":
        return {"form": "materialised"}
    # A window is odd.
    options = size_options(method, None if m is None else m + (method == "longformer"))
    return options | ({"max_length": n} if method == "linformer" else {})


def slope(points: Mapping[int, float]) -> float:
    """The exponent of a count over n, from the three longest n."""
    longest = sorted(points)[-3:]
    return linear_regression([math.log(n) for n in longest], [math.log(points[n]) for n in longest]).slope


def _counts(rows: Sequence[Row], quantity: str) -> dict[tuple[str, int | None], dict[int, float]]:
    """Counts over n, by method and m."""
    counts: dict[tuple[str, int | None], dict[int, float]] = {}
    for row in rows:
        if row.quantity == quantity and row.n:
            counts.setdefault((row.method, row.m), {})[row.n] = row.value
    return counts


def _slopes(rows: Sequence[Row], quantity: str) -> dict[tuple[str, int | None], float]:
    return {cell: slope(points) for cell, points in _counts(rows, quantity).items() if len(points) >= 3}


def _tables(rows: Sequence[Row]) -> Sequence[Table]:
    counted, stored = (_slopes(rows, quantity) for quantity in (MULTIPLICATIONS, STORED))
    # The longest n that every method has.
    common = set.intersection(*(set(points) for points in _counts(rows, MULTIPLICATIONS).values()))
    shown_at = max(common)
    numbers = _counts(rows, MULTIPLICATIONS), _counts(rows, STORED)
    lines = []
    for method, m in numbers[0]:
        shown = (f"{of[method, m].get(shown_at, math.nan):.3g}".replace("nan", "–") for of in numbers)
        exponents = (f"{of[method, m]:.2f}" if (method, m) in of else "–" for of in (counted, stored))
        lines.append([method, "" if m is None else str(m), *shown, *exponents])
    heads = ["method", "m", "multipl.", "stored", "exponent", "of stored"]
    return [Table(f"counts at n = {shown_at}, and exponents of n", heads, lines)]


def _verdicts(rows: Sequence[Row]) -> Sequence[Verdict]:
    counted, stored = (_told(rows, quantity) for quantity in (MULTIPLICATIONS, STORED))
    ours = [of[cell] for of in (counted, stored) for cell in of if cell[0] == "nystrom"]
    short = [row for row in rows if row.method == "nystrom" and row.n and row.n <= 2048]
    early = [value for quantity in (MULTIPLICATIONS, STORED) for value in _slopes(short, quantity).values()]
    square = [counted[cell] for cell in counted if cell[0].startswith("softmax")]
    square += [stored[cell] for cell in stored if cell[0] == "softmax-materialised"]
    return [
        Verdict(
            "Nyströmformer scales linearly, in multiplications and stored numbers.",
            _at_most(ours, _LINEAR),
            f"its exponents are {_range(ours)} at the longest n, and {_range(early)} up to n = 2048.",
        ),
        Verdict(
            "Its multiplications are O(n + m^3 + n m^2 + m n d_v).",
            _grows_as(rows, MULTIPLICATIONS, PAPER),
            f"they are {_range(_ratios(rows, MULTIPLICATIONS, PAPER))} times that.",
        ),
        Verdict(
            "Its memory is O(m d + nm + m^2 + mn + n d_v).",
            _grows_as(rows, STORED, PAPER_STORED),
            f"it is {_range(_ratios(rows, STORED, PAPER_STORED))} times that.",
        ),
        Verdict(
            "Softmax attention is quadratic.",
            most(Known(value, value).within(1.95, 2.05) for value in square),
            f"its exponents are {_range(square)}.",
        ),
    ]


def _told(rows: Sequence[Row], quantity: str) -> dict[tuple[str, int | None], float]:
    """Exponents over the three longest n; NaN where there are fewer, or where they are not far above m."""
    slopes = _slopes(rows, quantity)
    return {
        cell: slopes[cell] if cell in slopes and min(sorted(points)[-3:]) >= _FAR * (cell[1] or 0) else math.nan
        for cell, points in _counts(rows, quantity).items()
    }


def _at_most(values: Iterable[float], limit: float) -> bool | None:
    return most(Known(value, value).within(most=limit) for value in values)


def _range(values: Sequence[float]) -> str:
    known = [value for value in values if not math.isnan(value)]
    return f"{min(known):.3f} to {max(known):.3f}" if known else "not known"


def _ratios(rows: Sequence[Row], quantity: str, formula: str) -> list[float]:
    """Ratios of counts to a formula, in every cell that has both."""
    counts, formulas = _counts(rows, quantity), _counts(rows, formula)
    return [counts[cell][n] / value for cell, of in formulas.items() for n, value in of.items()]


def _grows_as(rows: Sequence[Row], quantity: str, formula: str) -> bool | None:
    """Whether the counts of nystrom grow with n no faster than a formula, at every m."""
    counted, expected = _told(rows, quantity), _told(rows, formula)
    return _at_most((counted.get(cell, math.nan) - value for cell, value in expected.items()), _APART)


def _figures(rows: Sequence[Row], folder: Path) -> "Mapping[str, Figure]":
    middle = sorted({row.m for row in rows if row.m})[-2]
    panels = {
        f"{quantity}, m = {middle}": [row for row in rows if row.quantity == quantity and row.m in (None, middle)]
        for quantity in (MULTIPLICATIONS, STORED)
    }
    ours = [row for row in rows if row.method == "nystrom"]
    sizes = sorted({row.m for row in ours if row.m})
    formulas = {
        f"{quantity}, m = {m}": [
            replace(row, method="formula" if row.quantity == formula else row.method)
            for row in ours
            if row.m == m and row.quantity in (quantity, formula)
        ]
        for (quantity, formula), m in product(((MULTIPLICATIONS, PAPER), (STORED, PAPER_STORED)), sizes)
    }
    draw = partial(draw_lines, over=lambda row: row.n, x_label="tokens n", y_label="count", band="")
    return {"": draw(panels), "formula": draw(formulas, columns=len(sizes))}


STUDIES = {
    "complexity": Study(
        shows="counted multiplications and stored numbers beside the formulas",
        source="Nyströmformer, arXiv:2102.03902, section 3, and the description page",
        minutes=0.6,
        plan=_plan,
        tables=_tables,
        verdicts=_verdicts,
        figures=_figures,
    ),
}
