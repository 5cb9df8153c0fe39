"""The table of a grid: the rows of all runs that were finished in it, and their one-line summaries."""

import math
from pathlib import Path

from filelock import FileLock

from nystrom_lab.measure.rows import read_rows, write_rows
from nystrom_lab.training.run_folder import RunFolder

TABLE = "lra.csv"
_SHARES = ("test accuracy", "validation accuracy", "validation masked accuracy")


def write_table(to: Path) -> None:
    """Bring the table up to the finished runs in a folder; it keeps those whose folder is no longer there.

    Any number of processes may do so at once.
    """
    with FileLock(to / f".{TABLE}.lock"):
        folders = sorted(path for path in to.iterdir() if RunFolder(path).is_finished)
        write_rows(to / TABLE, [row for folder in folders for row in read_rows(RunFolder(folder).rows)])


def peak_memory(run: RunFolder) -> float:
    """Peak memory of a finished run in megabytes; NaN if it was not measured."""
    return _values(run).get("peak memory", math.nan)


def result_of(run: RunFolder) -> str:
    """The results of a run, such as "test 35.2%, validation 36.0%, 700 steps, 78 s, 812 MB"; "" if it has none.

    Raises:
        ValueError: The run's file of rows lacks one that each run has.
    """
    if not run.is_finished:
        return ""
    rows, peak = _values(run), peak_memory(run)
    if lacks := [name for name in ("steps", "training time") if name not in rows]:
        raise ValueError(
            f"{run.rows} has no row of {' and '.join(lacks)}: move it away, and start the same command again, which "
            "scores the run anew."
        )
    # A self-pretraining run has masked-token accuracy and no test split.
    shares = [f"{name.replace(' accuracy', '')} {rows[name]:.1%}" for name in _SHARES if name in rows]
    memory = "" if math.isnan(peak) else f", {peak:.0f} MB"
    return f"{', '.join(shares)}, {rows['steps']:.0f} steps, {rows['training time']:.0f} s{memory}"


def last_line(log: Path) -> str:
    """The last non-empty line of a log; "" if there is none."""
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.is_file() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _values(run: RunFolder) -> dict[str, float]:
    return {row.quantity: row.value for row in read_rows(run.rows)}
