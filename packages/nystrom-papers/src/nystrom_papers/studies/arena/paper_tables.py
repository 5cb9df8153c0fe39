r"""Table 3 of Nyströmformer and Table 1 of Skyformer: accuracies in the Long Range Arena, from trained runs.

--runs names the folder of `nystrom lra run`; the rows of its finished runs are read. For each task, the runs compared
are those with the paper's preset or, where there are none, with the preset and the changes to it that most methods were
run with, so that only the attention differs. Rows that do not say their preset are not compared. The title of the table
says what was run. The size "paper" requires all methods and tasks of the table, with the preset of the paper and three
seeds.

The standard error of an accuracy over s seeds of N test samples is the binomial one, $\sqrt{p (1 - p) / N}$, or, from
three seeds on, that of their mean, if it is larger. A method is above another if the difference is more than two
standard errors of the difference. A claim on an average needs all five tasks.

The guess without a model is the largest share that follows from the number of classes, taken to be of equal size,
or, on ListOps, from the first operator. If softmax attention is not above the guess by two standard errors, it has
not learned the task, and no comparison with it is decided.

Source: Xiong et al. (2021), arXiv:2102.03902, Table 3; Chen et al. (2021), arXiv:2111.00035, Table 1.
"""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from nystrom_lab.data.lra.facts import LRA
from nystrom_lab.measure.rows import Row, read_rows
from nystrom_lab.report.plots.canvas import PAGE, figure_of, method_look
from nystrom_lab.report.table import Table
from nystrom_lab.training.run_folder import RunFolder
from nystrom_papers.report.lra.runs import FIRST_OPERATOR, Accuracy, lra_cells, lra_guesses
from nystrom_papers.report.lra.tables import lra_lines
from nystrom_papers.report.printed import LRA_TASKS, NYSTROMFORMER_TABLE_3, SKYFORMER_TABLE_1
from nystrom_papers.studies.arena.beside_paper import Ran, differs_from_paper, what_ran
from nystrom_papers.studies.reproduce.declared import Answer, Claim, declare, frame_of, select
from nystrom_papers.studies.reproduce.known import estimate, holds_for_share, is_competitive
from nystrom_papers.studies.reproduce.study import Figures, Part, Plan, Setting, Study

_Printed = Mapping[str, tuple[float, float, float, float, float]]
EXACT = "softmax"
_SEEDS = 3
_READ = ("test accuracy", "steps", FIRST_OPERATOR)


def _plan(setting: Setting, printed: _Printed, preset: str) -> Plan:
    if setting.runs is None:
        raise ValueError("this study reads trained runs: name the folder of `nystrom lra run` with --runs.")
    runs = _finished(setting.runs)
    cells = _cells([row for rows in runs.values() for row in rows], preset)
    if setting.size == "paper":
        missing = [
            f"{method} on {task}"
            for method in printed
            for task in LRA_TASKS
            if (cell := cells.get((task, method))) is None or cell[0] != preset or cell[1].seeds < _SEEDS
        ]
        if missing:
            raise ValueError(
                f"--size paper needs three finished runs with the preset {preset} of {', '.join(missing)} in "
                f"{setting.runs}: make them with nystrom lra run --preset {preset} --methods {' '.join(printed)} "
                "--seeds 0 1 2."
            )
    parts = [Part(name, partial(_measure, setting.runs / name)) for name in runs]
    return Plan(parts, {"runs": " ".join(runs)}, differs_from_paper(_ran(cells), preset, printed))


def _finished(runs: Path) -> dict[str, list[Row]]:
    """Rows of the finished runs in a folder, by the name of the run's folder.

    Raises:
        ValueError: There is no finished run.
    """
    by_run = {}
    for path in sorted(runs.glob("*/run.json")):
        run = RunFolder(path.parent)
        if run.is_finished and (rows := [row for row in read_rows(run.rows) if _is_read(row)]):
            by_run[path.parent.name] = rows
    if not by_run:
        raise ValueError(
            f"--runs {runs} holds no finished run of the Long Range Arena: make some with nystrom lra run."
        )
    return by_run


def _is_read(row: Row) -> bool:
    return row.study.removeprefix("train ") in LRA_TASKS and row.quantity in _READ


def _measure(folder: Path, study: Path) -> Iterable[Row]:
    """The rows of a run. The task moves from the study to the quantity, since the study becomes this one."""
    for row in read_rows(RunFolder(folder).rows):
        if _is_read(row):
            yield replace(row, quantity=f"{row.study.removeprefix('train ')} {row.quantity}")


