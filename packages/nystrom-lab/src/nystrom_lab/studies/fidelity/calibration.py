r"""How close the error of attention from sampled queries is to the exact one, and how often its interval contains it.

`nystrom.inspection` estimates the relative error $\|\hat O - O\|_F / \|O\|_F$ of a head from r sampled queries of each
text (`nystrom.inspection.sampling`). On n = 512 tokens the error over all queries is known. For each head of each
layer, over all texts together, queries are drawn many times, and each draw gives an estimate with its interval. Rows
hold the share of the estimates within 20 % of the exact error, and the share of the intervals that contain it.

Claims and the rules that decide them, for each method over all layers, heads and draws together, by what is known of a
share (`nystrom_lab.studies.reproduce.known`):

- With 128 queries the estimate is within 20 % of the exact error 95 times of 100: the share is at least .95.
- The 95 % interval contains the exact error about as often as it says: with 128 queries the share is from .92 to .98.

If a method has no row at 128 queries, nothing is decided.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from nystrom.attention.method_names import read_method
from nystrom.attention.registry import find_function
from nystrom.inspection.sampling import Sample, draw_queries, estimate_ratio
from nystrom_lab.measure.rows import Row
from nystrom_lab.report.plots.canvas import REFERENCE
from nystrom_lab.report.plots.lines import draw_lines
from nystrom_lab.report.summary import Verdict
from nystrom_lab.report.table import Table
from nystrom_lab.studies.reproduce.encoders import Encoder, find_encoder
from nystrom_lab.studies.reproduce.known import most, share_of
from nystrom_lab.studies.reproduce.spread import spread_row
from nystrom_lab.studies.reproduce.study import Part, Plan, Setting, Study, beside_none

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_METHODS = ("nystrom-64", "nystrom-256", "near_far", "near_far-128", "performer-256")
_QUERIES, _DECIDES = (16, 32, 64, 128, 256), 128
_NEAR, _HELD = "within 20 %", "held by the interval"
_TOKENS, _TEXTS = 512, 4


def _plan(setting: Setting) -> Plan:
    draws = 400 if setting.size == "paper" else 40
    encoder = find_encoder(setting)
    length = min(_TOKENS, encoder.positions)
    encoder.check_length(length, _TEXTS)
    parts = [Part(method, partial(_measure, encoder, method, length, draws)) for method in _METHODS]
    said = {"model": encoder.name, "texts": encoder.prose.name, "tokens": str(length), "draws": str(draws)}
    return Plan(parts, said, beside_none(setting, f"{draws} draws of each sample instead of 400"))


def _measure(encoder: Encoder, name: str, length: int, draws: int, folder: Path) -> Iterable[Row]:
    method, options = read_method(name)
    layers = encoder.record(length, _TEXTS, tuple(range(encoder.layers)))
    generator = torch.Generator().manual_seed(0)
    near: dict[int, list[torch.Tensor]] = {count: [] for count in _QUERIES}
    held: dict[int, list[torch.Tensor]] = {count: [] for count in _QUERIES}
    for given in layers.values():
        with torch.no_grad():
            exact = find_function("softmax")(*given)
            off = (find_function(method)(*given, **options) - exact).double().square().sum(dim=-1)
            size = exact.double().square().sum(dim=-1)
        wanted = (off.sum(dim=(0, 2)) / size.sum(dim=(0, 2))).sqrt()
        for count in _QUERIES:
            for _ in range(draws):
                places = [draw_queries(torch.arange(length), count, generator) for _ in range(_TEXTS)]
                found = estimate_ratio(
                    [Sample(length, off[b][:, at], size[b][:, at]) for b, at in enumerate(places)], root=True
                )
                near[count].append((found.value - wanted).abs() <= 0.2 * wanted)
                held[count].append((found.low <= wanted) & (wanted <= found.high))
    facts = {"texts": _TEXTS, "heads": layers[0].q.shape[1], "layers": encoder.layers}
    for quantity, of in ((_NEAR, near), (_HELD, held)):
        for count, hits in of.items():
            row = spread_row(quantity, name, torch.stack(hits).double(), n=length, m=count, facts=facts, seed=0)
            yield row


def _tables(rows: Sequence[Row]) -> Sequence[Table]:
    counts = sorted({row.m for row in rows if row.m is not None})
    tables = []
    for quantity in (_NEAR, _HELD):
        found = {(row.method, row.m): row.value for row in rows if row.quantity == quantity}
        methods = dict.fromkeys(method for method, _ in found)
        lines = [[method, *(f"{found[method, count]:.3f}" for count in counts)] for method in methods]
        tables.append(Table(f"share {quantity}", ["method", *(f"r={count}" for count in counts)], lines))
    return tables


def _verdicts(rows: Sequence[Row]) -> Sequence[Verdict]:
    claims = {
        _NEAR: "With 128 sampled queries a text the estimate is within 20 % of the exact error 95 times of 100.",
        _HELD: "The interval at 95 % holds the exact error about as often as it says.",
    }
    verdicts = []
    for quantity, claim in claims.items():
        shares = {row.method: row for row in rows if row.quantity == quantity and row.m == _DECIDES}
        if not shares or shares.keys() != {row.method for row in rows}:
            verdicts.append(Verdict(claim, None, f"a method has no row at {_DECIDES} queries."))
            continue
        low, high = (0.95, math.inf) if quantity == _NEAR else (0.92, 0.98)
        said = ", ".join(f"{row.value:.3f} ({method})" for method, row in shares.items())
        known = (share_of(row.value, row.repeats) for row in shares.values())
        verdicts.append(Verdict(claim, most(each.within(low, high) for each in known), f"shares: {said}."))
    return verdicts


def _figures(rows: Sequence[Row], folder: Path) -> "Mapping[str, Figure]":
    panels = {quantity: [row for row in rows if row.quantity == quantity] for quantity in (_NEAR, _HELD)}
    figure = draw_lines(
        panels,
        over=lambda row: row.m,
        x_label="sampled queries of each text",
        y_label="share of estimates",
        band="",
        log_y=False,
    )
    for axes in figure.axes[:2]:
        axes.axhline(0.95, color=REFERENCE, linewidth=0.6, linestyle=":")
    return {"": figure}


STUDIES = {
    "inspect-calibration": Study(
        shows="errors of attention from sampled queries beside the exact ones",
        source="this library",
        needs="an encoder: nystrom[real] or --model",
        minutes=0.2,
        plan=_plan,
        tables=_tables,
        verdicts=_verdicts,
        figures=_figures,
    )
}
