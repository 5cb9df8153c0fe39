"""A search whose trials run as cluster jobs; it adds these files to those of a local search.

    trials/NAME.log    output of the job of a trial
    search.log         output of the last job
    .slurm/            see `nystrom_lab.training.grid.slurm`

Each trial without an outcome is trained in a job. Then a last job evaluates the best, on a machine requested for that.
"""

from functools import partial

import torch

from nystrom_lab.training.finetune.classifier import StartClassifier, find_classifier
from nystrom_lab.training.finetune.request import Material, Request
from nystrom_lab.training.finetune.search.search import TABLE, Search
from nystrom_lab.training.grid.alone import alone
from nystrom_lab.training.grid.slurm import Jobs, Work, alive_jobs
from nystrom_lab.training.hardware import usable_device, usable_precision
from nystrom_lab.training.run.progress import no_file_bars
from nystrom_lab.training.study import SEARCH, STUDY, TRIALS, ended_trials, outcome

# Until a job that was displaced has let go of its files.
_WAIT_SECONDS = 120


def search_in_jobs(
    request: Request, start: StartClassifier, material: Material, cluster: Jobs, *, resume: bool
) -> None:
    """Train each trial of a search in a job, then evaluate the best in another, and wait for them.

    The same command continues an interrupted search; while earlier jobs are in the queue, it waits for them.

    Args:
        request: The user's request.
        start: The model.
        material: The texts.
        cluster: The jobs of the folder.
        resume: The folder must hold this search.

    Raises:
        ValueError: What `nystrom_lab.training.finetune.search.search.search` raises, or jobs that failed, with their
            logs.
        NotFinite: No trial had finite numbers.
    """
    search, folder, since = Search(request, start, material), request.folder, 0
    if alive_jobs(folder):
        search.open(resume=True)
    else:
        with alone(folder, "`nystrom finetune --search`"):
            search.open(resume=resume or (folder / STUDY).is_file())
            since = len(search.study.trials)
    (folder / TRIALS).mkdir(exist_ok=True)

    def ended(name: str) -> str:
        trial = ended_trials(search.study, since).get(name)
        return "" if trial is None else outcome(trial)

    def scored() -> str:
        table = folder / TABLE
        lines = table.read_text(encoding="utf-8").splitlines() if table.is_file() else []
        return "the best trial is scored" if len(lines) == 1 + len(search.scored()) else ""

    trials = [Work(f"{TRIALS}/{name}", train_in_job, [request, name], partial(ended, name)) for name in search.trials]
    for works in (trials, [Work(SEARCH, finish_in_job, [request], scored)]):
        if failures := cluster.run(works):
            said = "; ".join(f"{failure.name} failed, {failure.reason}, log: {failure.log}" for failure in failures)
            raise ValueError(f"{said}. The same command tries again.")
        if not search.scored():
            # Says that there is nothing to finish.
            search.finish()
    search.print_results()


def train_in_job(request: Request, name: str) -> None:
    """Train a trial of a search, from its last checkpoint if there is one."""
    with no_file_bars():
        search = _planned(request)
        search.open(resume=True)
        search.trials[name].run.wait(_WAIT_SECONDS)
        search.train(name)


def finish_in_job(request: Request) -> None:
    """Evaluate the best trial of a search whose trials are trained."""
    with no_file_bars():
        search = _planned(request)
        with alone(request.folder, "`nystrom finetune --search`", _WAIT_SECONDS):
            search.open(resume=True)
            search.finish()


def _planned(request: Request) -> Search:
    """Read in a job what the submitting command has already read and checked."""
    asked = request.asked
    assert asked.threads is not None
    torch.set_num_threads(asked.threads)
    usable_precision(asked.precision, usable_device(asked.device))
    start = find_classifier(asked.model, attention=asked.attention, options=asked.options)
    return Search(request, start, request.read())
