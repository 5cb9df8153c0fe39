"""A search over a grid of settings: each trial is a fine-tuning in its own folder, and the best is evaluated.

    study.log          what is searched, and how each trial ended, see `nystrom_lab.training.study`
    trials/NAME/       the run of each trial, see `nystrom_lab.training.run_folder`; only the best keeps its checkpoints
    trials/NAME.log    on a cluster, the output of the job of a trial; search.log is that of the last job
    trials.tsv         the table of trials, written last
    rows.csv           the validation score of each trial, and all results of the best
    best/              the model of the best trial
    .slurm/            see `nystrom_lab.training.grid.slurm`

A search that was killed continues in the middle of a trial, after its last checkpoint. The best trial is chosen by
validation only; no other trial is evaluated on the test split. A trial with non-finite numbers is left out, and tried
again when the search is continued. On a cluster each trial without an outcome is trained in a job; then a last job
evaluates the best, on a machine requested for that.

The trials come in the order of the grid, and the first of equals is the best. Optuna's `GridSampler` draws them in
another order, does not try those again that failed, and trains one anew when a finished study is continued.
"""

import shutil
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from nystrom.whole_files import write_whole
from nystrom_lab.config import FinetuneOptions, command_line
from nystrom_lab.measure.rows import read_rows, write_rows
from nystrom_lab.training.finetune.classifier import StartClassifier, find_classifier
from nystrom_lab.training.finetune.finetune_settings import FinetuneSettings
from nystrom_lab.training.finetune.results import ResultRows
from nystrom_lab.training.finetune.run import LabelledInputs, read_texts, run_once, settle
from nystrom_lab.training.grid.slurm import Jobs, Work, alive_jobs, check_no_jobs
from nystrom_lab.training.hardware import processes, usable_device, usable_precision
from nystrom_lab.training.run_folder import RunFolder, alone
from nystrom_lab.training.run_progress import no_file_bars
from nystrom_lab.training.run_trainer import NotFinite
from nystrom_lab.training.study import SEARCH, STUDY, TRIALS, ended_trials, open_study, outcome
from nystrom_lab.whole_folders import holds_same, whole_folder

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial


TABLE = "trials.tsv"


class Trial(NamedTuple):
    """A combination of values, the settings with them, and its folder."""

    values: Mapping[str, float]
    settings: FinetuneSettings
    run: RunFolder


class Search:
    """A search; `open` comes before all else.

    Args:
        asked: The user's options; `to` is the folder of the search.

    Attributes:
        trials: The trials by the name of their folder, in the order of the grid.

    Raises:
        ValueError: Several processes share the run, or values cannot be used.
    """

    def __init__(self, asked: FinetuneOptions, start: StartClassifier, labelled: LabelledInputs):
        if processes() > 1:
            raise ValueError(f"search is on, but {processes()} processes share the run: start it without torchrun.")
        assert asked.to is not None
        self.folder, self.grid, self.start, self.labelled = asked.to, asked.grid, start, labelled
        self.trials: dict[str, Trial] = {}
        for values in asked.grid.trials():
            name = "_".join(f"{key}-{value}" for key, value in values.items())
            settings = settle(start, labelled, asked.changed(values))
            self.trials[name] = Trial(values, settings, RunFolder(self.folder / TRIALS / name))

    def open(self, *, resume: bool) -> None:
        """Open the study in the folder, which is new, or holds this search, which is to continue.

        Raises:
            ValueError: The folder holds something else or another search.
        """
        folder, other = self.folder, "choose another folder with --to."
        if (folder / STUDY).is_file():
            if not resume:
                raise ValueError(f"{folder} holds a search: continue it with --resume, or {other}")
        elif strange := [path.name for path in folder.iterdir() if path.name not in (".lock", f".{STUDY}.lock")]:
            kind = "a search of version 0.3, which only that continues" if "search.json" in strange else "no search"
            raise ValueError(f"{folder} holds {strange[0]} and {kind}: {other}")
        elif resume:
            raise ValueError(f"{folder} holds no search to resume: leave --resume out, or name its folder with --to.")
        self.study = open_study(folder)
        data, settings = self.labelled.data.fingerprint(), [trial.settings for trial in self.trials.values()]
        if (before := self.study.user_attrs.get("search")) is None:
            self.study.set_user_attr("search", {"data": data, "trials": [each.record() for each in settings]})
        elif (
            before["data"] != data
            or len(before["trials"]) != len(settings)
            or any(mine.differences(there) for mine, there in zip(settings, before["trials"], strict=True))
        ):
            raise ValueError(f"{folder} holds a search of other values, settings or data: {other}")

    def train(self, name: str) -> None:
        """Train a trial without evaluating it on the test split; non-finite numbers also are an outcome.

        Raises:
            ValueError: Another process is training it.
        """
        from optuna.distributions import CategoricalDistribution
        from optuna.trial import TrialState, create_trial

        values, settings, run = self.trials[name]
        state, value, facts = TrialState.COMPLETE, None, {"name": name, "metric": self.labelled.task.metrics[0]}
        resume = run.is_started
        with run.held(settings, resume=resume, main=True):
            try:
                done = run_once(self.start, self.labelled, settings, run, resume=resume, score=False)
            except NotFinite as error:
                state, facts["error"] = TrialState.FAIL, str(error)
            else:
                value = done.state.best_metric
                facts |= {"step": done.state.best_global_step, "seconds": done.seconds}
            choices: dict[str, Any] = {key: CategoricalDistribution(each) for key, each in self.grid.values().items()}
            trial = create_trial(state=state, value=value, params=dict(values), distributions=choices, user_attrs=facts)
            self.study.add_trial(trial)
        print(f"{', '.join(f'{key} {value}' for key, value in values.items())}: {outcome(trial)}", flush=True)

    def scored(self) -> "dict[str, FrozenTrial]":
        """The outcomes of the trials that have a score, in the order of the grid."""
        ended = ended_trials(self.study)
        return {name: ended[name] for name in self.trials if name in ended and ended[name].values}

    def keep_best(self) -> str | None:
        """The name of the best trial so far; the others lose their checkpoints."""
        scored = self.scored()
        best = max(scored, key=lambda name: scored[name].values, default=None)
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
        values, settings, run = self.trials[best]
        if not run.is_finished:
            with run.held(settings, resume=True, main=True):
                run_once(self.start, labelled, settings, run, resume=True)
        if not holds_same(folder / "best", run.best):
            run.check_best()
            with whole_folder(folder / "best") as partial:
                shutil.copytree(run.best, partial, dirs_exist_ok=True)
        metric, samples = labelled.task.metrics[0], len(labelled.data.splits["validation"].texts)
        rows, command = [], command_line(labelled.words, 1)
        lines = [["trial", *values, f"validation {metric}", "best step", "seconds", "best"]]
        for number, (name, trial) in enumerate(self.scored().items()):
            assert trial.value is not None
            values, settings, _ = self.trials[name]
            facts = [f"{trial.value:.4f}", trial.user_attrs["step"], f"{trial.user_attrs['seconds']:.0f}"]
            lines.append([*map(str, [number, *values.values(), *facts]), "*" if name == best else ""])
            make = ResultRows(settings, self.start.config, published=labelled.data.published, command=command)
            rows.append(make.row(f"validation {metric} of a trial", trial.value, samples=samples))
        write_rows(folder / "rows.csv", [*rows, *read_rows(run.rows)])
        write_whole(folder / TABLE, "".join("\t".join(line) + "\n" for line in lines))

    def print_results(self) -> None:
        """Print the table of trials of a finished search, and where its results are."""
        folder, table = self.folder, (self.folder / TABLE).read_text(encoding="utf-8")
        print(f"{table.expandtabs(22)}* is the best on validation\nmodel  {folder / 'best'}")
        print(f"table  {folder / TABLE}\nrows   {folder / 'rows.csv'}")


