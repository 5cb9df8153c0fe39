r"""The two papers' tables of time and memory, measured on this machine and compared with the printed numbers.

Table 1 of Nyströmformer is one attention module over the length (`nystrom_lab.studies.speed.efficiency`, without the
skip convolution), forward as in the paper, and also forward+backward. The paper names neither heads nor their width: 8
heads of 64 are a guess. It prints averages over calls, here are medians of interleaved ones. Table 2 of Skyformer is a
training step of each task (`nystrom_lab.studies.speed.training`) instead of 50,000 of them with their evaluations.

Both are compared in ratios against exact attention that stores its n x n matrix, `softmax-materialised`. Beside the
printed methods are fused exact attention and near_far, on which no claim rests.

Claims of Table 1, on forward passes, and the rules that decide on them:

- Time and memory of Nyström attention grow linearly: from n = 1,024 to the longest measured length the exponent
  $\log(y_2 / y_1) / \log(n_2 / n_1)$ is at most 1.2, for 64 and for 32 landmarks.
- It "offers favorable memory and time efficiency over standard self-attention": from some length on, all measured
  lengths from there to the longest included, nystrom-64 takes less time and less memory.
- The printed order of the methods at the longest length that is measured and printed: of the pairs that the paper
  prints at least 1.2 times apart, at least nine tenths are in the same order here, time and memory together.
- "With a length of 8192 [...] 1.2x memory saving and 3x speed-up over Longformer, and 1.7x memory saving over
  Linformer": at n = 8,192 nystrom-32 is at least 1.2, 3 and 1.7 times less, each up to a tenth.

Claims of Table 2:

- Skyformer has "consistently less training time" than self-attention, and less memory: in every task.
- It "brings nearly 4 times speed-up on text classification and document retrieval": at least 3 times in both.
- "The time and space requirement of Kernelized Attention is not significantly improved": in every task its time is at
  least two thirds of self-attention's. (Its printed memory on Text is about half.)
- The printed order of the methods: as above, over all tasks.

What was not run for lack of time or memory does not count.

Source: Xiong et al. (2021), arXiv:2102.03902, Table 1; Chen et al. (2021), arXiv:2111.00035, section 5 and Table 2.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

from nystrom_lab.measure.rows import Row
from nystrom_lab.report.plots.efficiency import efficiency_figure
from nystrom_lab.report.plots.training import training_figure
from nystrom_lab.report.printed_ratios import BASE, NYSTROMFORMER_TABLE_1, SKYFORMER_TABLE_2, compare_with_paper
from nystrom_lab.report.summary import Verdict
from nystrom_lab.report.table import Table
from nystrom_lab.studies.reproduce.study import Part, Plan, Setting, Study
from nystrom_lab.studies.speed.efficiency import run_efficiency
from nystrom_lab.studies.speed.lra_shapes import SHAPES, TABLE_2_METHODS
from nystrom_lab.studies.speed.training import run_training

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TABLE_1_METHODS = (BASE, "softmax", "linformer-256", "longformer-257", "nystrom-64", "nystrom-32", "near_far")

# Method: column: (memory, time). The columns are lengths or tasks.
_Values = Mapping[str, Mapping[str, tuple[float, float]]]


def _plan_efficiency(setting: Setting) -> Plan:
    paper = setting.size == "paper"
    device = _device(setting)
    lengths = (512, 1024, 2048, 4096, 8192) if paper else (512, 1024, 2048, 4096)
    repeats = 9 if paper else 3
    said = {
        "methods": " ".join(_TABLE_1_METHODS),
        "lengths": " ".join(map(str, lengths)),
        "sizes": "1 sequence, 8 heads of 64",
        "repeats": str(repeats),
        "device": device,
    }
    differs = "8 heads of 64, which the paper does not say, and medians instead of averages"
    if not paper:
        differs = f"a CPU instead of an NVIDIA 1080 Ti, lengths to {max(lengths)} instead of 8192, {differs}"
    parts = [Part(f"n={n}", partial(_measure_length, n, repeats, device)) for n in lengths]
    return Plan(parts, said, differs)


def _measure_length(n: int, repeats: int, device: str, folder: Path) -> Iterable[Row]:
    return run_efficiency(
        lengths=(n,), methods=_TABLE_1_METHODS, skip="without", repeats=repeats, device=device, to=folder / "bench"
    )


def _plan_training(setting: Setting) -> Plan:
    paper = setting.size == "paper"
    device = _device(setting)
    # An eighth of the paper's batch.
    batches = {task: shape.batch if paper else shape.batch // 8 for task, shape in SHAPES.items()}
    repeats = 3 if paper else 2
    said = {
        "methods": " ".join(TABLE_2_METHODS),
        "batches": ", ".join(f"{task} {batch}" for task, batch in batches.items()),
        "repeats": str(repeats),
        "device": device,
    }
    differs = "a step instead of 50,000 steps with their evaluations"
    if not paper:
        differs += ", a CPU instead of an NVIDIA V100, and an eighth of the paper's batches"
    parts = [Part(task, partial(_measure_task, task, batch, repeats, device)) for task, batch in batches.items()]
    return Plan(parts, said, differs)


def _measure_task(task: str, batch: int, repeats: int, device: str, folder: Path) -> Iterable[Row]:
    return run_training(tasks=(task,), batch=batch, repeats=repeats, device=device, to=folder / "bench" / task)


def _device(setting: Setting) -> str:
    if setting.size == "small":
        return "cpu"
    import torch

    if not torch.cuda.is_available():
        raise ValueError("--size paper measures on a GPU, as the paper does, and torch finds none here: leave it out.")
    return "cuda"


def _as_study(rows: Sequence[Row], name: str) -> list[Row]:
    """The rows under the name that tables and figures of the speed measurements know."""
    return [replace(row, study=name) for row in rows]


def _tables(study: str, rows: Sequence[Row]) -> Sequence[Table]:
    values = _measured(study, rows)
    columns = list(dict.fromkeys(column for cells in values.values() for column in cells))
    compared = {(each.what, each.method, each.column): each for each in compare_with_paper(_as_study(rows, study))}
    tables = []
    for place, what in enumerate(("memory", "time")):
        heads = ["method", *(f"n={c}" if study == "efficiency" else c for c in columns)]
        unit = {"memory": "MB", "time": "ms"}[what]
        call = "forward " if study == "efficiency" else ""
        lines = [[m, *(_number(cells.get(c, (math.nan,) * 2)[place]) for c in columns)] for m, cells in values.items()]
        tables.append(Table(f"{call}{what}, {unit}", heads, lines))
        lines = [
            [method, *(_pair(compared.get((what, method, column))) for column in columns)]
            for method in values
            if any((what, method, column) in compared for column in columns)
        ]
        tables.append(Table(f"{call}{what}: times less than {BASE}, here / printed", heads, lines))
    return tables


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _pair(compared: object) -> str:
    measured, printed = getattr(compared, "measured", math.nan), getattr(compared, "printed", math.nan)
    return "–" if math.isnan(printed) else f"{'–' if math.isnan(measured) else f'{measured:.1f}'} / {printed:.1f}"


def _measured(study: str, rows: Sequence[Row]) -> dict[str, dict[str, tuple[float, float]]]:
    """Memory and time by method and column: of forward passes over the length, or of a step of each task."""
    found: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        before, _, what = row.quantity.rpartition(" ")
        if study == "efficiency" and before != "forward":
            continue
        column = str(row.n) if study == "efficiency" else before.removesuffix(" step")
        cell = found.setdefault(row.method, {}).setdefault(column, [math.nan, math.nan])
        cell[("memory", "time").index(what)] = row.value
    return {m: {c: (cell[0], cell[1]) for c, cell in cells.items()} for m, cells in found.items()}


def _less(values: _Values, method: str, other: str, column: str) -> tuple[float, float]:
    """How many times less memory and time a method takes than another; NaN where it was not measured."""
    (ours, ours_time), (theirs, theirs_time) = (
        values.get(m, {}).get(column, (math.nan, math.nan)) for m in (method, other)
    )
    return theirs / ours, theirs_time / ours_time


def _order(values: _Values, printed: _Values, columns: Sequence[str], apart: float) -> Verdict:
    right = total = 0
    for column in columns:
        for (a, cells_a), (b, cells_b) in combinations(printed.items(), 2):
            for place in (0, 1):
                theirs = cells_a[column][place] / cells_b[column][place]
                ours = _less(values, b, a, column)[place]
                if max(theirs, 1 / theirs) >= apart and not math.isnan(ours):
                    total, right = total + 1, right + ((theirs > 1) == (ours > 1))
    return Verdict(
        "The methods are in the printed order of time and memory.",
        right >= 0.9 * total if total else None,
        f"{right} of {total} pairs are, of those that the paper prints at least {apart:g} times apart.",
    )


def _verdicts_efficiency(rows: Sequence[Row]) -> Sequence[Verdict]:
    values = _measured("efficiency", rows)
    lengths = sorted({int(column) for cells in values.values() for column in cells})
    ends = [n for n in lengths if n >= 1024]
    exponents = {
        f"{what} of {method}": math.log(
            values[method][str(ends[-1])][place] / values[method][str(ends[0])][place], ends[-1] / ends[0]
        )
        for method in ("nystrom-64", "nystrom-32", BASE)
        for place, what in enumerate(("memory", "time"))
        if len(ends) > 1
    }
    ours = [value for name, value in exponents.items() if BASE not in name]
    known = [n for n in lengths if not any(math.isnan(x) for x in _less(values, "nystrom-64", BASE, str(n)))]
    lower = [n for n in known if all(min(_less(values, "nystrom-64", BASE, str(k))) > 1 for k in known if k >= n)]
    shared = [str(n) for n in lengths if n in NYSTROMFORMER_TABLE_1[BASE]]
    printed = {m: {str(n): pair for n, pair in cells.items()} for m, cells in NYSTROMFORMER_TABLE_1.items()}
    over_longformer, over_linformer = (_less(values, "nystrom-32", m, "8192") for m in ("longformer-257", _LINFORMER))
    savings = (over_longformer[0] / 1.2, over_longformer[1] / 3, over_linformer[0] / 1.7)
    unknown = any(map(math.isnan, savings))
    return [
        Verdict(
            "Time and memory of Nyström attention grow linearly.",
            None if not ours or any(map(math.isnan, ours)) else max(ours) <= 1.2,
            f"exponents from n = {ends[0]} to {ends[-1]}: "
            + ", ".join(f"{value:.2f} ({name})" for name, value in exponents.items() if not math.isnan(value))
            + "."
            if ours
            else "two lengths of at least 1024 are needed.",
        ),
        Verdict(
            "From some length on Nyström attention takes less time and memory than exact attention.",
            bool(lower) if known else None,
            f"with 64 landmarks from n = {lower[0]} on, of n = {known[0]} to {known[-1]}."
            if lower
            else "with 64 landmarks at no end of the measured lengths.",
        ),
        _order(values, printed, shared[-1:], 1.2),
        Verdict(
            "At n = 8192 it takes a third of Longformer's time, and less memory than Longformer and Linformer.",
            None if unknown else min(savings) >= 0.9,
            "n = 8192 was not measured."
            if unknown
            else f"nystrom-32 takes {over_longformer[1]:.1f} times less time than Longformer, and "
            f"{over_longformer[0]:.1f} and {over_linformer[0]:.1f} times less memory than Longformer and Linformer.",
        ),
    ]


_LINFORMER = "linformer-256"


def _verdicts_training(rows: Sequence[Row]) -> Sequence[Verdict]:
    values = _measured("training", rows)
    tasks = [task for task in SHAPES if not math.isnan(_less(values, "skyformer-128", BASE, task)[1])]
    sky = {task: _less(values, "skyformer-128", BASE, task) for task in tasks}
    kernelized = {t: 1 / x for t in SHAPES if not math.isnan(x := _less(values, "kernelized", BASE, t)[1])}
    long = [task for task in ("text", "retrieval") if task in sky]
    return [
        Verdict(
            "Skyformer takes less time and memory than self-attention in every task.",
            min(min(pair) for pair in sky.values()) > 1 if sky else None,
            ", ".join(f"{t}: {time:.1f} times less time, {memory:.1f} memory" for t, (memory, time) in sky.items())
            + "."
            if sky
            else "self-attention was measured in no task.",
        ),
        Verdict(
            "Skyformer is nearly 4 times as fast on Text and Retrieval.",
            min(sky[task][1] for task in long) >= 3 if len(long) == 2 else None,
            ", ".join(f"{sky[task][1]:.1f} times on {task}" for task in long) + "."
            if long
            else "self-attention was not measured there.",
        ),
        Verdict(
            "Kernelized attention saves little time.",
            min(kernelized.values()) >= 2 / 3 if kernelized else None,
            "its time over self-attention's: "
            + ", ".join(f"{share:.2f} ({t})" for t, share in kernelized.items())
            + "."
            if kernelized
            else "self-attention was measured in no task.",
        ),
        _order(values, SKYFORMER_TABLE_2, [t for t in SHAPES if any(t in cells for cells in values.values())], 1.2),
    ]


def _figures_efficiency(rows: Sequence[Row], folder: Path) -> "Mapping[str, Figure]":
    return {"": efficiency_figure(_as_study(rows, "efficiency"))}


def _figures_training(rows: Sequence[Row], folder: Path) -> "Mapping[str, Figure]":
    return {"": training_figure(_as_study(rows, "training"))}


STUDIES = {
    "nystromformer-table-1": Study(
        plan=_plan_efficiency,
        tables=partial(_tables, "efficiency"),
        verdicts=_verdicts_efficiency,
        figures=_figures_efficiency,
    ),
    "skyformer-table-2": Study(
        plan=_plan_training,
        tables=partial(_tables, "training"),
        verdicts=_verdicts_training,
        figures=_figures_training,
    ),
}
