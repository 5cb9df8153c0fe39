r"""Counted multiplications and stored numbers of every method over n and m, beside the formulas.

One sequence, one head, $d = d_v = 64$, float32, forward pass. Multiplications are those of matrix products, and stored
numbers are the peak beyond the inputs, both as defined by `nystrom_papers.studies.approximation.counting`. Everything
is counted, and nothing is timed. m is what the cost of a method grows with: landmarks, features, mixtures, queries and
samples, or the window. reformer and bigbird have their default options, and linear has none.

Nyströmformer's formulas are $n + m^3 + n m^2 + m n d_v$ multiplications and $m d + nm + m^2 + mn + n d_v$ stored
numbers (section 3, "Complexity analysis"), up to a constant. This library multiplies the inverse with the m x $d_v$
result of the right factor rather than with the n x m left factor, so $n m^2$ does not arise.

The exponent of a count is the slope of its logarithm over that of n, by least squares over the three longest n. At the
small size these are at least 128 m, since the claims are for m far below n. Quadratic methods are counted up to a
shorter n.

Source: Xiong et al. (2021), arXiv:2102.03902, section 3, and the description page of Nyströmformer.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import product
from statistics import linear_regression

import pandas as pd
import torch

from nystrom.attention.heads import build_attention
from nystrom.attention.method_names import SIZES, size_options
from nystrom.attention.registry import METHODS
from nystrom_lab.measure.rows import Row
from nystrom_lab.report.table import Table
from nystrom_papers.studies.approximation.counting import count_multiplications, count_stored_numbers
from nystrom_papers.studies.reproduce.declared import Answer, Claim, Lines, declare, each
from nystrom_papers.studies.reproduce.known import Known, holds_for_share
from nystrom_papers.studies.reproduce.study import Plan, Setting, in_words, part

MULTIPLICATIONS, STORED = "multiplications", "stored numbers"
PAPER, PAPER_STORED = "n + m^3 + n m^2 + m n d_v", "m d + 2 n m + m^2 + n d_v"
_WIDTH = 64
# The largest exponent of a linear count, the largest gap of equal exponents, and the least n of a claim over m.
_LINEAR, _APART, _FAR = 1.05, 0.05, 32
_BOTH = (MULTIPLICATIONS, STORED)
_DEFAULTS = ("reformer", "bigbird")
# The longest n of quadratic methods; materialised scores take a quarter of a gigabyte there.
_LIMITS = {"softmax": 16384, "kernelized": 16384, "softmax-materialised": 8192}


def _plan(setting: Setting) -> Plan:
    lengths = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
    sizes = (32, 64, 128, 256) if setting.size == "paper" else (32, 64, 128)
    parts = [part(f"n={n}", count_rows, n, sizes) for n in lengths]
    said = in_words(lengths=lengths, m=sizes, width=f"d = d_v = {_WIDTH}")
    return Plan(parts, said, "the papers give formulas and count nothing")


def count_rows(n: int, sizes: Sequence[int]) -> Iterable[Row]:
    """Rows of the counts of all methods at one length, and of the formulas."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, _WIDTH, generator=generator) for _ in range(3))

    def row(quantity: str, method: str, value: float, m: int | None) -> Row:
        return Row(quantity=quantity, method=method, value=value, n=n, m=m, facts={"b": 1, "h": 1, "d": _WIDTH}, seed=0)

    for method, m in _cells(n, sizes):
        # A window is odd.
        options = size_options(method, None if m is None else m + (method == "longformer"))
        options |= {"form": "materialised"} if method == "softmax-materialised" else {}
        options |= {"max_length": n} if method == "linformer" else {}
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


def slope(points: Mapping[int, float]) -> float:
    """The exponent of a count over n, from the three longest n."""
    longest = sorted(points)[-3:]
    return linear_regression([math.log(n) for n in longest], [math.log(points[n]) for n in longest]).slope


def _counts(rows: pd.DataFrame, quantity: str) -> dict[tuple[str, int | None], dict[int, float]]:
    """Counts over n, by method and m."""
    counts: dict[tuple[str, int | None], dict[int, float]] = {}
    for row in each(rows, quantity):
        counts.setdefault((row.method, row.m), {})[row.n] = row.value
    return counts


def _slopes(rows: pd.DataFrame, quantity: str) -> dict[tuple[str, int | None], float]:
    return {cell: slope(points) for cell, points in _counts(rows, quantity).items() if len(points) >= 3}


