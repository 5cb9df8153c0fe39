"""Trained runs of the Long Range Arena beside the settings of a paper's table or figure."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from nystrom_lab.training.presets import DEPARTURES, DRAWN_BY_SEGMENTS, PRESETS
from nystrom_papers.report.printed import LRA_TASKS


class Ran(NamedTuple):
    """Runs of one method on one task that differ in the seed alone.

    The preset is one with its changes, such as "demo, learning_rate=0.001"; None is what the rows do not say.
    """

    task: str
    preset: str
    method: str
    seeds: int
    steps: int | None
    positions: int | None = None


def what_ran(runs: Sequence[Ran], preset: str, methods: Collection[str]) -> str:
    """The part of a paper's tasks, steps, positions and methods that was run, in a few words."""
    said = []
    for task, of in dict.fromkeys((run.task, run.preset) for run in runs):
        here, paper = [run for run in runs if (run.task, run.preset) == (task, of)], PRESETS[task, preset]
        facts = [
            f"{task} with the preset {of}",
            _beside([run.steps for run in here], paper.steps, "steps"),
            _beside([run.positions for run in here], paper.data.max_length, "positions"),
            _seeds([run.seeds for run in here]),
        ]
        absent = [method for method in methods if method not in {run.method for run in here}]
        facts += [f"without {' '.join(absent)}"] * bool(absent)
        said.append(", ".join(filter(None, facts)))
    missing = [task for task in LRA_TASKS if task not in {run.task for run in runs}]
    said += [f"not run: {' '.join(missing)}"] * bool(missing)
    return "; ".join(said)


def differs_from_paper(runs: Sequence[Ran], preset: str, methods: Collection[str]) -> str:
    """`Plan.differs` of runs: what was run, and in what the papers' presets and Skyformer's method depart from them."""
    of_paper = any(run.preset == preset for run in runs)
    drawn = "skyformer" in methods and any(run.method == "skyformer" for run in runs)
    departures = [*[DEPARTURES] * of_paper, *[DRAWN_BY_SEGMENTS] * drawn]
    return "; ".join([what_ran(runs, preset, methods), *departures])


def _beside(counts: Sequence[int | None], paper: int, what: str) -> str:
    known = sorted({count for count in counts if count is not None})
    if not known:
        return ""
    least, most = known[0], known[-1]
    if least == most == paper:
        return f"{paper:,} {what}"
    return f"{least:,}{f' to {most:,}' if most > least else ''} of {paper:,} {what}"


def _seeds(counts: Sequence[int]) -> str:
    least, most = min(counts), max(counts)
    return f"{least}{f' to {most}' if most > least else ''} {'seed' if most == 1 else 'seeds'}"
