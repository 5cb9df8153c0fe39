"""A search over a grid of settings: each trial is a fine-tuning in a folder of its own, the best is scored.

    search.json     what is searched
    search.sqlite   the trials, as Optuna keeps them
    trials/NAME/    the run of each trial, see `nystrom_lab.training.run.folder`, and its outcome; checkpoints of the
    best
                    alone are kept
    trials.tsv      the table of trials, written last
    rows.csv        the validation score of each trial, and all results of the best
    best/           the model of the best trial

Optuna runs the trials by the Trainer's `hyperparameter_search`. Its own training of a trial could neither continue one
that was interrupted nor keep its best checkpoint, so a trial here is a whole run. A search that was killed continues in
the middle of a trial, after its last checkpoint. The best trial is chosen by validation alone; no other is scored on
the test split. A trial whose numbers were not finite is left out, and tried again when the search is continued.

On a cluster the trials are trained by jobs before, see `nystrom_lab.training.finetune.search.jobs`.
"""

import shutil
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainingArguments

from nystrom.whole_files import write_whole
from nystrom.whole_folders import whole_folder
from nystrom_lab.measure.rows import Row, read_rows, write_rows
from nystrom_lab.training.command import command_line
from nystrom_lab.training.finetune.classifier import Start
from nystrom_lab.training.finetune.finetune_model import run_once
from nystrom_lab.training.finetune.request import Material, Request
from nystrom_lab.training.finetune.results import ResultRows, shown
from nystrom_lab.training.finetune.search.database import intact
from nystrom_lab.training.finetune.search.trials import Trial, forget_failures, held, plan_trials
from nystrom_lab.training.grid.slurm import check_no_jobs
from nystrom_lab.training.hardware import processes
from nystrom_lab.training.run.run_trainer import NotFinite

TABLE = "trials.tsv"
_STUDY = "finetune"


def search(request: Request, start: Start, material: Material, *, resume: bool) -> None:
    """Try each combination of a grid, and score the one that is best on validation.

    Args:
        request: What the user asks for.
        start: The model.
        material: The texts.
        resume: Continue the search in the folder.

    Raises:
        ValueError: optuna is not installed, several processes, values that cannot be used, or a folder that holds
            something else or another search.
    """
    check_search()
    trials = plan_trials(request, start, material)
    with held(request.folder, trials, material, resume=resume):
        check_no_jobs(request.folder)
        forget_failures(trials)
        run_search(request, start, material, trials)


def run_search(request: Request, start: Start, material: Material, trials: Sequence[Trial]) -> None:
    """Run the unfinished trials of a search in a folder that this process holds, and score the best.

    Args:
        request: What the user asks for.
        start: The model.
        material: The texts.
        trials: The trials.

    Raises:
        ValueError: Its database is damaged, or cannot be written.
    """
    file = request.folder / "search.sqlite"
    with intact(file):
        _Search(request, start, material, trials, file).run()


def check_search() -> None:
    """Check that a search can be made here.

    Raises:
        ValueError: optuna is not installed, or several processes.
    """
    if find_spec("optuna") is None:
        raise ValueError("search needs optuna, which is not installed: pip install 'nystrom[search]'.")
    if processes() > 1:
        raise ValueError(f"search is on, but {processes()} processes share the run: start it without torchrun.")


def none_finite(folder: Path) -> NotFinite:
    """What to raise where no trial of a folder has a score."""
    return NotFinite(f"no trial in {folder} ended with finite numbers: search lower learning rates.")


def print_results(folder: Path) -> None:
    """Print the table of the trials of a search that has ended, and where its results are."""
    table = (folder / TABLE).read_text(encoding="utf-8")
    print(
        f"{table.expandtabs(22)}* is the best on validation\n"
        f"model  {folder / 'best'}\ntable  {folder / TABLE}\nrows   {folder / 'rows.csv'}"
    )