def _told(rows: pd.DataFrame, quantity: str) -> dict[tuple[str, int | None], float]:
    """Exponents over the three longest n; NaN where there are fewer, or where they are not far above m."""
    slopes = _slopes(rows, quantity)
    return {
        cell: slopes[cell] if cell in slopes and min(sorted(points)[-3:]) >= _FAR * (cell[1] or 0) else math.nan
        for cell, points in _counts(rows, quantity).items()
    }


def _table(rows: pd.DataFrame) -> list[Table]:
    counts, stored = (_counts(rows, quantity) for quantity in (MULTIPLICATIONS, STORED))
    # The longest n that every method has.
    at = max(set.intersection(*map(set, counts.values())))
    slopes = [_slopes(rows, quantity) for quantity in (MULTIPLICATIONS, STORED)]
    lines = []
    for cell in counts:
        exponents = (f"{of[cell]:.2f}" if cell in of else "–" for of in slopes)
        numbers = (f"{of[cell][at]:.3g}" if at in of[cell] else "–" for of in (counts, stored))
        lines.append([cell[0], "" if cell[1] is None else str(cell[1]), *numbers, *exponents])
    heads = ["method", "m", "multipl.", "stored", "exponent", "of stored"]
    return [Table(f"counts at n = {at}, and exponents of n", heads, lines)]


def _linear(rows: pd.DataFrame) -> Answer:
    ours = [value for of in _BOTH for cell, value in _told(rows, of).items() if cell[0] == "nystrom"]
    short = rows.loc[(rows["method"] == "nystrom") & (rows["n"] <= 2048)]
    early = [value for of in _BOTH for value in _slopes(short, of).values()]
    return _at_most(
        ours, _LINEAR
    ), f"its exponents are {_range(ours)} at the longest n, and {_range(early)} up to n = 2048."


def _grows_as(quantity: str, formula: str, words: str, rows: pd.DataFrame) -> Answer:
    """Whether the counts of nystrom grow with n no faster than a formula, at every m."""
    counted, expected = _told(rows, quantity), _told(rows, formula)
    counts, formulas = _counts(rows, quantity), _counts(rows, formula)
    ratios = [counts[cell][n] / value for cell, of in formulas.items() for n, value in of.items()]
    gaps = [counted.get(cell, math.nan) - value for cell, value in expected.items()]
    return _at_most(gaps, _APART), f"{words} {_range(ratios)} times that."


def _quadratic(rows: pd.DataFrame) -> Answer:
    square = [value for cell, value in _told(rows, MULTIPLICATIONS).items() if cell[0].startswith("softmax")]
    square += [value for cell, value in _told(rows, STORED).items() if cell[0] == "softmax-materialised"]
    return holds_for_share(
        Known(value, value).within(1.95, 2.05) for value in square
    ), f"its exponents are {_range(square)}."


def _at_most(values: Iterable[float], limit: float) -> bool | None:
    return holds_for_share(Known(value, value).within(most=limit) for value in values)


def _range(values: Sequence[float]) -> str:
    known = [value for value in values if not math.isnan(value)]
    return f"{min(known):.3f} to {max(known):.3f}" if known else "not known"


_SECTION = "Nyströmformer, section 3"
_SHOWN = partial(Lines, over="n", x_label="tokens n", y_label="count", band="", options={"columns": 3})
STUDIES = {
    "complexity": declare(
        shows="counted multiplications and stored numbers beside the formulas",
        source="Nyströmformer, arXiv:2102.03902, section 3, and the description page",
        minutes=0.6,
        plan=_plan,
        tables=[_table],
        claims=[
            Claim("Nyströmformer scales linearly, in multiplications and stored numbers.", _linear, _SECTION),
            Claim(
                "Its multiplications are O(n + m^3 + n m^2 + m n d_v).",
                partial(_grows_as, MULTIPLICATIONS, PAPER, "they are"), _SECTION,
            ),
            Claim(
                "Its memory is O(m d + nm + m^2 + mn + n d_v).", partial(_grows_as, STORED, PAPER_STORED, "it is"),
                _SECTION,
            ),
            Claim("Softmax attention is quadratic.", _quadratic, _SECTION),
        ],
        figures={
            "": _SHOWN(of={"quantity": _BOTH, "m": (None, 64)}, panel="{quantity}, m = 64", options={}),
            "formula": _SHOWN(
                of={"quantity": (*_BOTH, PAPER, PAPER_STORED), "method": "nystrom"},
                panel="m = {m}", line="{quantity}",
            ),
        },
    ),
}  # fmt: skip