def _as_trained(rows: Sequence[Row]) -> list[Row]:
    """The rows as the runs wrote them, with the task in the study."""
    parts = [(row, row.quantity.partition(" ")) for row in rows]
    return [replace(row, study=f"train {task}", quantity=quantity) for row, (task, _, quantity) in parts]


_Cells = Mapping[tuple[str, str], tuple[str, Accuracy]]


def _cells(rows: Iterable[Row], preset: str) -> _Cells:
    """Preset and accuracy by task and method.

    A task has the paper's preset or, where no run has it, the preset with the most methods; and a method the size with
    the most tasks, then the most seeds; among equals, the first. Runs whose rows do not say their preset are left out.
    """
    lines = {line: tasks for line, tasks in lra_cells(list(rows)).items() if line.preset}
    cells: dict[tuple[str, str], tuple[str, Accuracy]] = {}
    for task in LRA_TASKS:
        here = [line for line, tasks in lines.items() if task in tasks]
        counts = Counter(of for of, _ in {(line.preset, line.base) for line in here})
        chosen = max((line.preset for line in here), key=lambda of: (of == preset, counts[of]), default="")
        sizes = [line for line in here if line.preset == chosen]
        for line in sorted(sizes, key=lambda line: (-len(lines[line]), -lines[line][task].seeds)):
            cells.setdefault((task, line.base), (line.preset, lines[line][task]))
    return cells


def _ran(cells: _Cells) -> list[Ran]:
    return [
        Ran(task, preset, method, cell.seeds, cell.steps, cell.positions)
        for (task, method), (preset, cell) in cells.items()
    ]


def _tables(frame: pd.DataFrame, *, printed: _Printed, preset: str) -> Sequence[Table]:
    lines = [[name, *cells] for name, cells in lra_lines(list(frame["row"]))]
    ran = what_ran(_ran(_cells(frame["row"], preset)), preset, printed)
    title = f"accuracy in %, below it what the papers print; compared are {ran}"
    return [Table(title, ["attention", *LRA_TASKS, "mean"], lines)]


def _differs(rows: Sequence[Row], *, printed: _Printed, preset: str) -> str:
    return differs_from_paper(_ran(_cells(_as_trained(rows), preset)), preset, printed)


def _standard_error(accuracy: Accuracy) -> float:
    of_seeds = 0.0
    if accuracy.seeds >= _SEEDS and accuracy.deviation is not None:
        of_seeds = accuracy.deviation / math.sqrt(accuracy.seeds)
    return max(accuracy.error, of_seeds)


def _difference(cells: _Cells, ours: str, other: str) -> tuple[float, float, list[str]] | None:
    """How far one average is above another, its standard error, and the tasks; None if no task has both methods."""
    tasks = [task for task in LRA_TASKS if (task, ours) in cells and (task, other) in cells]
    if not tasks:
        return None
    gap = statistics.fmean(cells[task, ours][1].mean - cells[task, other][1].mean for task in tasks)
    errors = [_standard_error(cells[task, method][1]) for task in tasks for method in (ours, other)]
    return gap, math.hypot(*errors) / len(tasks), tasks


def _not_learned(cells: _Cells, frame: pd.DataFrame) -> list[str]:
    """The tasks on which softmax attention is not above a guess without a model."""
    guesses = {task: 1 / LRA[task].num_labels for task in LRA_TASKS}
    guesses["listops"] = max([guesses["listops"], *select(frame, FIRST_OPERATOR)["value"]])
    exact = {task: cells[task, EXACT][1] for task in LRA_TASKS if (task, EXACT) in cells}
    return [task for task, cell in exact.items() if cell.mean - 2 * _standard_error(cell) <= 100 * guesses[task]]


def _above(preset: str, ours: str, others: Sequence[str], frame: pd.DataFrame) -> Answer:
    """Whether an average is above others: False if it is below one, None if a difference is within its error."""
    cells = _cells(frame["row"], preset)
    differences = {other: _difference(cells, ours, other) for other in others}
    said = ", ".join(
        f"{other} was not measured beside it" if each is None
        else f"{each[0]:+.1f} ± {each[1]:.1f} beside {other} ({len(each[2])} of {len(LRA_TASKS)} tasks)"
        for other, each in differences.items()
    )  # fmt: skip
    sides = [
        None if each is None or len(each[2]) < len(LRA_TASKS) else estimate(each[0], each[1]).above(0)
        for each in differences.values()
    ]
    idle = _not_learned(cells, frame) if EXACT in others else []
    return None if idle else holds_for_share(sides), f"{ours}: {said}.{_at_guess(idle)}"