class _Search:
    """A search in a folder that this process holds.

    Args:
        request: What the user asks for.
        start: The model.
        material: The texts.
        trials: The trials.
        file: The database.
    """

    def __init__(self, request: Request, start: Start, material: Material, trials: Sequence[Trial], file: Path):
        import optuna

        assert request.grid is not None
        # It would log a traceback of an interruption, which is reported without.
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.start, self.material, self.grid, self.trials, self.folder = (
            start, material, request.grid, trials, request.folder,
        )  # fmt: skip
        self.storage = optuna.storages.RDBStorage(f"sqlite:///{file}")
        self.states, self.metric = optuna.trial.TrialState, material.task.metrics[0]
        self.study = optuna.create_study(
            study_name=_STUDY, storage=self.storage, direction="maximize", load_if_exists=True
        )

    def run(self) -> None:
        """Run the unfinished trials, and score the best."""
        import optuna

        for trial in self.study.get_trials(states=[self.states.RUNNING]):
            # This process holds the folder, so no other runs this trial.
            self.study.tell(trial.number, state=self.states.FAIL)
        done = [trial.params for trial in self._complete()]
        waiting = [trial.system_attrs["fixed_params"] for trial in self.study.get_trials(states=[self.states.WAITING])]
        left = [values for values in self.grid.trials() if values not in done]
        for values in left:
            if values not in waiting:
                self.study.enqueue_trial(values)
        if left:
            _TrialTrainer(self).hyperparameter_search(
                hp_space=self.suggest,
                compute_objective=lambda metrics: metrics["eval_selection"],
                n_trials=len(left),
                direction="maximize",
                backend="optuna",
                study_name=_STUDY,
                storage=self.storage,
                load_if_exists=True,
                # The search continues after such a trial.
                catch=(NotFinite,),
                sampler=optuna.samplers.RandomSampler(seed=0),
            )
        self._finish()

    def suggest(self, trial: Any) -> dict[str, float]:
        """The values of a trial; all are set when it is enqueued."""
        return {name: trial.suggest_categorical(name, values) for name, values in self.grid.values().items()}

    def train(self, trial: Any) -> float:
        """Train a trial, and give its best validation score."""
        place = self.grid.trials().index(self.suggest(trial))
        others, this = self._complete(), self.trials[place]
        outcome = this.train(self.start, self.material)
        if outcome.value is None:
            print(f"a trial failed: {this}: {outcome.error}", flush=True)
            raise NotFinite(outcome.error)
        trial.set_user_attr("best step", outcome.step)
        trial.set_user_attr("seconds", outcome.seconds)
        number = len(others) + 1
        print(f"trial {number} of {len(self.trials)}: {this}: {shown(self.metric, outcome.value)}", flush=True)
        if others and (outcome.value, -place) < max(map(self._rank, others)):
            this.drop_checkpoints()
        else:
            for other in others:
                self._trial_of(other).drop_checkpoints()
        return outcome.value

    def _rank(self, trial: Any) -> tuple[float, int]:
        """What is larger the better a trial is; the first of equals in the grid is the best."""
        return trial.value, -self.grid.trials().index(trial.params)

    def _finish(self) -> None:
        """Score the best trial, and write the table."""
        if not self._complete():
            raise none_finite(self.folder)
        trials = sorted(self._complete(), key=lambda trial: self.grid.trials().index(trial.params))
        best = max(trials, key=self._rank)
        run = self._trial_of(best).run
        if not run.is_finished:
            with run.held(self._trial_of(best).settings, resume=True, main=True):
                run_once(self.start, self.material, self._trial_of(best).settings, run, resume=True)
        with whole_folder(self.folder / "best") as partial:
            shutil.copytree(run.best, partial, dirs_exist_ok=True)
        self._write(trials, best, read_rows(run.rows))
        print_results(self.folder)

    def _write(self, trials: list[Any], best: Any, results: list[Row]) -> None:
        """The rows of the trials, and their table."""
        names = list(self.grid.values())
        rows, command = [], command_line(self.material.words, 1)
        samples = len(self.material.data.splits["validation"].texts)
        lines = [["trial", *names, f"validation {self.metric}", "best step", "seconds", "best"]]
        for number, trial in enumerate(trials):
            cells = [number, *(trial.params[name] for name in names), f"{trial.value:.4f}"]
            cells += [trial.user_attrs["best step"], f"{trial.user_attrs['seconds']:.0f}"]
            lines.append([*map(str, cells), "*" if trial is best else ""])
            settings, published = self._trial_of(trial).settings, self.material.data.published
            make = ResultRows(settings, self.start.config, published=published, command=command)
            rows.append(make.row(f"validation {self.metric} of a trial", trial.value, samples=samples))
        write_rows(self.folder / "rows.csv", [*rows, *results])
        write_whole(self.folder / TABLE, "".join("\t".join(line) + "\n" for line in lines))

    def _complete(self) -> list[Any]:
        return self.study.get_trials(deepcopy=False, states=[self.states.COMPLETE])

    def _trial_of(self, trial: Any) -> Trial:
        return self.trials[self.grid.trials().index(trial.params)]


class _TrialTrainer(Trainer):
    """The Trainer that Optuna drives: to train it for a trial is to make the run of that trial."""

    def __init__(self, search: _Search):
        self.search = search
        arguments = TrainingArguments(output_dir=str(search.folder / "trials"), report_to=[], use_cpu=True)
        # The model of each trial is made by its run; this one stands where the Trainer wants one.
        placeholder: Any = torch.nn.Linear(1, 1)
        super().__init__(args=arguments, model_init=lambda: placeholder)

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None, ignore_keys_for_eval: Any = None) -> Any:
        """Make the run of a trial."""
        self.objective = self.search.train(trial)
