"""How far the runs of a grid are."""

from pathlib import Path
from shutil import which

from nystrom.train.grid.slurm import jobs_of, queue
from nystrom.train.grid.table import last_line, reached
from nystrom.train.run.folder import RunFolder


def status_lines(to: Path) -> list[str]:
    """A line for each run in a folder: what it reached, or its last checkpoint, its job, and its last word.

    Raises:
        ValueError: The folder holds no runs, or SLURM does not answer.
    """
    jobs = jobs_of(to)
    folders = [path.name for path in to.iterdir() if RunFolder(path).is_started] if to.is_dir() else []
    names = sorted({*jobs, *folders})
    if not names:
        raise ValueError(f"{to} holds no runs: name the folder that `nystrom lra run` wrote to with --to.")
    states = queue(to) if jobs and which("squeue") else {}
    done = [name for name in names if RunFolder(to / name).is_finished]
    lines = [f"{name}: {_line(to, name, jobs.get(name), states)}" for name in names]
    return [*lines, f"{len(done)} of {len(names)} finished"]


def _line(to: Path, name: str, job: str | None, states: dict[str, str]) -> str:
    run = RunFolder(to / name)
    if run.is_finished:
        return reached(run)
    step = run.last_step() if run.is_started else None
    words = [f"step {step} of {run.read()['settings']['steps']}" if step else "no checkpoint yet"]
    if job is not None:
        state = states.get(job, "unknown here")
        words.append(f"job {job} {state}")
    if last := last_line(to / f"{name}.log"):
        words.append(last)
    return ", ".join(words)
