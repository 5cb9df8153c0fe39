"""What the rows of the convergence say: tables, verdicts on the claims, and curves over the iterations."""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING

from nystrom_lab.measure.rows import Row
from nystrom_lab.report.plots.bands import draw_bands
from nystrom_lab.report.summary import Verdict
from nystrom_lab.report.table import Table
from nystrom_lab.studies.approximation.convergence import (
    CONDITION,
    CUBED,
    DISTANCE,
    LEMMA_HOLDS_AT_START,
    MATRIX,
    NEAR,
    NEAR_ENOUGH,
    ORDER,
    REGULAR,
    RESIDUAL,
    STARTS,
    STARTS_BELOW,
)
from nystrom_lab.studies.approximation.real_heads.recorded import WEIGHTS
from nystrom_lab.studies.approximation.real_heads.selection import rows_of, step_of
from nystrom_lab.studies.reproduce.known import Known, most, quartiles_of, share_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN, ITERATIONS, STEPS = 64, 6, 24
# The order required, the least number of steps to see it in, and the norm that is above 1 by more than rounding.
_ORDER, _FEW, _ABOVE = 2.9, 12, 1 + 1e-9
_DTYPES, _PRINTED = ("float64", "float32"), (2, 4, 6, 12, 18, 24)


def convergence_tables(rows: Sequence[Row]) -> Sequence[Table]:
    """Distances over the iterations, how far Lemma 1 holds, and for how many heads the start value is below 1."""
    starts, distances, lemmas = [], [], []
    for weights, m in product(WEIGHTS, _numbers(rows)):
        condition = _one(rows, CONDITION, "softmax", m, weights=weights)
        head = [weights, str(m)]
        if condition is None:
            continue
        for z0 in STARTS:
            shares = [
                _value(rows, quantity, z0, m, dtype, weights=weights, k="0")
                for quantity, dtype in product((STARTS_BELOW, LEMMA_HOLDS_AT_START), _DTYPES)
            ]
            starts.append([*head, z0, *(f"{share:.0%}" for share in shares)])
        cells = [_value(rows, DISTANCE, "paper", m, weights=weights, k=str(k)) for k in _PRINTED]
        distances.append([*head, f"{condition.value:.1e}", *(f"{cell:.2g}" for cell in cells)])
        order, within = (_one(rows, quantity, "paper", m, weights=weights) for quantity in (ORDER, CUBED))
        near = [_value(rows, NEAR, "paper", m, dtype, weights=weights, k="6") for dtype in _DTYPES]
        ridge = _value(rows, DISTANCE, "ridge", m, weights=weights)
        lemmas.append(
            [
                *head,
                "–" if within is None else f"{within.value:.1%}",
                "–" if order is None else f"{order.value:.2f}",
                *(f"{share:.0%}" for share in near),
                f"{ridge:.2g}",
            ]
        )
    heads = ["weights", "m", "cond.", *(f"k={k}" for k in _PRINTED)]
    return [
        Table("distance to the pseudoinverse after k iterations, medians", heads, distances),
        Table(
            "Lemma 1: steps within the cube, and order; heads within 0.1 of the pseudoinverse after 6 iterations in "
            "float64 and float32; distance with a ridge",
            ["weights", "m", "cubed", "order", "float64", "float32", "ridge"],
            lemmas,
        ),
        Table(
            "share of heads whose start value is below 1 as computed, in its residual and in the norm of Lemma 1, each "
            "in float64 and in float32",
            ["weights", "m", "z0", "|I-AZ|", "float32", "Lemma 1", "float32"],
            starts,
            left=3,
        ),
    ]


def decide_convergence(rows: Sequence[Row]) -> Sequence[Verdict]:
    """The claims of Fig. 3 and Lemma 1, decided by the rules of `nystrom_lab.studies.approximation.pseudoinverse`."""
    return [_six_are_enough(rows), _third_order(rows), _start(rows)]


def _six_are_enough(rows: Sequence[Row]) -> Verdict:
    claim = "Six iterations achieve a good approximation of the pseudoinverse."
    share = _one(rows, NEAR, "paper", SHOWN, weights="pretrained", k=str(ITERATIONS))
    if share is None:
        return Verdict(claim, None, f"no head was measured with {SHOWN} landmarks.")
    near = {k: _value(rows, NEAR, "paper", SHOWN, weights="pretrained", k=str(k)) for k in range(STEPS + 1)}
    half = next((str(k) for k, value in near.items() if value >= 0.5), f"more than {STEPS}")
    residual = _value(rows, RESIDUAL, "paper", SHOWN, weights="pretrained", k=str(ITERATIONS))
    errors = {k: _value(rows, MATRIX, "paper", SHOWN, weights="pretrained", k=str(k)) for k in range(STEPS + 1)}
    best = min(errors, key=lambda k: errors[k])
    exact = _value(rows, MATRIX, "exact", SHOWN, weights="pretrained")
    return Verdict(
        claim,
        share_of(share.value, share.repeats).within(least=0.5),
        f"after {ITERATIONS} with {SHOWN} landmarks, {share.value:.0%} of {share.repeats} heads are within "
        f"{NEAR_ENOUGH} of the pseudoinverse, and the median norm of I - A Z is {residual:.2f}; half of the heads are "
        f"that close after {half}. The attention matrix is nearest to the exact one after {best} (median error "
        f"{errors[best]:.2f}; {errors[ITERATIONS]:.2f} after {ITERATIONS}, {exact:.2f} with the true pseudoinverse).",
    )


