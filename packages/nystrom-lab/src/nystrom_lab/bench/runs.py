"""Several runs of one comparison, each in its own process: medians over the runs, and their spread.

A run is `nystrom bench efficiency` with its own seed and folder. It measures all methods in turn, and ratios are taken
within a run. Reported are the median and the quartiles of the runs' ratios, never the best run. Finished runs are kept,
so the same command continues where it was interrupted.
"""

import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

from nystrom.checks import check_at_least, check_choice
from nystrom.interleaved_timing import quartiles
from nystrom.progress import Progress
from nystrom_lab.bench.options import Layout, command_line
from nystrom_lab.measure.rows import Row, append_rows, cpu_name, new_row, read_rows, rows_so_far


def run_runs(
    *,
    lengths: tuple[int, ...] = (8192,),
    methods: tuple[str, ...] = ("authors-64", "nystrom-64", "softmax"),
    layouts: tuple[Layout, ...] = ("heads", "tokens"),
    runs: int = 5,
    repeats: int = 9,
    seed: int = 0,
    threads: int | None = None,
    to: Path = Path("runs/runs"),
) -> list[Row]:
    """Compare methods, each with its skip convolution if it has one, in several runs.

    Rows go to runs.csv in the folder: for each layout, length, method and quantity, the median and the quartiles over
    the runs, and those of how many times less it is than with the first method. The same command with other lengths
    adds theirs.

    Args:
        lengths: Numbers of tokens n.
        methods: As for `nystrom bench efficiency`; ratios are taken against the first.
        layouts: "heads" is contiguous (b, h, n, d), "tokens" is (b, n, h*d) in and out.
        runs: Runs, each in its own process; their seeds are consecutive.
        repeats: Timed calls of each method in a run.
        seed: Seed of the first run.
        threads: CPU threads; None keeps torch's setting.
        to: Folder of the results.

    Raises:
        ValueError: An unknown or out-of-range argument, a folder that holds another setting, or a failed run.
    """
    asked = dict(locals())
    for name in ("lengths", "methods", "layouts"):
        if not asked[name]:
            raise ValueError(f"{name} is empty; expected at least one.")
    for layout in layouts:
        check_choice("an entry of layouts", layout, get_args(Layout))
    for name in ("runs", "repeats"):
        check_at_least(name, asked[name], 1)
    command = command_line(("nystrom", "bench", "runs"), run_runs, asked, "lengths")
    blank = new_row(
        study="runs", quantity="", method="", value=0, unit="", device=cpu_name(), seed=seed, command=command
    )
    rows = rows_so_far(to / "runs.csv", blank, "lengths")
    done = {row.n for row in rows}
    missing = [n for n in dict.fromkeys(lengths) if n not in done]
    if not missing:
        return [row for row in rows if row.n in lengths]
    words = ["--skip", "with", "--repeats", str(repeats), *([] if threads is None else ["--threads", str(threads)])]
    words += ["--methods", *methods, "--lengths", *map(str, missing)]
    found: dict[Layout, list[list[Row]]] = {layout: [] for layout in layouts}
    progress = Progress("runs", runs * len(layouts), unit="runs")
    for number in range(runs):
        for layout in layouts:
            folder = to / f"{layout}-{number}"
            with progress.doing(f"layout {layout}"):
                _run([*words, "--layout", layout, "--seed", str(seed + number), "--to", str(folder)])
            found[layout].append([row for row in read_rows(folder / "efficiency.csv") if row.n in missing])
            print(f"Run {number + 1} of {runs}, layout {layout}: done, in {folder}.", file=sys.stderr)
    new = [row for each in found.values() for row in summary(each, command, seed)]
    append_rows(to / "runs.csv", new)
    return [row for row in (*rows, *new) if row.n in lengths]


def summary(runs: Sequence[Sequence[Row]], command: str, seed: int) -> list[Row]:
    """Medians and quartiles over runs of one setting, then those of the ratios to the first method.

    What one of the runs did not measure has no value, but a note that says why: a median over the other runs would be
    from other moments of the machine.

    Args:
        runs: The rows of each run, of the same methods and lengths in the same order.
        command: The command that measured them.
        seed: Seed of the first run.
    """
    values: dict[tuple[int | None, str, str], list[float]] = {}
    for rows in runs:
        for row in rows:
            values.setdefault((row.n, row.quantity, row.method), []).append(row.value)
    first, found = runs[0][0].method, {(row.n, row.quantity, row.method): row for row in runs[0]}
    # The note of the first run that did not measure it.
    notes = {
        (row.n, row.quantity, row.method): f"run {number} of {len(runs)}: {row.note}"
        for number, rows in reversed([*enumerate(runs, start=1)])
        for row in rows
        if row.note
    }
    made = [
        _row(found[key], key[1], each, found[key].unit, command, seed, notes.get(key, ""))
        for key, each in values.items()
    ]
    for key, each in values.items():
        n, quantity, method = key
        if method != first:
            base = (n, quantity, first)
            ratios = [one / value for one, value in zip(values[base], each, strict=True)]
            note = notes.get(key, notes.get(base, ""))
            made.append(_row(found[key], f"{quantity}: times less than {first}", ratios, "", command, seed, note))
    return made


def _row(like: Row, quantity: str, values: Sequence[float], unit: str, command: str, seed: int, note: str) -> Row:
    measured = [value for value in values if not math.isnan(value)]
    low, middle, high = quartiles(values) if len(measured) == len(values) else (None, math.nan, None)
    return replace(
        like, study="runs", quantity=quantity, unit=unit, value=middle, low=low, high=high, repeats=len(measured),
        seed=seed, command=command, note=note,
    )  # fmt: skip


def _run(words: Sequence[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "nystrom_lab", "bench", "efficiency", *words],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise ValueError(f"a run failed: {said[-1]}")
