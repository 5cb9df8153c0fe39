"""A search over a grid of settings: each trial is a fine-tuning in its own folder, and the best is evaluated.

    search.json     what is searched
    trials/NAME/    the run of each trial, see `nystrom_lab.training.run.folder`, and its outcome; only
                    the best keeps its checkpoints
    trials.tsv      the table of trials, written last
    rows.csv        the validation score of each trial, and all results of the best
    best/           the model of the best trial

A search that was killed continues in the middle of a trial, after its last checkpoint. The best trial is chosen by
validation only; no other trial is evaluated on the test split. A trial with non-finite numbers is left out, and tried
again when the search is continued.

On a cluster the trials are first trained by jobs, see `nystrom_lab.training.finetune.search.jobs`.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path

from nystrom.sums import check_sums, holds_same
from nystrom.whole_files import write_whole
from nystrom.whole_folders import whole_folder
from nystrom_lab.measure.rows import read_rows, write_rows
from nystrom_lab.training.command import command_line
from nystrom_lab.training.finetune.classifier import StartClassifier
from nystrom_lab.training.finetune.finetune_model import run_once
from nystrom_lab.training.finetune.request import Material, Request
from nystrom_lab.training.finetune.results import ResultRows, shown
from nystrom_lab.training.finetune.search.trials import Trial, forget_failures, held, plan_trials
from nystrom_lab.training.grid.slurm import check_no_jobs
from nystrom_lab.training.hardware import processes
from nystrom_lab.training.outcome import outcome_of
from nystrom_lab.training.run.run_trainer import NotFinite

TABLE = "trials.tsv"


def search(request: Request, start: StartClassifier, material: Material, *, resume: bool) -> None:
    """Train each combination of a grid, and evaluate the one that is best on validation.

    Args:
        request: The user's request.
        start: The model.
        material: The texts.
        resume: Continue the search in the folder.

    Raises:
        ValueError: Several processes, invalid values, or a folder that holds something else or another search.
    """
    check_search()
    trials = plan_trials(request, start, material)
    with held(request.folder, trials, material, resume=resume):
        check_no_jobs(request.folder)
        forget_failures(trials)
        run_search(start, material, trials, request.folder)


def run_search(start: StartClassifier, material: Material, trials: Sequence[Trial], folder: Path) -> None:
    """Train the remaining trials, in a folder that this process has locked, and evaluate the best.

    Args:
        start: The model.
        material: The texts.
        trials: The trials.
        folder: The folder.

    Raises:
        NotFinite: No trial ended with finite numbers.
    """
    best: tuple[Trial, float] | None = None
    for number, trial in enumerate(trials, 1):
        outcome = trial.train(start, material)
        if outcome.value is None:
            print(f"a trial failed: {trial}: {outcome.error}", flush=True)
            continue
        print(f"trial {number} of {len(trials)}: {trial}: {shown(outcome.metric, outcome.value)}", flush=True)
        # The first of equals is the best.
        if best is not None and outcome.value <= best[1]:
            trial.drop_checkpoints()
        else:
            if best is not None:
                best[0].drop_checkpoints()
            best = trial, outcome.value
    if best is None:
        raise none_finite(folder)
    _finish(start, material, trials, best[0], folder)


def check_search() -> None:
    """Check that a search can run here.

    Raises:
        ValueError: Several processes.
    """
    if processes() > 1:
        raise ValueError(f"search is on, but {processes()} processes share the run: start it without torchrun.")


def none_finite(folder: Path) -> NotFinite:
    """The error to raise if no trial of a folder has a score."""
    return NotFinite(f"no trial in {folder} ended with finite numbers: search lower learning rates.")


def print_results(folder: Path) -> None:
    """Print the table of trials of a finished search, and where its results are."""
    table = (folder / TABLE).read_text(encoding="utf-8")
    print(
        f"{table.expandtabs(22)}* is the best on validation\n"
        f"model  {folder / 'best'}\ntable  {folder / TABLE}\nrows   {folder / 'rows.csv'}"
    )


def _finish(start: StartClassifier, material: Material, trials: Sequence[Trial], best: Trial, folder: Path) -> None:
    """Evaluate the best trial, and write its model, the rows and the table."""
    run = best.run
    if not run.is_finished:
        with run.held(best.settings, resume=True, main=True):
            run_once(start, material, best.settings, run, resume=True)
    if not holds_same(folder / "best", run.best):
        check_sums(run.best)
        with whole_folder(folder / "best") as partial:
            shutil.copytree(run.best, partial, dirs_exist_ok=True)
    metric, samples = material.task.metrics[0], len(material.data.splits["validation"].texts)
    rows, command = [], command_line(material.words, 1)
    lines = [["trial", *best.values, f"validation {metric}", "best step", "seconds", "best"]]
    ended = [(trial, outcome) for trial in trials if (outcome := outcome_of(trial.run)) and outcome.value is not None]
    for number, (trial, outcome) in enumerate(ended):
        assert outcome.value is not None
        cells = [number, *trial.values.values(), f"{outcome.value:.4f}", outcome.step, f"{outcome.seconds:.0f}"]
        lines.append([*map(str, cells), "*" if trial is best else ""])
        make = ResultRows(trial.settings, start.config, published=material.data.published, command=command)
        rows.append(make.row(f"validation {metric} of a trial", outcome.value, samples=samples))
    write_rows(folder / "rows.csv", [*rows, *read_rows(run.rows)])
    write_whole(folder / TABLE, "".join("\t".join(line) + "\n" for line in lines))
    print_results(folder)