def _pretrained(rows: Sequence[Row], quantity: str, dtype: str = "float64") -> list[Row]:
    """Rows of pretrained weights with the paper's start value, a row for each m."""
    found = rows_of(rows, quantity, weights="pretrained")
    return [row for row in found if (row.method, row.dtype) == ("paper", dtype)]


def _shares(rows: Sequence[Row]) -> str:
    return ", ".join(f"{row.value:.0%} (m = {row.m})" for row in rows)


def _third_order(rows: Sequence[Row]) -> Verdict:
    claim = "The iteration converges in the third order (Lemma 1)."
    cubed, orders = (_pretrained(rows, quantity) for quantity in (CUBED, ORDER))
    if not cubed or not orders:
        return Verdict(claim, None, "no head came near enough to the pseudoinverse to see an order.")
    lows = [quartiles_of(row).low for row in orders]
    said = ", ".join(f"{low:.2f} (m = {row.m})" for low, row in zip(lows, orders, strict=True))
    seen = [Known(low, low).within(least=_ORDER) if row.repeats >= _FEW else None
            for low, row in zip(lows, orders, strict=True)]  # fmt: skip
    return Verdict(
        claim,
        most([*(row.value == 1 for row in cubed), *seen]),
        f"{min(row.value for row in cubed):.1%} of the steps that start below 1 end within the cube; the lower "
        f"quartiles of the order are {said}, each over at least {min(row.repeats for row in orders)} steps.",
    )


def _start(rows: Sequence[Row]) -> Verdict:
    claim = "The start value ensures a norm of I - A Z_0 below 1."
    regular, starts = (_pretrained(rows, quantity) for quantity in (REGULAR, STARTS_BELOW))
    above = [row for row in _pretrained(rows, RESIDUAL) if row.fact("k") == "0" and quartiles_of(row).high > _ABOVE]
    if not regular:
        return Verdict(claim, None, "no head was measured.")
    beyond = f", above 1 in a quarter of them or more at m = {', '.join(str(row.m) for row in above)}" if above else ""
    return Verdict(
        claim,
        False if above else True if all(row.value == 1 for row in regular) else None,
        f"it is below 1 in {_shares(regular)} of the heads{beyond}. As computed it is below 1 in {_shares(starts)} in "
        f"float64, and in {_shares(_pretrained(rows, STARTS_BELOW, 'float32'))} in float32; the others round to 1.",
    )


def draw_convergence(rows: Sequence[Row]) -> "Figure":
    """Residuals and distances over the iterations."""
    numbers = _numbers(rows)
    lines = {f"m = {m}, {dtype}": (m, dtype) for m, dtype in product(numbers, _DTYPES)}
    panels = {
        f"{name}, {weights} weights": {
            line: [
                row
                for row in rows_of(rows, quantity, weights=weights)
                if (row.method, row.m, row.dtype) == ("paper", *key)
            ]
            for line, key in lines.items()
        }
        for quantity, name in ((RESIDUAL, "‖I − AZ‖"), (DISTANCE, "‖Z − A⁺‖ / ‖A⁺‖"))
        for weights in WEIGHTS
    }
    looks = {line: (numbers.index(m), dtype == "float32") for line, (m, dtype) in lines.items()}
    return _over_steps(panels, looks, "norm", (1e-10, 1e3))


def draw_attention(rows: Sequence[Row]) -> "Figure":
    """Errors of the attention matrix over the iterations."""
    names = {"paper": "Z after k iterations", "exact": "pseudoinverse"}
    panels = {
        f"{weights} weights, m = {SHOWN}": {
            name: [row for row in rows_of(rows, MATRIX, weights=weights) if row.method == method]
            for method, name in names.items()
        }
        for weights in WEIGHTS
    }
    looks = {name: (place, place > 0) for place, name in enumerate(names.values())}
    return _over_steps(panels, looks, "relative error of attention", (1e-3, 10))


def _over_steps(
    panels: Mapping[str, Mapping[str, Sequence[Row]]],
    looks: Mapping[str, tuple[int, bool]],
    y_label: str,
    limits: tuple[float, float],
) -> "Figure":
    return draw_bands(
        panels,
        over=step_of,
        looks=looks,
        band="quartiles over heads",
        x_label="iterations k",
        y_label=y_label,
        limits=limits,
    )


def _one(rows: Sequence[Row], quantity: str, method: str, m: int, dtype: str = "float64", **words: str) -> Row | None:
    found = [row for row in rows_of(rows, quantity, **words) if (row.method, row.m, row.dtype) == (method, m, dtype)]
    return found[0] if found else None


def _value(rows: Sequence[Row], quantity: str, method: str, m: int, dtype: str = "float64", **words: str) -> float:
    row = _one(rows, quantity, method, m, dtype, **words)
    return float("nan") if row is None else row.value


def _numbers(rows: Sequence[Row]) -> list[int]:
    return sorted({row.m or 0 for row in rows_of(rows, CONDITION)})