def search(asked: FinetuneOptions, start: StartClassifier, labelled: LabelledInputs) -> None:
    """Train each combination of a grid, and evaluate the one that is best on validation; see `Search`.

    Raises:
        ValueError: Several processes, invalid values, or a folder that holds something else or another search.
        NotFinite: No trial ended with finite numbers.
    """
    found = Search(asked, start, labelled)
    with alone(found.folder, "`nystrom finetune --search`"):
        found.open(resume=asked.resume)
        check_no_jobs(found.folder)
        for name in found.trials:
            if name not in found.scored():
                found.train(name)
                found.keep_best()
        found.finish()
        found.print_results()


# Until a job that was displaced has let go of its files.
_WAIT_SECONDS = 120


def search_in_jobs(asked: FinetuneOptions, start: StartClassifier, labelled: LabelledInputs, cluster: Jobs) -> None:
    """Train each trial of a search in a job, then evaluate the best in another, and wait for them; see `search`.

    The same command continues an interrupted search; while earlier jobs are in the queue, it waits for them.

    Raises:
        ValueError: What `search` raises, or jobs that failed, with their logs.
        NotFinite: No trial had finite numbers.
    """
    folder, since, given = cluster.to, 0, [replace(asked, to=cluster.to), labelled.words]
    search = Search(given[0], start, labelled)
    if alive_jobs(folder):
        search.open(resume=True)
    else:
        with alone(folder, "`nystrom finetune --search`"):
            search.open(resume=asked.resume or (folder / STUDY).is_file())
            since = len(search.study.trials)
    (folder / TRIALS).mkdir(exist_ok=True)

    def ended(name: str) -> str:
        trial = ended_trials(search.study, since).get(name)
        return "" if trial is None else outcome(trial)

    def scored() -> str:
        table = folder / TABLE
        lines = table.read_text(encoding="utf-8").splitlines() if table.is_file() else []
        return "the best trial is scored" if len(lines) == 1 + len(search.scored()) else ""

    trials = [Work(f"{TRIALS}/{name}", train_in_job, [*given, name], partial(ended, name)) for name in search.trials]
    for works in (trials, [Work(SEARCH, finish_in_job, given, scored)]):
        if failures := cluster.run(works):
            said = "; ".join(f"{failure.name} failed, {failure.reason}, log: {failure.log}" for failure in failures)
            raise ValueError(f"{said}. The same command tries again.")
        if not search.scored():
            # Says that there is nothing to finish.
            search.finish()
    search.print_results()


def train_in_job(asked: FinetuneOptions, words: tuple[str, ...], name: str) -> None:
    """Train a trial of a search, from its last checkpoint if there is one."""
    with no_file_bars():
        search = _planned(asked, words)
        search.open(resume=True)
        search.trials[name].run.wait(_WAIT_SECONDS)
        search.train(name)


def finish_in_job(asked: FinetuneOptions, words: tuple[str, ...]) -> None:
    """Evaluate the best trial of a search whose trials are trained."""
    with no_file_bars():
        search = _planned(asked, words)
        with alone(search.folder, "`nystrom finetune --search`", _WAIT_SECONDS):
            search.open(resume=True)
            search.finish()


def _planned(asked: FinetuneOptions, words: tuple[str, ...]) -> Search:
    """Read in a job what the submitting command has already read and checked."""
    assert asked.threads is not None
    torch.set_num_threads(asked.threads)
    usable_precision(asked.precision, usable_device(asked.device))
    start = find_classifier(asked.model, attention=asked.attention, options=asked.options)
    return Search(asked, start, read_texts(asked, words))
