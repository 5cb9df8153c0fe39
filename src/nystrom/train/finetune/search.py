"""A search over a grid of settings: each trial is a fine-tuning in a folder of its own, the best is scored.

    search.json     what is searched
    search.sqlite   the trials, as Optuna keeps them
    trials/NAME/    the run of each trial, see `nystrom.train.run.folder`; checkpoints of the best alone are kept
    trials.tsv      the table of trials
    rows.csv        the validation score of each trial, and all results of the best
    best/           the model of the best trial

Optuna runs the trials by the Trainer's `hyperparameter_search`. Its own training of a trial could neither continue one
that was interrupted nor keep its best checkpoint, so a trial here is a whole run. A search that was killed continues in
the middle of a trial, after its last checkpoint. The best trial is chosen by validation alone; no other is scored on
the test split.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from transformers import Trainer, TrainingArguments

from nystrom.measure.rows import Row, append_rows, check_folder, read_rows
from nystrom.train.finetune.classifier import Start
from nystrom.train.finetune.results import ResultRows, shown
from nystrom.train.finetune.settings import Choices, FinetuneSettings, SearchGrid
from nystrom.train.finetune.start import Material, run_once, settle
from nystrom.train.hardware import processes
from nystrom.train.results import command_line
from nystrom.train.run.folder import RunFolder
from nystrom.train.run.run_trainer import NotFinite

_STUDY = "finetune"


def search(start: Start, material: Material, choices: Choices, grid: SearchGrid, folder: Path, *, resume: bool) -> None:
    """Try each combination of a grid, and score the one that is best on validation.

    Args:
        start: The model.
        material: The texts.
        choices: What is the same in all trials.
        grid: Values to try.
        folder: The folder of the search.
        resume: Continue the search in it.

    Raises:
        ValueError: optuna is not installed, several processes, values that cannot be used, or a folder that holds
            something else or another search.
    """
    try:
        import optuna
    except ModuleNotFoundError as error:
        raise ValueError("search needs optuna, which is not installed: pip install 'nystrom[search]'.") from error
    if processes() > 1:
        raise ValueError(f"search is on, but {processes()} processes share the run: start it without torchrun.")
    settings = [settle(start, material, choices.changed(values)) for values in grid.trials()]
    check_folder(folder)
    try:
        with FileLock(folder / ".lock", timeout=0):
            _check_folder(folder, settings, material.data.fingerprint(), resume=resume)
            # It would log a traceback of an interruption, which is reported without.
            optuna.logging.set_verbosity(optuna.logging.ERROR)
            storage = optuna.storages.RDBStorage(f"sqlite:///{folder / 'search.sqlite'}")
            _Search(start, material, choices, grid, folder, storage).run()
    except Timeout:
        raise ValueError(f"{folder} is in use by another search: wait for it, or take another folder.") from None


def _check_folder(folder: Path, settings: list[FinetuneSettings], digest: str, *, resume: bool) -> None:
    """Check that a folder is new, or holds this search, which is to continue."""
    path = folder / "search.json"
    content = {"data": digest, "trials": [asdict(each) for each in settings]}
    if not path.is_file():
        if strange := [entry.name for entry in folder.iterdir() if entry.name != ".lock"]:
            raise ValueError(f"{folder} holds {strange[0]} and no search: take another folder with --to.")
        if resume:
            raise ValueError(f"{folder} holds no search to resume: leave --resume out, or name its folder with --to.")
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    elif not resume:
        raise ValueError(f"{folder} holds a search: continue it with --resume, or take another folder with --to.")
    elif json.loads(path.read_text(encoding="utf-8")) != json.loads(json.dumps(content)):
        raise ValueError(f"{folder} holds a search of other values, settings or data: take another folder with --to.")


class _Search:
    """The trials of one search; the arguments are those of `search`, and where Optuna keeps them."""

    def __init__(
        self, start: Start, material: Material, choices: Choices, grid: SearchGrid, folder: Path, storage: Any
    ):
        import optuna

        self.start, self.material, self.choices, self.grid, self.folder = start, material, choices, grid, folder
        self.storage, self.states = storage, optuna.trial.TrialState
        self.metric = material.task.metrics[0]
        self.study = optuna.create_study(study_name=_STUDY, storage=storage, direction="maximize", load_if_exists=True)

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
                # The search continues after such a trial; --resume tries it again.
                catch=(NotFinite,),
                sampler=optuna.samplers.RandomSampler(seed=0),
            )
        self._finish()

    def suggest(self, trial: Any) -> dict[str, float]:
        """The values of a trial; all are set when it is enqueued."""
        return {name: trial.suggest_categorical(name, values) for name, values in self.grid.values().items()}

    def train(self, trial: Any) -> float:
        """Train a trial, and give its best validation score."""
        values = self.suggest(trial)
        settings, run = self._place(values)
        others = self._complete()
        try:
            with run.held(settings, resume=run.is_started, main=True):
                trainer = run_once(self.start, self.material, settings, run, resume=run.is_started, score=False)
        except NotFinite as error:
            print(f"a trial failed: {_words(values)}: {error}", flush=True)
            raise
        value, step = trainer.state.best_metric, trainer.state.best_global_step
        assert value is not None, "the last step is evaluated"
        trial.set_user_attr("best step", step)
        trial.set_user_attr("seconds", trainer.seconds)
        number = len(others) + 1
        print(f"trial {number} of {len(self.grid.trials())}: {_words(values)}: {shown(self.metric, value)}", flush=True)
        ranks = [self._rank(other.params, other.value) for other in others]
        if ranks and self._rank(values, value) < max(ranks):
            self._drop(values)
        else:
            for other in others:
                self._drop(other.params)
        return value

    def _rank(self, values: Mapping[str, float], value: float) -> tuple[float, int]:
        """What is larger the better a trial is; the first of equals in the grid is the best."""
        return value, -self.grid.trials().index(dict(values))

    def _finish(self) -> None:
        """Score the best trial, and write the table."""
        if not self._complete():
            raise NotFinite(f"no trial in {self.folder} ended with finite numbers: search lower learning rates.")
        trials = sorted(self._complete(), key=lambda trial: self.grid.trials().index(trial.params))
        best = max(trials, key=lambda trial: self._rank(trial.params, trial.value))
        settings, run = self._place(best.params)
        if not run.is_finished:
            with run.held(settings, resume=True, main=True):
                run_once(self.start, self.material, settings, run, resume=True)
        partial = self.folder / ".best.partial"
        for old in (partial, self.folder / "best"):
            shutil.rmtree(old, ignore_errors=True)
        shutil.copytree(run.best, partial)
        partial.rename(self.folder / "best")
        self._write(trials, best, read_rows(run.rows))
        print(
            f"best of {len(trials)} on validation: {_words(best.params)}\n"
            f"model  {self.folder / 'best'}\ntable  {self.folder / 'trials.tsv'}\nrows   {self.folder / 'rows.csv'}"
        )

    def _write(self, trials: list[Any], best: Any, results: list[Row]) -> None:
        """The table of the trials, and their rows."""
        names = list(self.grid.values())
        header = ["trial", *names, f"validation {self.metric}", "best step", "seconds", "best"]
        lines, rows = ["\t".join(header)], []
        command = command_line(self.material.words, 1)
        samples = len(self.material.data.splits["validation"].texts)
        for number, trial in enumerate(trials):
            cells = [number, *(trial.params[name] for name in names), f"{trial.value:.4f}"]
            cells += [trial.user_attrs["best step"], f"{trial.user_attrs['seconds']:.0f}"]
            lines.append("\t".join(map(str, [*cells, "*" if trial is best else ""])))
            make = ResultRows(
                self._place(trial.params)[0], self.start.config, published=self.material.data.published, command=command
            )
            rows.append(make.row(f"validation {self.metric} of a trial", trial.value, samples=samples))
        (self.folder / "trials.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
        (self.folder / "rows.csv").unlink(missing_ok=True)
        append_rows(self.folder / "rows.csv", [*rows, *results])
        print("\n".join(line.expandtabs(22) for line in lines))

    def _complete(self) -> list[Any]:
        return self.study.get_trials(deepcopy=False, states=[self.states.COMPLETE])

    def _place(self, values: Mapping[str, float]) -> tuple[FinetuneSettings, RunFolder]:
        """The settings of a trial, and its folder."""
        name = "_".join(f"{key}-{value}" for key, value in values.items())
        settings = settle(self.start, self.material, self.choices.changed(values))
        return settings, RunFolder(self.folder / "trials" / name)

    def _drop(self, values: Mapping[str, float]) -> None:
        """Remove the checkpoints of a trial that is not the best."""
        for checkpoint in self._place(values)[1].path.glob("checkpoint-*"):
            shutil.rmtree(checkpoint)


class _TrialTrainer(Trainer):
    """The Trainer that Optuna drives: to train it for a trial is to make the run of that trial."""

    def __init__(self, trials: _Search):
        self.trials = trials
        arguments = TrainingArguments(output_dir=str(trials.folder / "trials"), report_to=[], use_cpu=True)
        # The model of each trial is made by its run; this one stands where the Trainer wants one.
        placeholder: Any = torch.nn.Linear(1, 1)
        super().__init__(args=arguments, model_init=lambda: placeholder)

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None, ignore_keys_for_eval: Any = None) -> Any:
        """Make the run of a trial."""
        self.objective = self.trials.train(trial)


def _words(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())
