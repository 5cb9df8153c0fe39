"""The times and memory printed in the two papers, and the comparison of measured ratios with theirs.

Absolute numbers from other machines say little, so ratios to exact attention that stores its n x n matrix, the papers'
first row, are compared. Table 1 of Nyströmformer prints its ratios, and they are given as printed, though some differ
in the last digit from those of the printed times (13.4 where 155.4 / 11.5 is 13.5). Table 2 of Skyformer prints only
hours and gigabytes, from which its ratios are computed. If the rows lack a method, or the papers a setting, there is
no ratio.

Source: Table 1 of Xiong et al. (2021), arXiv:2102.03902 (one NVIDIA 1080 Ti, forward); Table 2 of Chen et al. (2021),
arXiv:2111.00035 (one NVIDIA V100, 50,000 steps of training).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from nystrom_lab.measure.rows import Row
from nystrom_lab.report.table import Table, markdown_table
from nystrom_papers.report.tables import once_each

BASE = "softmax-materialised"
_TABLE_1, _TABLE_2 = "Table 1 of Nyströmformer", "Table 2 of Skyformer"


class Cost(NamedTuple):
    """Memory and time, in this order, as the papers print them."""

    memory: float
    time: float


# Method: length: (memory in MB, time in ms). Transformer, Linformer-256, Longformer-257, Nyströmformer-64 and -32.
NYSTROMFORMER_TABLE_1: dict[str, dict[int, tuple[float, float]]] = {
    BASE: {512: (54, 0.8), 1024: (186, 2.4), 2048: (685, 10.0), 4096: (2620, 32.9), 8192: (10233, 155.4)},
    "linformer-256": {512: (41, 0.7), 1024: (81, 1.3), 2048: (165, 2.7), 4096: (366, 5.3), 8192: (635, 11.3)},
    "longformer-257": {512: (32.2, 2.4), 1024: (65, 4.6), 2048: (130, 9.2), 4096: (263, 18.5), 8192: (455, 36.2)},
    "nystrom-64": {512: (35, 0.7), 1024: (63, 1.3), 2048: (118, 2.7), 4096: (229, 5.9), 8192: (450, 12.3)},
    "nystrom-32": {512: (26, 0.6), 1024: (49, 1.2), 2048: (96, 2.6), 4096: (193, 5.6), 8192: (383, 11.5)},
}

# The ratios in its brackets: method: length: (memory, time).
NYSTROMFORMER_TABLE_1_RATIOS: dict[str, dict[int, tuple[float, float]]] = {
    "linformer-256": {512: (1.3, 1.1), 1024: (2.3, 1.8), 2048: (4.2, 3.6), 4096: (7.2, 6.2), 8192: (16.1, 13.8)},
    "longformer-257": {512: (1.7, 0.3), 1024: (2.9, 0.5), 2048: (5.3, 1.0), 4096: (10.0, 1.8), 8192: (22.5, 4.3)},
    "nystrom-64": {512: (1.5, 1.1), 1024: (3.0, 1.8), 2048: (5.8, 3.6), 4096: (11.5, 5.6), 8192: (22.8, 12.7)},
    "nystrom-32": {512: (2.1, 1.2), 1024: (3.8, 1.9), 2048: (7.1, 3.7), 4096: (13.6, 5.9), 8192: (26.7, 13.4)},
}

# Hours and gigabytes of each method and task. Self-Attention, KA, Nystromformer, Linformer, Informer, Performer,
# Reformer, BigBird, Skyformer.
_TASKS = ("text", "listops", "retrieval", "pathfinder", "image")
_HOURS = {
    BASE: (4.30, 2.24, 8.33, 2.57, 4.22),
    "kernelized": (3.91, 1.99, 7.46, 2.42, 4.05),
    "nystrom-128": (0.71, 0.71, 1.29, 1.49, 2.70),
    "linformer-128": (0.65, 0.60, 1.13, 1.09, 2.19),
    "informer-128": (1.60, 1.19, 2.91, 2.39, 3.90),
    "performer-128": (0.77, 0.73, 1.41, 1.40, 2.55),
    "reformer-2": (0.94, 0.85, 1.73, 1.70, 3.08),
    "bigbird-3": (2.00, 1.88, 3.81, 3.39, 6.53),
    "skyformer-128": (1.02, 1.29, 1.86, 2.03, 3.40),
}
_GIGABYTES = {
    BASE: (10.37, 5.37, 10.77, 5.74, 11.47),
    "kernelized": (5.73, 5.94, 10.46, 6.38, 6.38),
    "nystrom-128": (1.21, 1.37, 2.39, 3.35, 6.71),
    "linformer-128": (0.99, 0.99, 1.89, 1.97, 3.94),
    "informer-128": (5.12, 4.85, 5.77, 4.75, 9.51),
    "performer-128": (1.09, 1.09, 2.16, 2.20, 4.39),
    "reformer-2": (1.61, 1.61, 2.98, 3.21, 6.42),
    "bigbird-3": (2.83, 2.71, 4.97, 4.97, 9.95),
    "skyformer-128": (1.59, 1.75, 3.15, 4.13, 8.26),
}
SKYFORMER_TABLE_2 = {
    method: {task: Cost(_GIGABYTES[method][i], _HOURS[method][i]) for i, task in enumerate(_TASKS)} for method in _HOURS
}

# Keys: the study, then the quantity, the method and the column (a length or a task).
PRINTED_RATIOS: dict[str, dict[tuple[str, str, str], float]] = {
    "efficiency": {
        (what, method, str(n)): ratio
        for method, lengths in NYSTROMFORMER_TABLE_1_RATIOS.items()
        for n, ratios in lengths.items()
        for what, ratio in zip(Cost._fields, ratios, strict=True)
    },
    "training": {
        (what, method, task): getattr(SKYFORMER_TABLE_2[BASE][task], what) / getattr(cost, what)
        for method, tasks in SKYFORMER_TABLE_2.items()
        for task, cost in tasks.items()
        for what in Cost._fields
        if method != BASE
    },
}


@dataclass(frozen=True)
class Compared:
    """A measured and a printed ratio of "time" or "memory": how many times less than exact attention with its matrix.

    Attributes:
        what: "time" or "memory".
        method: Name in the rows.
        column: Length or task.
        measured: NaN if the method or exact attention was not measured.
        printed: The paper's ratio, or one computed from its numbers.
    """

    what: str
    method: str
    column: str
    measured: float
    printed: float


def compare_with_paper(rows: Sequence[Row]) -> list[Compared]:
    """Ratios of the forward passes of "efficiency", or of "training", next to those of the paper's table.

    Raises:
        ValueError: Rows of another study, of two measurements, or none that the papers have a number for.
    """
    studies = {row.study for row in rows}
    if studies not in ({"efficiency"}, {"training"}):
        raise ValueError(f"rows are of {', '.join(sorted(studies)) or 'no study'}; expected efficiency or training.")
    once_each(rows)
    (study,) = studies
    printed, measured = PRINTED_RATIOS[study], {}
    for row in rows:
        before, _, what = row.quantity.rpartition(" ")
        if study == "training" or before == "forward":
            measured[what, row.method, str(row.n) if before == "forward" else before.partition(" ")[0]] = row.value
    compared = [
        Compared(
            what,
            method,
            column,
            measured.get((what, BASE, column), math.nan) / measured[what, method, column],
            printed[what, method, column],
        )
        for what, method, column in measured
        if (what, method, column) in printed
    ]
    if not compared:
        raise ValueError("rows hold nothing that the papers have a number for; measure the methods of their tables.")
    return compared


def paper_markdown(rows: Sequence[Row]) -> str:
    """`compare_with_paper` as Markdown: a table each for time and memory, "measured / printed" in each cell."""
    compared = compare_with_paper(rows)
    columns = list(dict.fromkeys(each.column for each in compared))
    sources = dict.fromkeys(("time", "memory"), f"printed in {_TABLE_1}")
    if rows[0].study == "training":
        sources = {"time": f"of the hours in {_TABLE_2}", "memory": f"of the GB in {_TABLE_2}"}
    tables = []
    for what, source in sources.items():
        cells = {(each.method, each.column): each for each in compared if each.what == what}
        if not cells:
            continue
        lines = [
            [method, *(_pair(cells.get((method, column))) for column in columns)]
            for method in dict.fromkeys(method for method, _ in cells)
        ]
        tables.append(markdown_table(Table("", (f"{what}: times less than {BASE}, here / {source}", *columns), lines)))
    return "\n".join(tables)


def _pair(compared: Compared | None) -> str:
    if compared is None:
        return "–"
    measured = "–" if math.isnan(compared.measured) else f"{compared.measured:.1f}×"
    return f"{measured} / {compared.printed:.1f}×"
