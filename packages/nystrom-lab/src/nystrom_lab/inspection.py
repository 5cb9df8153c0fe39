"""An inspection as rows: one per number, with its interval if it is an estimate."""

import math
from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from nystrom.attention.plan import PLAN, AttentionPlan
from nystrom.inspection.candidates import EXACT
from nystrom.inspection.inspect import Inspection
from nystrom.inspection.sampling import Estimate
from nystrom_lab.measure.rows import Row, cpu_name
from nystrom_lab.report.inspection import (
    CHANGED,
    DISTANCE,
    ENTROPY,
    ERROR,
    HIDDEN,
    HIDDEN_HELD_OUT,
    NEAR,
    RANK,
    RATIO,
    RESIDUAL,
    TIME,
    VARIATION,
)

_OVERFLOWS = "the output of the method is not finite"


def inspection_rows(inspection: Inspection, *, device: str | None = None) -> list[Row]:
    """The rows of an inspection, of the study "inspect".

    `low` and `high` are the ends of 95 % intervals; for times they are the quartiles over the turns. The facts are the
    layer and the head, from 0; `exact`, the layers that kept exact attention; `r`, the number of queries sampled from
    each text; and `beside`, the method whose time in the same turn divides a ratio of times.

    Args:
        inspection: The inspection.
        device: The device; None means this machine's processor.
    """
    sizes = {each.name: each.size for each in inspection.candidates}
    blank = Row(
        study="inspect", quantity="", method="", value=0, device=cpu_name() if device is None else device,
        repeats=inspection.texts, n=inspection.tokens, dtype=str(inspection.dtype).removeprefix("torch."),
    )  # fmt: skip
    rows = []
    for layer in inspection.layers:
        place = layer.layer, inspection.num_queries
        for quantity, unit, estimate in (
            (ENTROPY, "nats", layer.entropy), (DISTANCE, "tokens", layer.distance), (NEAR, "", layer.near)
        ):  # fmt: skip
            rows += _of_heads(replace(blank, quantity=quantity, method=EXACT, unit=unit), estimate, place)
        rows += _of_heads(replace(blank, quantity=RANK, method=EXACT), layer.rank, place)
        for name, method in layer.methods.items():
            mine = replace(blank, method=name, m=sizes[name])
            rows += _of_heads(replace(mine, quantity=ERROR), method.error, place)
            if method.variation is not None:
                rows += _of_heads(replace(mine, quantity=VARIATION), method.variation, place)
            if method.residual is not None:
                rows += _of_heads(replace(mine, quantity=RESIDUAL), method.residual, place)
    for name, whole in inspection.whole.items():
        mine = replace(blank, method=name, m=sizes.get(name))
        for layers, result in (((), whole), *([inspection.mended[name]] if name in inspection.mended else [])):
            those = mine.with_facts(exact=",".join(map(str, layers)))
            note = "" if math.isfinite(result.error) else _OVERFLOWS
            rows.append(replace(those, quantity=HIDDEN, value=result.error, note=note))
            if result.changed is not None:
                rows.append(replace(those, quantity=CHANGED, value=result.changed))
    for name, turns in inspection.times.turns.items():
        mine = replace(blank, method=name, m=sizes.get(name), repeats=len(turns))
        low, middle, high = (1e3 * time for time in inspection.times.quartiles[name])
        rows.append(replace(mine, quantity=TIME, value=middle, low=low, high=high, unit="ms"))
        for other in inspection.times.turns:
            if other != name:
                low, middle, high = inspection.times.ratio(name, other)
                ratio = replace(mine, quantity=RATIO, value=middle, low=low, high=high)
                rows.append(ratio.with_facts(beside=other))
    return rows


def plan_rows(plan: AttentionPlan, blank: Row) -> list[Row]:
    """The error and the time of a plan as rows.

    A row of the inspection, `blank`, has the device and settings.
    """
    measured = plan.measurements
    mine = replace(blank, method=PLAN, m=None, low=None, high=None, unit="", note="", facts={})
    mine = mine.with_facts(budget=f"{measured['budget']:g}")
    rows = [replace(mine, quantity=HIDDEN, value=measured["error"]).with_facts(heads=" ".join(measured["exact heads"]))]
    if measured["held-out error"] is not None:
        rows.append(replace(mine, quantity=HIDDEN_HELD_OUT, value=measured["held-out error"]))
    if measured["changed predictions"] is not None:
        rows.append(replace(mine, quantity=CHANGED, value=measured["changed predictions"]))
    low, high = measured["quartiles of the mean ms"]
    time = replace(mine, quantity=TIME, value=measured["mean ms of a layer's attention"], low=low, high=high, unit="ms")
    return [*rows, replace(time, repeats=measured["turns"])]


def _of_heads(row: Row, values: Estimate | Tensor, place: tuple[int, int]) -> Iterator[Row]:
    layer, sampled = place
    all_of = values if isinstance(values, Estimate) else Estimate(values, values, values)
    for head, (value, low, high) in enumerate(zip(*(part.tolist() for part in all_of), strict=True)):
        ends = {"low": low, "high": high} if isinstance(values, Estimate) else {}
        # The inspection has checked that exact attention is finite.
        note = "" if row.method == EXACT or math.isfinite(value) else _OVERFLOWS
        yield replace(row, value=value, note=note, **ends).with_facts(layer=layer, head=head, r=sampled)
