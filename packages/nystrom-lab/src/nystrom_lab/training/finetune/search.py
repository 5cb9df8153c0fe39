"""A search over a grid of settings: each trial is a fine-tuning in its own folder, and the best is evaluated.

    search.json        what is searched, see `nystrom_lab.training.trials`
    trials/NAME/       the run of each trial, see `nystrom_lab.training.run_folder`, and how it ended, outcome.json;
                       only the best keeps its checkpoints
    trials/NAME.log    on a cluster, the output of the job of a trial; search.log is that of the last job
    trials.tsv         the table of trials, written last
    rows.csv           the validation score of each trial, and all results of the best
    best/              the model of the best trial
    .slurm/            see `nystrom_lab.training.grid.slurm`

A search that was killed continues in the middle of a trial, after its last checkpoint. The best trial is chosen by
validation only; no other trial is evaluated on the test split. A trial with non-finite numbers is left out, and tried
again when the search is continued. On a cluster each trial without an outcome is trained in a job; then a last job
evaluates the best, on a machine requested for that. The trials come in the order of the grid, and the first of equals
is the best.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch

from nystrom.whole_files import write_whole
from nystrom_lab.config import FinetuneOptions, command_line
from nystrom_lab.measure.rows import read_rows, write_rows
from nystrom_lab.training.finetune.classifier import StartClassifier, find_classifier
from nystrom_lab.training.finetune.finetune_settings import FinetuneSettings
from nystrom_lab.training.finetune.inputs import LabelledInputs, read_texts
from nystrom_lab.training.finetune.results import ResultRows
from nystrom_lab.training.finetune.run import FinetuneRun
from nystrom_lab.training.grid.scheduler import Work
from nystrom_lab.training.grid.slurm import Jobs, alive_jobs, check_no_jobs
from nystrom_lab.training.hardware import processes, usable_device, usable_precision
from nystrom_lab.training.life import execute
from nystrom_lab.training.run_folder import RunFolder, alone
from nystrom_lab.training.run_progress import no_file_bars
from nystrom_lab.training.run_trainer import NotFinite
from nystrom_lab.training.trials import OUTCOME, RECORD, SEARCH, TRIALS, Outcome, outcome_of, read_search
from nystrom_lab.whole_folders import holds_same, whole_folder

TABLE = "trials.tsv"


class Trial(NamedTuple):
    """A combination of values, the fine-tuning with them, its settings, and its folder."""

    values: Mapping[str, float]
    kind: FinetuneRun
    settings: FinetuneSettings
    run: RunFolder


class Search:
    """A search; `open` comes before all else.

    Args:
        options: The user's options; `to` is the folder of the search.

    Attributes:
        trials: The trials by the name of their folder, in the order of the grid.

    Raises:
        ValueError: Several processes share the run, or values cannot be used.
    """

    def __init__(self, options: FinetuneOptions, start: StartClassifier, labelled: LabelledInputs):
        if processes() > 1:
            raise ValueError(f"search is on, but {processes()} processes share the run: start it without torchrun.")
        assert options.to is not None
        self.folder, self.start, self.labelled = options.to, start, labelled
        self.trials: dict[str, Trial] = {}
        for values in options.grid.trials():
            name = "_".join(f"{key}-{value}" for key, value in values.items())
            kind = FinetuneRun(options.changed(values), RunFolder(self.folder / TRIALS / name), start, labelled)
            self.trials[name] = Trial(values, kind, kind.settings(), kind.run)

    def open(self, *, resume: bool) -> None:
        """Write what is searched into the folder, which is new, or holds this search, which is to continue.

        Raises:
            ValueError: The folder holds something else or another search.
        """
        folder, other = self.folder, "choose another folder with --to."
        data, settings = self.labelled.data.fingerprint(), [trial.settings for trial in self.trials.values()]
        if (before := read_search(folder)) is None:
            # A search that was killed while writing its record leaves the beginning of that file.
            names = (entry.name for entry in folder.iterdir())
            if strange := [name for name in names if name != ".lock" and not name.startswith(f".{RECORD}.")]:
                raise ValueError(f"{folder} holds {strange[0]} and no search: {other}")
            if resume:
                raise ValueError(
                    f"{folder} holds no search to resume: leave --resume out, or name its folder with --to."
                )
            content = {"data": data, "trials": [each.record() for each in settings]}
            write_whole(folder / RECORD, json.dumps(content, indent=1) + "\n")
        elif not resume:
            raise ValueError(f"{folder} holds a search: continue it with --resume, or {other}")
        elif (
            before["data"] != data
            or len(before["trials"]) != len(settings)
            or any(mine.differences(there) for mine, there in zip(settings, before["trials"], strict=True))
        ):
            raise ValueError(f"{folder} holds a search of other values, settings or data: {other}")

    def forget_failures(self) -> None:
        """Let the trials without a score be tried again."""
        for name in self.trials.keys() - self.scored():
            (self.trials[name].run.path / OUTCOME).unlink(missing_ok=True)

    def train(self, name: str) -> None:
        """Train a trial without evaluating it on the test split; non-finite numbers also are an outcome.

        Raises:
            ValueError: Another process is training it.
        """
        values, kind, _, run = self.trials[name]
        metric = self.labelled.task.metrics[0]
        try:
            trainer = execute(kind, resume=run.is_started, score=False)
        except NotFinite as error:
            outcome = Outcome(metric, error=str(error))
        else:
            assert trainer is not None, "a trial without an outcome is not finished"
            outcome = Outcome(metric, trainer.state.best_metric, trainer.state.best_global_step, trainer.seconds)
        outcome.write(run)
        print(f"{', '.join(f'{key} {value}' for key, value in values.items())}: {outcome}", flush=True)

    def scored(self) -> dict[str, Outcome]:
        """The outcomes of the trials that have a score, in the order of the grid."""
        outcomes = {name: outcome_of(trial.run) for name, trial in self.trials.items()}
        return {name: outcome for name, outcome in outcomes.items() if outcome and outcome.value is not None}

    def keep_best(self) -> str | None:
        """The name of the best trial so far; the others lose their checkpoints."""
        scored = self.scored()
        best = max(scored, key=lambda name: scored[name].value or 0, default=None)
        for name in scored:
            if name != best:
                self.trials[name].run.remove_checkpoints()
        return best

    def finish(self) -> None:
        """Evaluate the best trial, and write its model, the rows and the table.

        Raises:
            NotFinite: No trial ended with finite numbers.
        """
        folder, labelled, best = self.folder, self.labelled, self.keep_best()
        if best is None:
            raise NotFinite(f"no trial in {folder} ended with finite numbers: search lower learning rates.")
        values, kind, _, run = self.trials[best]
        if not run.is_finished:
            execute(kind, resume=True)
        if not holds_same(folder / "best", run.best):
            run.check_best()
            with whole_folder(folder / "best") as partial:
                shutil.copytree(run.best, partial, dirs_exist_ok=True)
        metric, samples = labelled.task.metrics[0], len(labelled.data.splits["validation"].texts)
        rows, command = [], command_line(labelled.words, 1)
        lines = [["trial", *values, f"validation {metric}", "best step", "seconds", "best"]]
        for number, (name, (_, value, step, seconds, _)) in enumerate(self.scored().items()):
            assert value is not None
            values, _, settings, _ = self.trials[name]
            facts = [f"{value:.4f}", step, f"{seconds:.0f}"]
            lines.append([*map(str, [number, *values.values(), *facts]), "*" if name == best else ""])
            make = ResultRows(settings, self.start.config, published=labelled.data.published, command=command)
            rows.append(make.row(f"validation {metric} of a trial", value, samples=samples))
        write_rows(folder / "rows.csv", [*rows, *read_rows(run.rows)])
        write_whole(folder / TABLE, "".join("\t".join(line) + "\n" for line in lines))

    def print_results(self) -> None:
        """Print the table of trials of a finished search, those that it lacks, and where its results are."""
        folder, table = self.folder, (self.folder / TABLE).read_text(encoding="utf-8")
        print(f"{table.expandtabs(22)}* is the best on validation")
        for name, trial in self.trials.items():
            if (outcome := outcome_of(trial.run)) and outcome.value is None:
                print(f"not in the table: {name}, {outcome}")
        print(f"model  {folder / 'best'}")
        print(f"table  {folder / TABLE}\nrows   {folder / 'rows.csv'}")


def search_here(options: FinetuneOptions, start: StartClassifier, labelled: LabelledInputs) -> None:
    """Train each combination of a grid, and evaluate the one that is best on validation; see `Search`.

    Raises:
        ValueError: Several processes, invalid values, or a folder that holds something else or another search.
        NotFinite: No trial ended with finite numbers.
    """
    search = Search(options, start, labelled)
    with alone(search.folder, "`nystrom finetune --search`"):
        search.open(resume=options.resume)
        check_no_jobs(search.folder)
        search.forget_failures()
        for name in search.trials:
            if name not in search.scored():
                search.train(name)
                search.keep_best()
        search.finish()
        search.print_results()


# Until a job that was displaced has let go of its files.
_WAIT_SECONDS = 120


def search_in_jobs(options: FinetuneOptions, start: StartClassifier, labelled: LabelledInputs, cluster: Jobs) -> None:
    """Train each trial of a search in a job, then evaluate the best in another, and wait for them; see `search_here`.

    The same command continues an interrupted search; while earlier jobs are in the queue, it waits for them.

    Raises:
        ValueError: The cases of `search_here`, or jobs that failed, with their logs.
        NotFinite: No trial had finite numbers.
    """
    folder, given = cluster.to, [replace(options, to=cluster.to), labelled.words]
    search = Search(given[0], start, labelled)
    if alive_jobs(folder):
        search.open(resume=True)
    else:
        with alone(folder, "`nystrom finetune --search`"):
            search.open(resume=options.resume or read_search(folder) is not None)
            search.forget_failures()
    (folder / TRIALS).mkdir(exist_ok=True)

    def scored() -> str:
        table = folder / TABLE
        lines = table.read_text(encoding="utf-8").splitlines() if table.is_file() else []
        return "the best trial is scored" if len(lines) == 1 + len(search.scored()) else ""

    trials = [
        Work(f"{TRIALS}/{name}", train_in_job, [*given, name], lambda run=trial.run: str(outcome_of(run) or ""))
        for name, trial in search.trials.items()
    ]
    best = [Work(SEARCH, finish_in_job, given, scored)]
    for works in (trials, best):
        if failures := cluster.run(works):
            said = "; ".join(f"{failure.name} failed, {failure.reason}, log: {failure.log}" for failure in failures)
            raise ValueError(f"{said}. The same command tries again.")
        if not search.scored():
            # `finish` raises NotFinite if no trial has a score.
            search.finish()
    search.print_results()


def train_in_job(options: FinetuneOptions, words: tuple[str, ...], name: str) -> None:
    """Train a trial of a search, from its last checkpoint if there is one."""
    with no_file_bars():
        search = _planned(options, words)
        search.open(resume=True)
        search.trials[name].run.wait(_WAIT_SECONDS)
        search.train(name)


def finish_in_job(options: FinetuneOptions, words: tuple[str, ...]) -> None:
    """Evaluate the best trial of a search whose trials are trained."""
    with no_file_bars():
        search = _planned(options, words)
        with alone(search.folder, "`nystrom finetune --search`", _WAIT_SECONDS):
            search.open(resume=True)
            search.finish()


def _planned(options: FinetuneOptions, words: tuple[str, ...]) -> Search:
    """Read in a job what the submitting command has already read and checked."""
    assert options.threads is not None
    torch.set_num_threads(options.threads)
    usable_precision(options.precision, usable_device(options.device))
    start = find_classifier(options.model, attention=options.attention, options=options.options)
    return Search(options, start, read_texts(options, words))
