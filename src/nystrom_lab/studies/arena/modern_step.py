"""What a training step of the preset "modern" costs, relative to the plain model of the same size, over the length.

The model is that of Text: four layers of width 128 with Nyström attention of 128 landmarks, and one text of n random
bytes a step. The plain model has a table of positions, plain feed-forward blocks, no short convolutions and no
clipping. The parts of "modern" are added to it one by one: rotary positions across heads; short convolutions; and gated
blocks with clipping, which makes it "modern". `nystrom_lab.studies.arena.settled_steps` says what a step is. "small"
has 1,024 to 16,384 bytes in five rounds, "paper" goes to 65,536 in fifteen.

Claims, and the rule that decides each:

- A step of "modern" costs at most 1.5 times a plain one: at every length, the quartiles of the ratios within a round
  are at most 1.5. It is refuted if both are above 1.5 at one length.
- Its time, and its memory, grow linearly: from the second longest length to the longest, the slope of the logarithm of
  the cost over that of n is at most 1.1, by the quartiles at both lengths. (Twice the tokens then take at most 2.14
  times as much; quadratic growth has a slope of 2. Shorter lengths would say less, since there the costs that do not
  depend on the length hide the growth.) It is undecided if the slope is below a half, since then such costs, or a busy
  machine, hide the growth.

Source: ours; the parts are those of `nystrom_lab.training.presets.modern`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nystrom.turns import quartiles
from nystrom_lab.measure.rows import Row, cpu_name, new_row
from nystrom_lab.report.plots.lines import draw_lines
from nystrom_lab.report.summary import Verdict
from nystrom_lab.report.table import Table
from nystrom_lab.studies.arena.settled_steps import MEMORY, TIME, cost_rows, measure_in_turn
from nystrom_lab.studies.reproduce.known import most, quartiles_of
from nystrom_lab.studies.reproduce.study import Part, Plan, Setting, Study, beside_none
from nystrom_lab.training.hardware import Precision
from nystrom_lab.training.options import TrainOptions
from nystrom_lab.training.run_settings import Settings, settle

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TASK, PRESET = "text", "modern"
LENGTHS = {"small": (1024, 2048, 4096, 8192, 16384), "paper": (1024, 2048, 4096, 8192, 16384, 32768, 65536)}
ROUNDS = {"small": 5, "paper": 15}
RATIO = "step time / plain"
_LIMIT = 120.0
_MOST, _LINEAR, _HIDDEN = 1.5, 1.1, 0.5
_GATED = {"feed_forward": "plain", "clip_norm": 0.0}
# What each model lacks of "modern", as arguments of `nystrom_lab.training.train.train`.
MODELS: dict[str, dict[str, Any]] = {
    "plain": _GATED | {"positions": "learned", "short_conv_kernel_size": 0},
    "rotary": _GATED | {"short_conv_kernel_size": 0},
    "convolutions": _GATED,
    "modern": {},
}


def settings_of(name: str, n: int, precision: Precision) -> Settings:
    """The settings of a model for n bytes."""
    return settle(
        TrainOptions(TASK, device="cpu", precision=precision, attention="nystrom", preset=PRESET, **MODELS[name]),
        positions=n,
    )


def _plan(setting: Setting) -> Plan:
    lengths, rounds = LENGTHS[setting.size], ROUNDS[setting.size]
    parts = [Part(f"n={n}", partial(_measure, n, rounds, setting.precision)) for n in lengths]
    said = {
        "model": f"preset {PRESET} for {TASK}, nystrom-128",
        "models": " ".join(MODELS),
        "lengths": " ".join(map(str, lengths)),
        "rounds": str(rounds),
        "precision": setting.precision,
    }
    return Plan(parts, said, beside_none(setting, "to 16,384 bytes in 5 rounds"))


def _measure(n: int, rounds: int, precision: Precision, folder: Path) -> Iterable[Row]:
    """The costs of all models at one length, and the ratios of their times."""
    settings = {name: settings_of(name, n, precision) for name in MODELS}
    costs = measure_in_turn(settings, n, 1, rounds=rounds, limit_seconds=_LIMIT)
    plain = costs["plain"].seconds
    for name, cost in costs.items():
        yield from cost_rows(name, cost, settings[name], n=n, facts={"task": TASK, "preset": PRESET, "b": 1})
        if cost.seconds and plain:
            low, middle, high = quartiles([ours / theirs for ours, theirs in zip(cost.seconds, plain, strict=True)])
            yield new_row(
                study="", quantity=RATIO, method=name, value=middle, low=low, high=high, unit="", n=n, dtype=precision,
                repeats=len(plain), seed=0, device=cpu_name(),
            )  # fmt: skip


def _by_length(rows: Sequence[Row], quantity: str, name: str) -> dict[int, Row]:
    """Rows of a model by length, without those that were not measured."""
    found = [row for row in rows if (row.quantity, row.method) == (quantity, name) and not math.isnan(row.value)]
    return {row.n: row for row in sorted(found, key=lambda row: row.n or 0) if row.n}


def growth(rows: Mapping[int, Row]) -> float | None:
    """Slope of the logarithm of a cost over that of n, between the two longest n; None for fewer than three lengths."""
    if len(rows) < 3:
        return None
    *_, n, longest = sorted(rows)
    return math.log(rows[longest].value / rows[n].value) / math.log(longest / n)


def _is_linear(rows: Mapping[int, Row]) -> bool | None:
    """Whether a cost grows linearly with the length, by its quartiles."""
    slope = growth(rows)
    if slope is None or slope < _HIDDEN:
        return None
    *_, n, longest = sorted(rows)
    known = quartiles_of(rows[longest]).over(quartiles_of(rows[n]))
    return known.within(most=(longest / n) ** _LINEAR)


def _tables(rows: Sequence[Row]) -> Sequence[Table]:
    lengths = sorted({row.n for row in rows if row.n})
    cells = []
    for quantity, unit in ((TIME, "ms"), (RATIO, ""), (MEMORY, "MB")):
        for name in MODELS:
            found = _by_length(rows, quantity, name)
            if found:
                slope = growth(found) if unit else None
                values = [_shown(found[n].value) if n in found else "" for n in lengths]
                cells.append(
                    [f"{quantity}{unit and f', {unit}'}", name, *values, "" if slope is None else f"{slope:.2f}"]
                )
    heads = ["cost", "model", *(f"n = {n}" for n in lengths), "slope"]
    title = "a step of one text: medians, and slope of the logarithms between the two longest lengths"
    return [Table(title, heads, cells, left=2)]


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _verdicts(rows: Sequence[Row]) -> Sequence[Verdict]:
    ratios = _by_length(rows, RATIO, "modern")
    said = ", ".join(f"{row.value:.2f} at {n}" for n, row in ratios.items())
    found = [
        Verdict(
            "A modern step costs at most 1.5 times that of the plain model of the same size.",
            most(quartiles_of(row).within(most=_MOST) for row in ratios.values()),
            f"relative to plain: {said}." if ratios else "not measured.",
        )
    ]
    for quantity in (TIME, MEMORY):
        of_lengths = _by_length(rows, quantity, "modern")
        slope = growth(of_lengths)
        found.append(
            Verdict(
                f"The {quantity.removeprefix('step ')} of a modern step grows linearly with the length.",
                _is_linear(of_lengths),
                "fewer than three lengths were measured."
                if slope is None
                else f"the slope of the logarithms is {slope:.2f} between the two longest lengths.",
            )
        )
    return found


def _figures(rows: Sequence[Row], folder: Path) -> "Mapping[str, Figure]":
    panels = {title: [row for row in rows if row.quantity == title] for title in (TIME, MEMORY)}
    named = {f"{title}, {each[0].unit}": each for title, each in panels.items() if each}
    return {
        "": draw_lines(named, over=lambda row: row.n, x_label="bytes of the text", y_label="", band="", share_y=False)
    }


STUDIES = {"modern-step": Study(plan=_plan, tables=_tables, verdicts=_verdicts, figures=_figures)}
