r"""How close the error of attention from sampled queries is to the exact one, and how often its interval contains it.

`nystrom.inspection` estimates the relative error $\|\hat O - O\|_F / \|O\|_F$ of a head from r sampled queries of each
text (`nystrom.inspection.sampling`). On n = 512 tokens the error over all queries is known. For each head of each
layer, over all texts together, queries are drawn many times, and each draw gives an estimate with its interval. Rows
hold the share of the estimates within 20 % of the exact error, and the share of the intervals that contain it.
"""

import math
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import pandas as pd
import torch

from nystrom.attention.functions import FUNCTIONS
from nystrom.attention.method_names import read_method
from nystrom.inspection.sampling import Sample, draw_queries, estimate_ratio
from nystrom_lab.measure.rows import Row
from nystrom_lab.report.summary import OURS
from nystrom_lab.studies.reproduce.declared import Claim, Found, Lines, Pivot, cells, declare, each
from nystrom_lab.studies.reproduce.encoders import Encoder, find_encoder
from nystrom_lab.studies.reproduce.known import most, share_in
from nystrom_lab.studies.reproduce.spread import spread_row
from nystrom_lab.studies.reproduce.study import Part, Plan, Setting, beside_none

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
    hits: dict[tuple[str, int], list[torch.Tensor]] = {(what, r): [] for what in (_NEAR, _HELD) for r in _QUERIES}
    for given in layers.values():
        with torch.no_grad():
            exact = FUNCTIONS["softmax"](*given)
            off = (FUNCTIONS[method](*given, **options) - exact).double().square().sum(dim=-1)
            size = exact.double().square().sum(dim=-1)
        wanted = (off.sum(dim=(0, 2)) / size.sum(dim=(0, 2))).sqrt()
        for count in _QUERIES:
            for _ in range(draws):
                places = [draw_queries(torch.arange(length), count, generator) for _ in range(_TEXTS)]
                samples = [Sample(length, off[b][:, at], size[b][:, at]) for b, at in enumerate(places)]
                found = estimate_ratio(samples, root=True)
                hits[_NEAR, count].append((found.value - wanted).abs() <= 0.2 * wanted)
                hits[_HELD, count].append((found.low <= wanted) & (wanted <= found.high))
    facts = {"texts": _TEXTS, "heads": layers[0].q.shape[1], "layers": encoder.layers}
    for (quantity, count), of in hits.items():
        yield spread_row(quantity, name, torch.stack(of).double(), n=length, m=count, facts=facts, seed=0)


def _share(quantity: str, low: float, high: float, rows: pd.DataFrame) -> Found:
    """The share lies between two limits for each method, over all layers, heads and draws together."""
    shares = each(rows, quantity, m=_DECIDES)
    if {share.method for share in shares} != set(rows["method"]) or not shares:
        return None, f"a method has no row at {_DECIDES} queries."
    said = ", ".join(f"{share.value:.3f} ({share.method})" for share in shares)
    return most(share_in(share).within(low, high) for share in shares), f"shares: {said}."


STUDIES = {
    "inspect-calibration": declare(
        shows="errors of attention from sampled queries beside the exact ones",
        source="this library",
        needs="an encoder: nystrom[real] or --model",
        minutes=0.2,
        plan=_plan,
        tables=[
            Pivot(title=f"share {what}", index={"method": "{method}"}, columns=[cells("r={m}", what, "{value:.3f}")])
            for what in (_NEAR, _HELD)
        ],
        claims=[
            Claim(
                "With 128 sampled queries a text the estimate is within 20 % of the exact error 95 times of 100.",
                OURS,
                partial(_share, _NEAR, 0.95, math.inf),
                "the share of a method is below .95; unknown where that lies within its error",
            ),
            Claim(
                "The interval at 95 % holds the exact error about as often as it says.",
                OURS,
                partial(_share, _HELD, 0.92, 0.98),
                "with 128 queries the share of a method is below .92 or above .98",
            ),
        ],
        figures={
            "": Lines(
                of={"quantity": (_NEAR, _HELD)}, over="m", panel="{quantity}", x_label="sampled queries of each text",
                y_label="share of estimates", band="", levels=(0.95,), options={"log_y": False},
            )
        },
    )
}  # fmt: skip
