"""The progress of the runs of a grid, or the trials of a search."""

from collections.abc import Mapping
from pathlib import Path
from shutil import which

from nystrom_lab.training.grid.slurm import jobs_of, queue
from nystrom_lab.training.grid.table import last_line, reached
from nystrom_lab.training.outcome import SEARCH, TRIALS, outcome_of
from nystrom_lab.training.run.folder import RunFolder


def status_lines(to: Path) -> list[str]:
    """A line for each run in a folder: its result, or its last checkpoint, job and last line of output.

    Raises:
        ValueError: The folder holds no runs, or SLURM does not answer.
    """
    jobs = jobs_of(to)
    folders = [path for folder in (to, to / TRIALS) if folder.is_dir() for path in folder.iterdir()]
    names = sorted({*jobs, *(str(path.relative_to(to)) for path in folders if RunFolder(path).is_started)} - {SEARCH})
    if not names:
        raise ValueError(
            f"{to} holds no runs: name the folder that `nystrom lra run` or `nystrom finetune --search` wrote to."
        )
    states = queue(to) if jobs and which("squeue") else {}
    runs = {name: RunFolder(to / name) for name in names}
    done = [name for name, run in runs.items() if outcome_of(run) or run.is_finished]
    lines = [f"{name}: {_reached(run) or _line(to, name, jobs.get(name), states)}" for name, run in runs.items()]
    if SEARCH in jobs:
        lines.append(f"{SEARCH}: {', '.join(_job(to, SEARCH, jobs[SEARCH], states))}")
    return [*lines, f"{len(done)} of {len(names)} finished"]


def _reached(run: RunFolder) -> str:
    """The result of a run; "" if it has not ended."""
    if (outcome := outcome_of(run)) is not None:
        return str(outcome)
    return reached(run) if run.is_finished else ""


def _line(to: Path, name: str, job: str | None, states: Mapping[str, str]) -> str:
    """The progress of a run that has not ended."""
    run = RunFolder(to / name)
    step = run.last_step() if run.is_started else None
    words = [f"step {step} of {run.read()['settings']['steps']}" if step else "no checkpoint yet"]
    return ", ".join([*words, *_job(to, name, job, states)])


def _job(to: Path, name: str, job: str | None, states: Mapping[str, str]) -> list[str]:
    """The job of a piece of work, and its last line of output."""
    state = states.get(job or "", "unknown here")
    last = "" if state == "COMPLETED" else last_line(to / f"{name}.log")
    return [word for word in (f"job {job} {state}" if job else "", last) if word]
