"""A search whose trials run as cluster jobs; it adds these files to those of a local search.

    trials/NAME.log    output of the job of a trial
    search.log         output of the last job
    .slurm/            see `nystrom_lab.training.grid.slurm`

Each trial without an outcome is trained in a job. Once all have one, a last job runs the search, which has nothing left
to train: it only evaluates the best trial, on a machine requested for that.
"""

from collections.abc import Sequence
from typing import NoReturn

import torch

from nystrom_lab.training.finetune.classifier import StartClassifier, find_classifier
from nystrom_lab.training.finetune.request import Material, Request
from nystrom_lab.training.finetune.search.search import TABLE, check_search, none_finite, print_results, run_search
from nystrom_lab.training.finetune.search.trials import Trial, check_same, forget_failures, held, plan_trials
from nystrom_lab.training.grid.processes import Failure
from nystrom_lab.training.grid.slurm import Jobs, Work, alive_jobs
from nystrom_lab.training.hardware import usable_device, usable_precision
from nystrom_lab.training.outcome import SEARCH, TRIALS, outcome_of
from nystrom_lab.training.run.progress import no_file_bars

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
        logs. FloatingPointError: No trial had finite numbers.
    """
    check_search()
    folder, trials = request.folder, plan_trials(request, start, material)
    if alive_jobs(folder):
        check_same(folder, trials, material, resume=True)
    else:
        with held(folder, trials, material, resume=resume or (folder / "search.json").is_file()):
            forget_failures(trials)
    (folder / TRIALS).mkdir(exist_ok=True)
    works = {f"{TRIALS}/{trial.run.path.name}": trial for trial in trials}
    if failures := cluster.run(
        [
            Work(name, train_in_job, [request, place], trial.is_done)
            for place, (name, trial) in enumerate(works.items())
        ],
        lambda work: str(outcome_of(works[work.name].run)),
    ):
        _stop(failures)
    if not _finite(trials):
        raise none_finite(folder)
    if failures := cluster.run(
        [Work(SEARCH, finish_in_job, [request], lambda: _rows(request) == _finite(trials))],
        lambda work: "the best trial is scored",
    ):
        _stop(failures)
    print_results(folder)


def train_in_job(request: Request, place: int) -> None:
    """Train a trial, from its last checkpoint if there is one.

    Args:
        request: The search.
        place: Index of the trial.
    """
    with no_file_bars():
        start, material, trials = _open(request)
        check_same(request.folder, trials, material, resume=True)
        trials[place].run.wait(_WAIT_SECONDS)
        print(trials[place].train(start, material), flush=True)


def finish_in_job(request: Request) -> None:
    """Finish a search whose trials are trained, and evaluate the best.

    Args:
        request: The search.
    """
    with no_file_bars():
        start, material, trials = _open(request)
        with held(request.folder, trials, material, resume=True, seconds=_WAIT_SECONDS):
            run_search(start, material, trials, request.folder)


def _open(request: Request) -> tuple[StartClassifier, Material, list[Trial]]:
    """Read in a job what the submitting command has already read and checked."""
    asked = request.asked
    assert asked.threads is not None
    torch.set_num_threads(asked.threads)
    usable_precision(asked.precision, usable_device(asked.device))
    material = request.read()
    start = find_classifier(asked.model, attention=asked.attention, options=asked.options)
    return start, material, plan_trials(request, start, material)


def _finite(trials: Sequence[Trial]) -> int:
    """How many trials have a score."""
    outcomes = [outcome_of(trial.run) for trial in trials]
    return sum(outcome is not None and not outcome.error for outcome in outcomes)


def _rows(request: Request) -> int:
    """The trials in the table of a search, which is written last."""
    table = request.folder / TABLE
    return len(table.read_text(encoding="utf-8").splitlines()) - 1 if table.is_file() else 0


def _stop(failures: Sequence[Failure]) -> NoReturn:
    said = "; ".join(f"{failure.name} failed, {failure.reason}, log: {failure.log}" for failure in failures)
    raise ValueError(f"{said}. The same command tries again.")