def _on_par(frame: pd.DataFrame) -> Answer:
    cells = _cells(frame["row"], "nystromformer")
    idle = _not_learned(cells, frame)
    differences = {
        task: _difference({key: cell for key, cell in cells.items() if key[0] == task}, "nystrom", EXACT)
        for task in LRA_TASKS
    }
    gaps = {task: each for task, each in differences.items() if each is not None}
    if not gaps:
        return None, "not measured on one task."
    said = ", ".join(f"{task} {gap:+.1f} ± {error:.1f}" for task, (gap, error, _) in gaps.items())
    par = [None if task in idle else is_competitive(gap / 100, error / 100) for task, (gap, error, _) in gaps.items()]
    words = [f"{said} ({len(gaps)} of {len(LRA_TASKS)} tasks).", *lra_guesses(list(frame["row"]))]
    return holds_for_share([*par, *[None] * (len(LRA_TASKS) - len(par))]), " ".join(words) + _at_guess(idle)


def _at_guess(idle: Sequence[str]) -> str:
    return f" {EXACT} is no better than a guess on {', '.join(idle)}." if idle else ""


def _figures(frame: pd.DataFrame, folder: Path, *, printed: _Printed, preset: str) -> Figures:
    cells = _cells(frame["row"], preset)
    methods = list(dict.fromkeys(method for _, method in cells))
    tasks = [task for task in LRA_TASKS if any(of == task for of, _ in cells)]
    figure = figure_of(PAGE, 3.2)
    axes = figure.subplots()
    for number, method in enumerate(methods):
        look, shift = method_look(method), (number - (len(methods) - 1) / 2) * 0.7 / len(methods)
        here = [(place, cells[task, method][1]) for place, task in enumerate(tasks) if (task, method) in cells]
        axes.errorbar(
            [place + shift for place, _ in here],
            [cell.mean for _, cell in here],
            yerr=[_standard_error(cell) for _, cell in here],
            color=look.colour, marker=look.marker, linestyle="", label=method,
        )  # fmt: skip
        if method in printed:
            points = [(place + shift, printed[method][LRA_TASKS.index(task)]) for place, task in enumerate(tasks)]
            axes.plot(*zip(*points, strict=True), color=look.colour, marker="_", markersize=9, linestyle="")
    axes.plot([], [], color="0.4", marker="_", markersize=9, linestyle="", label="printed")
    presets = {task: of for (task, _), (of, _) in cells.items()}
    names = [f"{task}, preset {presets[task]}" for task in tasks]
    axes.set(xticks=range(len(tasks)), xticklabels=names, ylabel="test accuracy, %")
    axes.grid(True, axis="y")
    figure.legend(loc="outside lower center", ncols=5)
    return {"": figure}


def _study(printed: _Printed, preset: str, claims: Sequence[Claim], **facts: Any) -> Study:
    paper: dict[str, Any] = {"printed": printed, "preset": preset}
    return declare(
        framed=lambda rows: frame_of(_as_trained(rows)),
        plan=partial(_plan, **paper),
        tables=[partial(_tables, **paper)],
        claims=claims,
        figures=partial(_figures, **paper),
        differs=partial(_differs, **paper),
        **facts,
    )


STUDIES = {
    "nystromformer-table-3": _study(
        NYSTROMFORMER_TABLE_3,
        "nystromformer",
        [
            Claim(
                "Nyström attention is on par with softmax attention in every task.", _on_par, "Nyströmformer, Table 3"
            ),
            Claim(
                "It outperforms other efficient attentions on average.",
                partial(_above, "nystromformer", "nystrom", ("reformer", "linformer", "performer")),
                "Nyströmformer, Table 3",
            ),
        ],
        shows="accuracies in the Long Range Arena",
        source="Nyströmformer, arXiv:2102.03902, Table 3",
        needs="--runs with those of nystrom lra run",
        paper_needs="about 50 hours on an H200",
        trains=True,
    ),
    "skyformer-table-1": _study(
        SKYFORMER_TABLE_1,
        "skyformer",
        [
            Claim(
                "Gaussian kernels in place of softmax raise the accuracy.",
                partial(_above, "skyformer", "kernelized", (EXACT,)), "Skyformer, section 5",
            ),
            Claim(
                "Skyformer is generally better than softmax attention.",
                partial(_above, "skyformer", "skyformer", (EXACT,)), "Skyformer, section 5",
            ),
        ],
        shows="accuracies in the Long Range Arena",
        source="Skyformer, arXiv:2111.00035, Table 1",
        needs="--runs with those of nystrom lra run",
        paper_needs="about 50 hours on an H200",
        trains=True,
    ),
}  # fmt: skip
