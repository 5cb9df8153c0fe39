"""The progress of the runs of a grid, or the trials of a search."""

from pathlib import Path
from shutil import which

from nystrom_lab.training.grid.slurm import jobs_of, queue
from nystrom_lab.training.grid.table import last_line, result_of
from nystrom_lab.training.run.folder import RunFolder
from nystrom_lab.training.study import SEARCH, STUDY, TRIALS, ended_trials, open_study, outcome


def status_lines(to: Path) -> list[str]:
    """A line for each run in a folder: its result, or its last checkpoint, job and last line of output.

    Raises:
        ValueError: The folder holds no runs, or SLURM does not answer.
    """
    jobs = jobs_of(to)
    ended = ended_trials(open_study(to)) if (to / STUDY).is_file() else {}
    results = {f"{TRIALS}/{name}": outcome(trial) for name, trial in ended.items()}
    folders = [path for folder in (to, to / TRIALS) if folder.is_dir() for path in folder.iterdir()]
    started = {str(path.relative_to(to)) for path in folders if RunFolder(path).is_started}
    names = sorted({*jobs, *results, *started} - {SEARCH})
    if not names:
        raise ValueError(
            f"{to} holds no runs: name the folder that `nystrom lra run` or `nystrom finetune --search` wrote to."
        )
    states = queue(to) if jobs and which("squeue") else {}
    lines, done = [], 0
    for name in [*names, *({SEARCH} & jobs.keys())]:
        run, words = RunFolder(to / name), []
        result = results.get(name) or result_of(run)
        done += bool(result)
        if not result and name != SEARCH:
            step = run.last_step() if run.is_started else None
            words = [f"step {step} of {run.read()['settings']['steps']}" if step else "no checkpoint yet"]
        if not result:
            state = states.get(jobs.get(name, ""), "unknown here")
            words += [f"job {jobs[name]} {state}"] if name in jobs else []
            words += [last] if state != "COMPLETED" and (last := last_line(to / f"{name}.log")) else []
        lines.append(f"{name}: {result or ', '.join(words)}")
    return [*lines, f"{done} of {len(names)} finished"]
